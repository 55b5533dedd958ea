"""Chunks over a line between two workers: byte for byte, or not at all; who is silent or wrong is not waited for."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from connector import groups
from connector import line as lines
from connector.chunk import ChunkId, KVShape
from connector.groups import Door, Group, LineFailed, dial
from connector.line import Line, Sent
from connector.moves import DEVICE, PEER, Move, Outcome, by_nccl
from connector.store import ChunkStore
from connector.tier_jobs import TierJobs

CPU = torch.device("cpu")
HELLO = bytes(range(32))
SHAPE = KVShape(layers=2, kv_heads=1, head_dim=4, dtype=torch.bfloat16)
TOKENS = 3
IDS = [ChunkId(f"{n:032x}") for n in range(5)]
REFS = tuple((id_, TOKENS) for id_ in IDS)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "CONNECT_S", 1.0)
    monkeypatch.setattr(groups, "STALL_S", 1.0)


def kv_of(number: int) -> torch.Tensor:
    return torch.randn((2, 2, TOKENS, 1, 4), generator=torch.Generator().manual_seed(number)).to(torch.bfloat16)


class Ends:
    """Both ends of a line in this process."""

    def __init__(self, wrapped: Callable[[Group], Group] = lambda group: group) -> None:
        door = Door("127.0.0.1", "token", CPU, False)
        self.target = Line(door.connect)
        self.source = Line(lambda: wrapped(dial(door.address, "127.0.0.1", "token", CPU, False)))

    def send(self, kvs: list[torch.Tensor | None], size: int, hello: bytes = HELLO) -> Future[list[bool]]:
        chunks = [lambda kv=kv, n=n: None if kv is None else Sent(10 * n, kv) for n, kv in enumerate(kvs)]
        return self.source.run(lambda line: line.send(hello, chunks, [size] * len(kvs)))

    def receive(self, rooms: list[torch.Tensor], hello: bytes = HELLO) -> Future[list[int | None]]:
        return self.target.run(lambda line: line.receive(hello, rooms))

    def close(self) -> None:
        self.source.close()
        self.target.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def failed(future: Future[Any]) -> bool:
    return isinstance(future.exception(10), LineFailed)


@pytest.mark.parametrize("piece_bytes", [7, 48, 1 << 20])
def test_what_is_sent_arrives_byte_for_byte(ends: Ends, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(lines, "WINDOW", 2)
    kvs = [kv_of(n) for n in range(9)]
    for _ in range(3):  # a line is used again and again
        rooms = [torch.zeros_like(kv) for kv in kvs]
        received, sent = ends.receive(rooms), ends.send([*kvs], kvs[0].nbytes)
        assert sent.result(10) == [True] * 9
        assert received.result(10) == [10 * n for n in range(9)]
        assert all(torch.equal(room, kv) for room, kv in zip(rooms, kvs, strict=True))


def test_what_is_not_here_does_not_come_and_the_rest_does(ends: Ends) -> None:
    kvs = [kv_of(0), None, kv_of(2), torch.zeros(1)]
    rooms = [torch.zeros_like(kv_of(0)) for _ in kvs]
    received, sent = ends.receive(rooms), ends.send(kvs, kv_of(0).nbytes)
    assert sent.result(10) == [True, False, True, False]
    assert received.result(10) == [0, None, 20, None]


def test_another_transfer_is_refused_and_breaks_the_line(ends: Ends) -> None:
    rooms = [torch.zeros_like(kv_of(0))]
    received, sent = ends.receive(rooms, bytes(32)), ends.send([kv_of(0)], kv_of(0).nbytes)
    assert failed(received)
    sent.exception(10)  # it may all have been on its way by then
    assert not rooms[0].any()
    again = ends.receive(rooms), ends.send([kv_of(0)], kv_of(0).nbytes)
    assert all(map(failed, again))


def test_a_flipped_bit_is_found_and_the_other_chunks_are_whole() -> None:
    class Flipping:
        device = CPU

        def __init__(self, group: Group) -> None:
            self._group, self.sent = group, 0

        def send(self, tensor: torch.Tensor) -> Callable[[], None]:
            self.sent += 1
            if self.sent == 3:  # the second chunk
                tensor = tensor.clone()
                tensor[5] ^= 1
            return self._group.send(tensor)

        def receive(self, tensor: torch.Tensor) -> Callable[[], None]:
            return self._group.receive(tensor)

        def close(self) -> None:
            self._group.close()

    ends = Ends(Flipping)
    kvs = [kv_of(n) for n in range(3)]
    received, _ = ends.receive([torch.zeros_like(kv) for kv in kvs]), ends.send([*kvs], kvs[0].nbytes)
    assert received.result(10) == [0, None, 20]
    ends.close()


@pytest.mark.parametrize("who", ["the source", "the target"])
def test_who_is_silent_is_not_waited_for(ends: Ends, who: str) -> None:
    kv = kv_of(0)
    sent, received = ends.send([kv], kv.nbytes), ends.receive([torch.zeros_like(kv)])
    assert (sent.result(10), received.result(10)) == ([True], [0])
    work = ends.receive([torch.zeros_like(kv)]) if who == "the source" else ends.send([kv] * 9, kv.nbytes)
    began = time.monotonic()
    assert failed(work)
    assert time.monotonic() - began < 5 * groups.STALL_S
    late = ends.send([kv], kv.nbytes) if who == "the source" else ends.receive([torch.zeros_like(kv)])
    assert failed(late)


def test_nobody_at_the_door_and_no_door_are_failures() -> None:
    alone = Line(Door("127.0.0.1", "token", CPU, False).connect)
    lost = Line(lambda: dial(("127.0.0.1", 1), "127.0.0.1", "token", CPU, False))
    assert failed(alone.run(lambda line: line.receive(HELLO, [])))
    assert failed(lost.run(lambda line: line.send(HELLO, [], [])))
    alone.close()
    lost.close()


def test_who_does_not_know_the_token_meets_nobody() -> None:
    door = Door("127.0.0.1", "token", CPU, False)
    target = Line(door.connect)
    source = Line(lambda: dial(door.address, "127.0.0.1", "a guess", CPU, False))
    assert failed(source.run(lambda line: line.send(HELLO, [], [])))
    assert failed(target.run(lambda line: line.receive(HELLO, [])))
    source.close()
    target.close()


def _send_for_ever(address: tuple[str, int], begun: Any) -> None:
    """Another process: half of what it says it sends."""
    groups.STALL_S = 60.0
    source = Line(lambda: dial(address, "127.0.0.1", "token", CPU, False))
    kv = torch.zeros(1 << 20, dtype=torch.uint8)

    def slowly(n: int) -> Sent:
        if n == 2:
            begun.set()
            time.sleep(60)
        return Sent(n, kv)

    source.run(lambda line: line.send(HELLO, [lambda n=n: slowly(n) for n in range(4)], [kv.nbytes] * 4)).result()


def test_a_peer_that_is_killed_amid_a_copy_is_found_out_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "CONNECT_S", 60.0)
    monkeypatch.setattr(groups, "STALL_S", 60.0)
    processes = multiprocessing.get_context("spawn")
    begun = processes.Event()
    door = Door("127.0.0.1", "token", CPU, False)
    target = Line(door.connect)
    rooms = [torch.zeros(1 << 20, dtype=torch.uint8) for _ in range(4)]
    received = target.run(lambda line: line.receive(HELLO, rooms))
    source = processes.Process(target=_send_for_ever, args=(door.address, begun))
    source.start()
    assert begun.wait(60)
    assert source.pid is not None
    os.kill(source.pid, signal.SIGKILL)
    source.join(10)
    assert failed(received)  # in ten seconds, though the deadline is a minute
    target.close()


class Worker:
    """A worker's stores and what moves its chunks."""

    def __init__(self, chunks: int) -> None:
        budget = chunks * TOKENS * SHAPE.token_bytes
        self.device, self.host = ChunkStore(SHAPE, CPU, budget), ChunkStore(SHAPE, CPU, 0)
        self.jobs = TierJobs(self.device, self.host, 0)

    def holds(self, *numbers: int) -> None:
        for n in numbers:
            room = self.device.arriving(IDS[n], TOKENS, 7 + n)
            assert room is not None
            room.copy_(kv_of(n))
            self.device.publish(IDS[n], 7 + n)

    def outcomes(self, job: str) -> dict[ChunkId, Outcome]:
        ends_at = time.monotonic() + 20
        while (outcomes := self.jobs.poll(job, 0.01)) is None:
            assert time.monotonic() < ends_at
        return outcomes

    def check(self) -> None:
        self.device.check_integrity()
        assert not self.device._arriving, "room that is never given back"


