"""How fast a user moves from one shard to another, beside what gloo does between the same two processes.

Two shards with an engine each, every engine on a core of its own. Each round, in random order:

    raw          as many bytes over the same line, with plain sends and receives: in messages of 4 MiB, into memory that
                 is there already; and in messages of a chunk each, into new memory, as chunks arrive
    move         the user moves to the other shard, and is asked for there

then, in rounds of their own, the user moves while facts are told all the time: `paused` is how long the longest of them
took, beside those that met no move.

`line` is the rate of the workers' transfer: checksums, hello and table included. `copy` is the rate of the whole copy
as the source's shard sees it, with offers, room, and questions whether it is done. Nothing is encoded again, or the run
fails.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

import psutil
from rich.console import Console
from rich.progress import track

from benchmarks.facts import person_facts
from benchmarks.in_process import OpenShard, shards_in_process
from deployments.copies import SLICE_BYTES
from deployments.memory_calls import AddCall, MemoryCall, MoveCall, MoveReport
from sharding.errors import MemshardError, WrongShard
from sharding.ids import Placement, ShardId
from sharding.move import End
from sharding.placement import ShardReport

if TYPE_CHECKING:
    from connector.engine import MemoryEngine
    from deployments.shard import Shard

Arm = Literal["raw, 4 MiB messages", "raw, chunks into new memory", "move"]
ARMS: tuple[Arm, ...] = get_args(Arm)
RAW = ARMS[:2]
T = TypeVar("T")

FACTS, QUICK_FACTS = 200, 50
A_PERSON = 50  # as many facts as are invented of one
ROUNDS, QUICK_ROUNDS = 15, 5
WRITTEN, QUICK_WRITTEN = 8, 3  # moves under writes
CALM_S = 0.5  # between those
SEED = 20265
MIB = 1 << 20
WINDOW = 16


@dataclass(frozen=True, slots=True)
class Rate:
    """One transfer; `copy_s` of a move alone: everything that the copy took."""

    arm: Arm
    round: int
    bytes: int
    line_s: float
    copy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    model: str
    facts: int
    chunk_bytes: int  # of one, on average
    rates: list[Rate]
    reports: list[MoveReport]  # of moves under writes
    waited_s: list[float]  # for each of them, the longest that a fact took which was told meanwhile
    calm_s: list[float]  # what facts took that met no move


class Neighbours:
    """Shards of this process call each other."""

    def __init__(self, shards: dict[ShardId, Shard]) -> None:
        self._shards = shards

    async def ask(self, shard: ShardId, call: MemoryCall[T], deadline_s: float) -> T:
        async with asyncio.timeout(deadline_s):
            return await self._shards[shard].ask(call)


async def measure(model: Path | None, console: Console, quick: bool) -> Measured:
    """Raises `MemshardError` where an engine does not start, or a move does not do what it should."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # raw rates are measured by functions of ours in the workers
    cores = sorted(os.sched_getaffinity(0))
    names = {ShardId("one"): cores[0], ShardId("other"): cores[-1]}
    async with shards_in_process(model, names) as homes:
        pair = Pair(homes)
        pin(list(names.values()))
        await pair.begin()
        facts = QUICK_FACTS if quick else FACTS
        with console.status(f"Encoding {facts} facts"):
            placement = await pair.told(facts)
        rng, rates = random.Random(SEED), list[Rate]()
        for round_ in track(range((QUICK_ROUNDS if quick else ROUNDS) + 1), "Moving", console=console, transient=True):
            order: Sequence[Arm] = rng.sample(ARMS, 3) if round_ else ("move", "move")  # which open lines, both ways
            for arm in order:
                if arm == "move":
                    placement, rate = await pair.moved(placement, round_)
                else:
                    rate = await pair.raw(placement, arm, round_)
                if round_:
                    rates.append(rate)
        times = QUICK_WRITTEN if quick else WRITTEN
        reports, waited_s, calm_s = await pair.under_writes(placement, times, console)
        chunk_bytes = rates[0].bytes // facts
        return Measured(homes[0].model, facts, chunk_bytes, rates, reports, waited_s, calm_s)


