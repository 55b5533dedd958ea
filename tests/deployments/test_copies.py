"""Chunks sent to the shard that a user moves to: whatever fails, nothing is lost, left over or waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from moving_pair import ALICE, FACTS, QUESTION, Pair, two_shards
from redis.asyncio import Redis
from tiered_shard import chunk_files

from connector.moves import PEER, Move
from deployments import arrivals, copies, deterministic_lines
from deployments.deterministic import DeterministicEngine, mark
from deployments.deterministic_lines import SocketLine
from deployments.memory_calls import ArrivedCall, DropCopyCall, MemoryCall, OfferCall, UpdateCall
from deployments.mover import _Move
from sharding.errors import DeadlineExceeded, EngineFailed, MemshardError, ShardGone, Unavailable, WrongShard
from sharding.ids import Placement, ShardId, UserId
from sharding.move import Do, End, Outcome
from sharding.placement import PlacementPolicy


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deterministic_lines, "STALL_S", 0.3)


@pytest.fixture
async def pair(own_valkey: tuple[Redis, str], tmp_path: Path) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as opened:
        pair = await two_shards(opened, own_valkey, tmp_path)
        pair.meet()
        await pair.begin()
        yield pair
        for shard in (pair.one, pair.other):
            await shard.shard.tiers.writer.written()
            shard.shard.tiers.check_integrity()
            engine = shard.shard.engine
            assert isinstance(engine, DeterministicEngine)
            device = shard.shard.tiers.device
            assert set(engine.chunks) == {id_ for id_ in engine.chunks if device.peek_resident(id_)}, "left on a worker"
            assert len(device) == len(engine.chunks), "room that is never given back"


def encoded_tokens(pair: Pair) -> int:
    return int(pair.other.shard.engine.counters["encode_prefilled_tokens"])


async def left_nothing(pair: Pair) -> None:
    """The target has nothing of a user who stayed."""
    assert (await pair.placement()).shard == pair.one.me
    assert pair.other.shard.tiers.ids_of(ALICE) == set()


async def test_every_chunk_is_injected_at_the_target_and_none_encoded(pair: Pair) -> None:
    before = encoded_tokens(pair)
    report = await pair.move()
    assert report.end is End.MOVED
    assert report.sent_chunks == len(FACTS)
    read, finished = await pair.other.asked(await pair.placement(), QUESTION)
    assert sorted(read) == sorted(map(mark, FACTS))
    assert finished.memory.injected_tokens >= finished.memory.memory_tokens > 0
    assert encoded_tokens(pair) == before
    await pair.other.shard.tiers.writer.written()
    disk = pair.other.shard.tiers.files[0]
    assert len(disk.ledger) == len(FACTS), "what was sent is written to files, too"


async def test_what_is_in_files_alone_is_sent_from_there(pair: Pair) -> None:
    await pair.one.shard.tiers.writer.written()
    await pair.one.shard.tiers.demote(ALICE)
    assert pair.one.shard.tiers.device.ids_of(ALICE) == []
    before = encoded_tokens(pair)
    assert (await pair.move()).sent_chunks == len(FACTS)
    await pair.everything_is_served_by_one()
    assert encoded_tokens(pair) == before


async def test_a_damaged_file_keeps_no_other_chunk_from_being_sent(pair: Pair) -> None:
    await pair.one.shard.tiers.writer.written()
    await pair.one.shard.tiers.demote(ALICE)
    damaged = chunk_files(Path(pair.one.shard.tiers.files[0].url))[2]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert (await pair.move()).sent_chunks == len(FACTS) - 1
    await pair.everything_is_served_by_one()


async def test_what_has_no_room_on_the_targets_device_goes_to_its_files(pair: Pair) -> None:
    pair.other.shard.tiers.device.budget_bytes = pair.other.shard.tiers.device.bytes
    assert (await pair.move()).sent_chunks == len(FACTS)
    assert len(pair.other.shard.tiers.files[0].ledger) == len(FACTS)
    assert pair.other.shard.tiers.device.ids_of(ALICE) == []
    await pair.everything_is_served_by_one()


async def test_a_target_without_any_room_encodes_again(pair: Pair) -> None:
    for ledger in (pair.other.shard.tiers.device, pair.other.shard.tiers.files[0].ledger):
        ledger.budget_bytes = ledger.bytes
    report = await pair.move()
    assert (report.end, report.sent_chunks) == (End.MOVED, 0)
    assert pair.other.shard.arrivals.counters["refused_offers"] > 0
    await pair.everything_is_served_by_one()


async def test_another_model_is_sent_nothing(pair: Pair) -> None:
    pair.other.shard.engine.model_digest = "another"
    report = await pair.move()
    assert (report.end, report.sent_chunks) == (End.MOVED, 0)
    await pair.everything_is_served_by_one()


ERRORS = [
    ShardGone("It is gone.", certain=True),
    ShardGone("It is not to be found.", certain=False),
    DeadlineExceeded("It took too long."),
    EngineFailed("It died."),
    WrongShard("It says that this is not the owner."),
]


@pytest.mark.parametrize("heard", [False, True], ids=["unheard", "answer lost"])
@pytest.mark.parametrize("error", ERRORS, ids=[f"{type(e).__name__}{e.details}" for e in ERRORS])
@pytest.mark.parametrize("kind", [OfferCall, ArrivedCall])
async def test_a_call_that_fails_loses_nothing(pair: Pair, kind: type, error: MemshardError, heard: bool) -> None:
    async def fails(shard: ShardId, call: MemoryCall[Any]) -> None:
        if isinstance(call, kind):
            raise error

    assert pair.neighbours is not None
    setattr(pair.neighbours, "after" if heard else "before", fails)
    report = await pair.move()
    assert report.end is (End.STAYED if isinstance(error, ShardGone) else End.MOVED)
    await pair.everything_is_served_by_one()
    if report.end is End.STAYED:
        await left_nothing(pair)
    pair.meet()
    assert (await pair.move()).end is End.MOVED
    await pair.everything_is_served_by_one()


@pytest.mark.parametrize("who", ["source", "target"])
@pytest.mark.parametrize("what", ["dies", "stops in the middle", "sends something else", "flips a bit", "is late"])
async def test_a_line_that_fails_in_the_middle_loses_nothing(
    pair: Pair, who: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, receive = SocketLine.send, SocketLine.receive

    async def sends(line: SocketLine, hello: bytes, frames: Any, sizes: Any) -> None:
        if what == "dies":
            line.close()
        elif what == "is late":
            await asyncio.sleep(2 * deterministic_lines.STALL_S)
        elif what == "stops in the middle":
            frames, sizes = frames[:2], sizes[:2]
        elif what == "sends something else":
            hello = bytes(len(hello))
        else:
            frames = [frames[0][:-1] + bytes([frames[0][-1] ^ 1]), *frames[1:]]
        await send(line, hello, frames, sizes)

    async def receives(line: SocketLine, hello: bytes, sizes: Any) -> list[bytes]:
        if what == "dies":
            line.close()
        elif what == "is late":
            await asyncio.sleep(2 * deterministic_lines.STALL_S)
        elif what == "stops in the middle":
            await receive(line, hello, sizes[:2])
            line.close()
        elif what == "sends something else":
            hello = bytes(len(hello))
        return await receive(line, hello, sizes)

    if who == "source":
        monkeypatch.setattr(SocketLine, "send", sends)
    else:
        monkeypatch.setattr(SocketLine, "receive", receives)
    report = await pair.move()
    assert report.end is End.MOVED
    await pair.everything_is_served_by_one()
    monkeypatch.undo()
    assert (await pair.move()).end is End.MOVED
    await pair.everything_is_served_by_one()


ON_THE_WAY = [Do.COPY, Do.PAUSE, Do.COPY_TAIL, Do.CLOSE, Do.SWITCH, Do.GO, Do.DROP]


@pytest.mark.parametrize("how", ["fails", "is cut off", "is cut off when it is done"])
@pytest.mark.parametrize("step", ON_THE_WAY)
async def test_whatever_breaks_in_a_move_nobody_who_talks_meanwhile_notices(
    pair: Pair, step: Do, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken: list[Do] = []
    outcome = _Move._outcome

    async def breaks(move: _Move, do: Do) -> Outcome:
        if do is not step or broken or (do is Do.GO and how == "fails"):
            return await outcome(move, do)
        broken.append(do)
        if how == "fails":
            return Outcome.FAILED
        if how == "is cut off when it is done":
            await outcome(move, do)
        raise asyncio.CancelledError

    monkeypatch.setattr(_Move, "_outcome", breaks)
    monkeypatch.setattr("deployments.mover.RETRY_S", 0.0)
    async with pair.talked_to():
        await asyncio.sleep(0.01)
        if how == "fails":
            await pair.move()
        else:
            with pytest.raises(asyncio.CancelledError):
                await pair.move()
        await asyncio.sleep(0.01)
        assert (await pair.move()).end is End.MOVED
    await pair.everything_is_served_by_one()
    assert len(pair.told) > len(FACTS)
    for shard in (pair.one, pair.other):
        await shard.shard.encoder.settled(ALICE)
        await shard.shard.users.background_done()


async def test_a_target_that_died_while_it_was_copied_to_is_not_moved_to(pair: Pair) -> None:
    async def dies(shard: ShardId, call: MemoryCall[Any]) -> None:
        if isinstance(call, ArrivedCall):
            raise ShardGone("It died.", certain=True)

    assert pair.neighbours is not None
    pair.neighbours.before = dies
    report = await pair.move()
    assert report.end is End.STAYED
    await pair.everything_is_served_by_one()


async def test_what_a_correction_makes_go_while_it_is_copied_is_gone_there_before_the_answer(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "SLICE_BYTES", 64)  # a chunk each
    placement = await pair.placement()
    here, there = pair.one.shard.tiers, pair.other.shard.tiers
    corrected = "boat 2 is called Zoe"

    async def corrects(shard: ShardId, call: MemoryCall[Any]) -> None:
        if isinstance(call, OfferCall) and len(there.ids_of(ALICE)) == len(FACTS) - 1 and not gone:
            before = here.ids_of(ALICE)
            pair.told[pair.told.index(FACTS[2])] = corrected
            await pair.one.shard.ask(UpdateCall("u", placement, pair.ids[FACTS[2]], corrected))
            gone.update(before - here.ids_of(ALICE))
            assert not gone & there.ids_of(ALICE)

    gone: set[str] = set()
    assert pair.neighbours is not None
    pair.neighbours.before = corrects
    assert (await pair.move()).end is End.MOVED
    assert gone
    await pair.everything_is_served_by_one()


async def test_chunks_are_not_gone_while_the_target_does_not_confirm_it(pair: Pair) -> None:
    copy = pair.one.shard.courier.copy(await pair.placement(), pair.other.me)
    assert copy is not None
    assert await copy.run()
    everything = pair.one.shard.tiers.ids_of(ALICE)
    one = sorted(everything)[:1]

    async def silent(shard: ShardId, call: MemoryCall[Any]) -> None:
        raise DeadlineExceeded("It took too long.")

    assert pair.neighbours is not None
    pair.neighbours.before = silent
    with pytest.raises(Unavailable, match="copy"):
        await pair.one.shard.encoder.forget(one)
    pair.neighbours.calm()
    await pair.one.shard.encoder.forget([])  # as with the next ones: what was not confirmed is asked for again
    assert pair.other.shard.tiers.ids_of(ALICE) == everything - set(one)
    await copy.undo()
    copy.close()
    await left_nothing(pair)


async def test_a_guest_who_does_not_come_is_seen_off(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "GUEST_S", 0.05)
    copy = pair.one.shard.courier.copy(await pair.placement(), pair.other.me)
    assert copy is not None
    assert await copy.run()
    copy.close()  # its process was killed
    async with asyncio.timeout(10):
        while pair.other.shard.tiers.ids_of(ALICE):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert pair.other.shard.arrivals.counters["guests_seen_off"] == 1
    await pair.everything_is_served_by_one()


@pytest.mark.parametrize("more", [-1, 1], ids=["an older epoch", "an epoch to come"])
async def test_an_offer_under_an_epoch_that_does_not_stand_is_refused(pair: Pair, more: int) -> None:
    standing = await pair.placement()
    stale = Placement(ALICE, standing.shard, standing.epoch + more)
    offer = OfferCall("t", stale, "line", pair.one.shard.engine.model_digest, (), (("0" * 32, 3),))
    for call in (offer, DropCopyCall("t", stale, None)):
        with pytest.raises(WrongShard):
            await pair.other.shard.ask(call)
    assert pair.other.shard.tiers.ids_of(ALICE) == set()


async def test_the_owner_takes_no_offers_of_its_own_user(pair: Pair) -> None:
    standing = await pair.placement()
    before = pair.one.shard.tiers.ids_of(ALICE)
    with pytest.raises(WrongShard):
        await pair.one.shard.ask(DropCopyCall("t", standing, None))
    assert pair.one.shard.tiers.ids_of(ALICE) == before


async def test_a_large_memory_goes_in_several_transfers(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "SLICE_BYTES", 64)
    report = await pair.move()
    assert report.sent_chunks == len(FACTS)
    assert pair.neighbours is not None
    assert len(pair.neighbours.of(ArrivedCall)) == len(FACTS)
    await pair.everything_is_served_by_one()


async def test_a_line_is_kept_for_the_next_user(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    listen = DeterministicEngine.listen

    async def counting(engine: DeterministicEngine, line: str, nccl: bool) -> list[tuple[str, int]]:
        opened.append(line)
        return await listen(engine, line, nccl)

    monkeypatch.setattr(DeterministicEngine, "listen", counting)
    for _ in range(4):  # there and back, twice
        assert (await pair.move()).sent_chunks == len(FACTS)
    assert len(opened) == 2
    assert all(Move(PEER + line, "", "", "", ()).over_line for line in opened)


@pytest.mark.parametrize("who", ["source", "target"])
async def test_a_line_that_was_lost_since_the_last_move_is_opened_again(pair: Pair, who: str) -> None:
    for _ in range(2):
        await pair.move()
    engine = (pair.one if who == "source" else pair.other).shard.engine
    assert isinstance(engine, DeterministicEngine)
    engine.lines.close()
    assert (await pair.move()).sent_chunks == len(FACTS)
    await pair.everything_is_served_by_one()


async def test_what_could_not_be_sent_is_not_tried_again_while_writes_wait(pair: Pair) -> None:
    async def fails(shard: ShardId, call: MemoryCall[Any]) -> None:
        if isinstance(call, OfferCall):
            waiting.append(pair.one.shard.table.memories()[0].write_lock.locked())
            raise DeadlineExceeded("It took too long.")

    waiting: list[bool] = []
    assert pair.neighbours is not None
    pair.neighbours.before = fails
    assert (await pair.move()).end is End.MOVED
    assert waiting == [False, False]
    await pair.everything_is_served_by_one()


async def test_a_drained_shard_sends_its_users_chunks_along(pair: Pair) -> None:
    bob = await pair.one.owns("bob")
    await pair.one.told(bob, "bob rows")
    before = encoded_tokens(pair)
    report = await pair.one.shard.mover.drain(pair.one.me, PlacementPolicy(), 20.0)
    assert (report.moved, report.left) == (2, 0)
    assert pair.one.shard.courier.counters["sent_chunks"] == len(FACTS) + 1
    for user in ("alice", "bob"):
        placement = await pair.one.directory.lookup(UserId(user))
        assert placement is not None
        _, finished = await pair.other.asked(placement, QUESTION)
        assert finished.memory.injected_tokens >= finished.memory.memory_tokens > 0
    assert encoded_tokens(pair) == before