@pytest.fixture
def workers() -> Iterator[tuple[Worker, Worker]]:
    source, target = Worker(5), Worker(3)
    connected(source, target)
    yield source, target
    for worker in (source, target):
        worker.check()
        worker.jobs.close()


def connected(source: Worker, target: Worker) -> None:
    door = Door("127.0.0.1", "line", CPU, False)
    target.jobs.lines.open("line", door.connect)
    source.jobs.lines.open("line", lambda: dial(door.address, "127.0.0.1", "line", CPU, False))


def move(source: str, target: str, fence: str = "1:1", refs: Any = REFS) -> Move:
    return Move(source, target, "digest", "alice", refs, fence)


def test_chunks_are_published_when_they_are_whole_and_stay_where_they_were(workers: tuple[Worker, Worker]) -> None:
    source, target = workers
    source.holds(0, 1, 3)
    target.holds(3)
    source.jobs.begin("send", move(DEVICE, PEER + "line"))
    target.jobs.begin("receive", move(PEER + "line", DEVICE))
    assert list(source.outcomes("send").values()) == [
        Outcome.DONE,
        Outcome.DONE,
        Outcome.MISSING,
        Outcome.DONE,
        Outcome.MISSING,
    ]
    told = target.outcomes("receive")
    assert [told[id_] for id_ in IDS] == [
        Outcome.DONE,
        Outcome.DONE,
        Outcome.NO_ROOM,  # three chunks are all that it has room for: the others' room is theirs until they are known
        Outcome.DONE,  # it had it
        Outcome.NO_ROOM,
    ]
    for n in (0, 1, 3):
        chunk = target.device.get(IDS[n])
        assert chunk is not None
        assert chunk.position == 7 + n
        assert torch.equal(chunk.kv, kv_of(n))
        assert source.device.get(IDS[n]) is not None