class Pair:
    """The two shards, and the user who moves between them."""

    def __init__(self, homes: Sequence[OpenShard]) -> None:
        self._homes = {home.me: home for home in homes}
        self._shards = {home.me: home.shard for home in homes}

    async def begin(self) -> None:
        neighbours = Neighbours(self._shards)
        for me, shard in self._shards.items():
            shard.courier.shards = lambda: neighbours
            report = ShardReport(shard=me, model="bench", ready=True, free_bytes=0, users=0, requests_in_flight=0)
            await shard.table.directory.heartbeat(report.model_dump_json(), me, 1e6)

    async def told(self, facts: int) -> Placement:
        """The user's placement once every fact is a chunk."""
        first = next(iter(self._homes.values()))
        placement = await first.owner_of("user")
        people = [person_facts(n, A_PERSON) for n in range(-(-facts // A_PERSON))]
        texts = tuple(fact.text for person in people for fact in person)[:facts]
        await first.shard.ask(AddCall(uuid.uuid4().hex, placement, texts))
        await first.shard.encoder.settled("user")
        if len(first.shard.ledger.ids_of("user")) != facts:
            raise MemshardError("not every fact became a chunk")
        return placement

    def _other(self, shard: ShardId) -> ShardId:
        return next(me for me in self._shards if me != shard)

    async def move(self, placement: Placement) -> MoveReport:
        target = self._other(placement.shard)
        return await self._shards[placement.shard].ask(MoveCall(uuid.uuid4().hex, placement, target))

    async def moved(self, placement: Placement, round_: int) -> tuple[Placement, Rate]:
        """A move of all chunks. Raises MemshardError where it was another way, or something was encoded."""
        source, target = self._shards[placement.shard], self._shards[self._other(placement.shard)]
        encoded = target.engine.counters["encode_prefilled_tokens"]
        there = len(source.ledger.ids_of("user"))
        report = await self.move(placement)
        if (report.end, report.sent_chunks) != (End.MOVED, there) or report.sent_bytes > SLICE_BYTES:
            raise MemshardError(f"the move ended as {report}")
        (began, _), (_, ended) = await asyncio.gather(in_worker(source, _last), in_worker(target, _last))
        async with target.users.use(report.placement) as memory:
            await target.residents.ready(memory)
        await target.encoder.settled("user")
        if target.engine.counters["encode_prefilled_tokens"] != encoded:
            raise MemshardError("facts were encoded again")
        return report.placement, Rate("move", round_, report.sent_bytes, ended - began, report.copied_s)

    async def raw(self, placement: Placement, arm: Arm, round_: int) -> Rate:
        """As many bytes from the shard where the user is to the other."""
        source, target = self._shards[placement.shard], self._shards[self._other(placement.shard)]
        sizes = [source.ledger.tokens(id_) * source.engine.token_bytes for id_ in source.ledger.ids_of("user")]
        new = arm == "raw, chunks into new memory"
        if not new:
            sizes = [4 * MIB] * (sum(sizes) // (4 * MIB))
        line = source.courier.lines[self._other(placement.shard)]
        took_s, _ = await asyncio.gather(
            in_worker(source, _raw, line, sizes, True, False), in_worker(target, _raw, line, sizes, False, new)
        )
        return Rate(arm, round_, sum(sizes), took_s)

    async def under_writes(
        self, placement: Placement, times: int, console: Console
    ) -> tuple[list[MoveReport], list[float], list[float]]:
        reports: list[MoveReport] = []
        took: list[tuple[float, float]] = []  # when each fact was told, and how long it took
        done = False

        async def write() -> None:
            at, n = placement, 0
            while not done:
                began = time.perf_counter()
                call = AddCall(uuid.uuid4().hex, at, (f"Number {n} of these is {n * n}.",))
                try:
                    await self._shards[at.shard].ask(call)
                except WrongShard:  # as a gateway does
                    found = await self._shards[at.shard].table.directory.lookup(at.user)
                    assert found is not None
                    at = found
                    await self._shards[at.shard].ask(AddCall(call.request_id, at, call.texts))
                took.append((began, time.perf_counter() - began))
                n += 1
                await asyncio.sleep(0.01)

        writing = asyncio.create_task(write())
        spans: list[tuple[float, float]] = []
        for _ in track(range(times), "Moving under writes", console=console, transient=True):
            await asyncio.sleep(CALM_S)
            began = time.perf_counter()
            reports.append(await self.move(placement))
            spans.append((began, time.perf_counter()))
            placement = reports[-1].placement
        await asyncio.sleep(CALM_S)
        done = True
        await writing
        met = [[s for at, s in took if at < end and at + s > begin] for begin, end in spans]
        calm = [s for at, s in took if not any(at < end and at + s > begin for begin, end in spans)]
        return reports, [max(some, default=0.0) for some in met], calm


def pin(cores: Sequence[int]) -> None:
    """Each engine's process, where its worker is, too, with all its threads to its core."""
    engines = [
        p for p in psutil.Process().children(recursive=True) if "EngineCore" in " ".join([p.name(), *p.cmdline()])
    ]
    if len(engines) != len(cores):
        raise MemshardError(f"there are {len(engines)} engines, and {len(cores)} cores for them")
    for process, core in zip(sorted(engines, key=lambda p: p.create_time()), cores, strict=True):
        for thread in process.threads():
            os.sched_setaffinity(thread.id, {core})


async def in_worker(shard: Shard, function: Callable[..., T], *args: Any) -> T:
    """What a function of ours says in the shard's worker."""
    engine = cast("MemoryEngine", shard.engine)
    answers: list[T] = await engine.llm.collective_rpc(function, args=args)
    return answers[0]


def _lines() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().worker.tiers.lines


def _last(worker: object) -> tuple[float, float]:
    """Runs in a worker: when its last transfer began and ended."""
    began, ended = _lines().last
    return began, ended


def _raw(worker: object, name: str, sizes: Sequence[int], sends: bool, new: bool) -> float:
    """Runs in a worker: how long it took to send messages of these sizes, until the other end had them all."""
    import torch

    data = torch.ones(sum(sizes), dtype=torch.uint8)

    def transfer(line: Any) -> float:
        group, token = line._group, torch.zeros(1, dtype=torch.uint8)
        (group.receive if sends else group.send)(token)()
        began = time.perf_counter()
        on_way: deque[Callable[[], None]] = deque()
        kept: list[Any] = []
        for part in data.split(list(sizes)):
            message = torch.empty(len(part), dtype=torch.uint8) if new else part
            kept.append(message)
            on_way.append((group.send if sends else group.receive)(message))
            if len(on_way) > WINDOW:
                on_way.popleft()()
        while on_way:
            on_way.popleft()()
        (group.receive if sends else group.send)(token)()
        return time.perf_counter() - began

    took_s: float = _lines()._lines[name].run(transfer).result(60)
    return took_s