def test_chunks_go_from_file_to_file(workers: tuple[Worker, Worker], tmp_path: Path) -> None:
    source, target = workers
    source.holds(*range(5))
    here, there = str(tmp_path / "here"), str(tmp_path / "there")
    for name, step in {"store": (DEVICE, here), "send": (here, PEER + "line")}.items():
        source.jobs.begin(name, move(*step))
        if name == "send":
            target.jobs.begin("receive", move(PEER + "line", there))
        assert set(source.outcomes(name).values()) == {Outcome.DONE}
    assert set(target.outcomes("receive").values()) == {Outcome.DONE}
    target.jobs.begin("load", move(there, DEVICE, refs=REFS[:3]))
    assert set(target.outcomes("load").values()) == {Outcome.DONE}
    for n in range(3):
        chunk = target.device.get(IDS[n])
        assert chunk is not None
        assert (chunk.position, torch.equal(chunk.kv, kv_of(n))) == (7 + n, True)


@pytest.mark.parametrize(
    "other",
    [
        move(PEER + "line", DEVICE, fence="1:2", refs=REFS[:3]),
        move(PEER + "line", DEVICE, fence="2:1", refs=REFS[:3]),
        move(PEER + "line", DEVICE, refs=REFS[:3][::-1]),
        Move(PEER + "line", DEVICE, "another digest", "alice", REFS[:3], "1:1"),
        Move(PEER + "line", DEVICE, "digest", "bob", REFS[:3], "1:1"),
    ],
    ids=["another epoch", "another transfer", "another order", "another model", "another user"],
)
def test_what_the_ends_do_not_agree_upon_is_not_taken_and_the_room_is_given_back(
    workers: tuple[Worker, Worker], other: Move
) -> None:
    source, target = workers
    source.holds(0, 1, 2)
    source.jobs.begin("send", move(DEVICE, PEER + "line", refs=REFS[:3]))
    target.jobs.begin("receive", other)
    assert set(target.outcomes("receive").values()) == {Outcome.FAILED}
    source.outcomes("send")
    assert target.device.bytes == 0


def test_rank_speaks_to_the_same_rank_only() -> None:
    source, target = Worker(5), Worker(3)
    target.jobs.lines._rank = 1
    connected(source, target)
    source.holds(0)
    source.jobs.begin("send", move(DEVICE, PEER + "line", refs=REFS[:1]))
    target.jobs.begin("receive", move(PEER + "line", DEVICE, refs=REFS[:1]))
    assert set(target.outcomes("receive").values()) == {Outcome.FAILED}
    source.outcomes("send")
    for worker in (source, target):
        worker.check()
        worker.jobs.close()


def test_a_line_that_is_hung_up_fails_what_waits_and_what_comes(workers: tuple[Worker, Worker]) -> None:
    source, target = workers
    source.holds(0, 1, 2)
    for job in ("one", "two"):
        target.jobs.begin(job, move(PEER + "line", DEVICE, refs=REFS[:3]))
    target.jobs.lines.hang_up("line")
    target.jobs.begin("three", move(PEER + "line", DEVICE, refs=REFS[:3]))
    for job in ("one", "two", "three"):
        assert set(target.outcomes(job).values()) <= {Outcome.FAILED, Outcome.NO_ROOM}
    connected(source, target)
    source.jobs.begin("send", move(DEVICE, PEER + "line", refs=REFS[:3]))
    target.jobs.begin("receive", move(PEER + "line", DEVICE, refs=REFS[:3]))
    assert set(target.outcomes("receive").values()) == {Outcome.DONE}


def test_nccl_is_for_as_many_different_gpus_on_both_sides() -> None:
    assert by_nccl(["cuda:a"], ["cuda:b"])
    assert by_nccl(["cuda:a", "cuda:b"], ["cuda:c", "cuda:d"])
    for ours, theirs in ((["cuda:a"], ["cuda:a"]), (["cpu"], ["cuda:b"]), ([], []), (["cuda:a"], ["cuda:b", "cuda:c"])):
        assert not by_nccl(ours, theirs)


@pytest.mark.gpu
def test_chunks_on_a_gpu_go_over_gloo_by_way_of_the_host() -> None:
    """Both ends on one GPU, which NCCL refuses."""
    kv = kv_of(0).cuda()
    ends, room = Ends(), torch.zeros_like(kv_of(0)).cuda()
    received, _ = ends.receive([room]), ends.send([kv], kv.nbytes)
    assert received.result(10) == [0]
    torch.cuda.synchronize()
    assert torch.equal(room, kv)
    ends.close()


@pytest.mark.gpu
def test_chunks_go_from_gpu_to_gpu_over_nccl() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL needs two GPUs")
    door = Door("127.0.0.1", "token", torch.device("cuda:1"), True)
    target = Line(door.connect)
    source = Line(lambda: dial(door.address, "127.0.0.1", "token", torch.device("cuda:0"), True))
    kv, room = kv_of(0).to("cuda:0"), torch.zeros_like(kv_of(0)).to("cuda:1")
    received = target.run(lambda line: line.receive(HELLO, [room]))
    source.run(lambda line: line.send(HELLO, [lambda: Sent(3, kv)], [kv.nbytes])).result(30)
    assert received.result(30) == [3]
    assert torch.equal(room.cpu(), kv.cpu())
    source.close()
    target.close()
