"""What it costs that a chunk is not on the device: time to first token from each tier, and under traffic that no device
holds.

First token. Each round, users in random order, a question never asked before, about 50 facts; the arms in random order:

    device, host, disk, shared   the user's chunks are there and nowhere faster; files are out of the page cache
    encode                       the chunks are nowhere: they are encoded, and then the question is asked
    prompt                       the same facts as text

`bring` is the time that the chunks alone take: loading all of them, or encoding them, which keeps out of the way of
chats as it always does (`deployments/encode_pace.py`).

Traffic. Users with the same number of facts, asked by a Zipf law, one question at a time, about all of their facts:
with a device budget of a tenth of what they have (and a host budget of two tenths, the rest on disk), and with one that
holds everything, in turns. Time to first token is from the call of the shard to the first piece of text.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from rich.console import Console
from rich.progress import track

from benchmarks.facts import Fact, person_facts
from benchmarks.in_process import OpenShard, shard_in_process
from cluster.settings import GIB
from connector.moves import HOST
from deployments.memory_calls import AddCall
from deployments.messages import ChatCall, ChatDelta, ChatFinished, Mode, Sampling
from sharding.errors import MemshardError
from sharding.ids import Placement

Place = Literal["device", "host", "disk", "shared", "encode", "prompt"]
PLACES: tuple[Place, ...] = get_args(Place)
Budget = Literal["tenth", "everything"]
BUDGETS: tuple[Budget, ...] = get_args(Budget)

FACTS = 50
PEOPLE = 3
ROUNDS, QUICK_ROUNDS = 12, 3

USERS, QUICK_USERS = 40, 20
FACTS_A_USER = 12
BLOCKS, QUICK_BLOCKS = 3, 1  # of each budget, in turns
QUESTIONS_A_BLOCK = 80
ZIPF_EXPONENT = 1.0

ANSWER_TOKENS = 4
DEADLINE_S = 240.0
SEED = 20262


User = tuple[Placement, Sequence[Fact]]


@dataclass(frozen=True, slots=True)
class Sample:
    """One question. `bring_s` is None where there was nothing to bring."""

    place: Place
    round: int
    ttft_s: float
    bring_s: float | None
    injected_tokens: int


@dataclass(frozen=True, slots=True)
class Asked:
    """One question under traffic, and how many of the user's chunks were in which tier when it came."""

    budget: Budget
    block: int
    ttft_s: float
    found: dict[str, int]
    fallback: str | None


@dataclass(frozen=True, slots=True)
class Measured:
    model: str
    memory_tokens: int  # of the 50 facts
    memory_bytes: int  # of the users under traffic, all together
    samples: list[Sample]
    asked: list[Asked]


async def measure(model: Path | None, console: Console, quick: bool) -> Measured:
    """Raises `MemshardError` where the engine does not start, or an answer is not what its arm means."""
    with tempfile.TemporaryDirectory(prefix="memshard-bench-", dir="/var/tmp") as scratch:  # /tmp may be memory
        sizes = {
            "chunk_host_bytes": GIB,
            "chunk_disk_dir": Path(scratch) / "disk",
            "chunk_disk_bytes": 4 * GIB,
            "chunk_shared_url": str(Path(scratch) / "shared"),
            "chunk_shared_bytes": 4 * GIB,
            "chunk_load_deadline_s": DEADLINE_S,  # nothing is to be late here
        }
        async with shard_in_process(model, **sizes) as home:
            rng = random.Random(SEED)
            with console.status("Encoding"):
                people = [await _told(home, f"person-{n}", person_facts(n, FACTS)) for n in range(PEOPLE)]
            rounds = QUICK_ROUNDS if quick else ROUNDS
            samples = [
                sample
                for round_ in track(range(rounds + 1), "Asking", console=console, transient=True)
                for sample in await _round(home, people, round_, rng)
                if round_  # the first pays for what is loaded with it
            ]
            for user, _ in people:
                await _forget(home, user.user)
            users = QUICK_USERS if quick else USERS
            with console.status(f"Encoding {users * FACTS_A_USER} facts"):
                crowd = [await _told(home, f"user-{n}", person_facts(100 + n, FACTS_A_USER)) for n in range(users)]
            held = home.shard.ledger.bytes
            asked = await _traffic(home, crowd, held, QUICK_BLOCKS if quick else BLOCKS, console, rng)
            tokens = sum(len(home.shard.template.fact(fact.text)) for fact in people[0][1])
            return Measured(home.model, tokens, held, samples, asked)


# -- first token from each tier ---------------------------------------------------------------------------------------


async def _round(home: OpenShard, people: Sequence[User], round_: int, rng: random.Random) -> list[Sample]:
    samples: list[Sample] = []
    for place in rng.sample(PLACES, len(PLACES)):
        user, facts = people[round_ % len(people)]
        question = rng.choice(facts).question
        bring_s = await _bring(home, user, place)
        await _put(home, user.user, place)
        began = time.perf_counter()
        if place == "encode":
            await _on_device(home, user)
        mode: Mode = "prompt" if place == "prompt" else "inject"
        ttft_s, finished = await _ask(home, user, f"{question} ({uuid.uuid4().hex[:6]})", mode, FACTS, began)
        memory = finished.memory
        if memory.fallback or (memory.injected_tokens >= memory.memory_tokens) != (mode == "inject"):
            raise MemshardError(f"An answer is not what {place} means: {memory}")
        samples.append(Sample(place, round_, ttft_s, bring_s, memory.injected_tokens))
    return samples


async def _bring(home: OpenShard, user: Placement, place: Place) -> float | None:
    """Seconds until all of the user's chunks are on the device, from that place."""
    if place in ("device", "prompt"):
        return None
    await _put(home, user.user, place)
    began = time.perf_counter()
    await _on_device(home, user)
    return time.perf_counter() - began


async def _on_device(home: OpenShard, user: Placement) -> None:
    """Loads what some tier has, encodes what none has. Raises `MemshardError` where that does not succeed."""
    shard = home.shard
    async with shard.table.use(user) as memory, asyncio.timeout(DEADLINE_S):
        chunks = await shard.residents.ready(memory)
        await shard.tiers.promote(user.user, chunks.ids(), deadline_s=DEADLINE_S)
        await shard.encoder.settled(user.user)
    if not all(map(shard.ledger.peek_resident, chunks.ids())):
        raise MemshardError("Some facts have no chunk on the device; its budget is too small for this benchmark")


async def _put(home: OpenShard, owner: str, place: Place) -> None:
    """Leaves the owner's chunks in one tier and none above it, or nowhere."""
    tiers = home.shard.tiers
    await tiers.writer.written()
    if place == "encode":
        await _forget(home, owner)
    elif place not in ("device", "prompt"):
        await tiers.demote(owner)
        if place != HOST:
            ids = tiers.host.forget(tiers.host.ids_of(owner))
            await home.shard.engine.drop(ids)
        if place == "shared":
            disk = tiers.files[0]
            disk.strike(tiers.ids_of(owner))
            await disk.remove()
        _out_of_page_cache(Path(tier.url) for tier in tiers.files)


async def _forget(home: OpenShard, owner: str) -> None:
    await home.shard.encoder.forget(sorted(home.shard.tiers.ids_of(owner)))


def _out_of_page_cache(roots: Iterator[Path]) -> None:
    for path in (path for root in roots for path in root.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # they were synced when they were written


# -- traffic that no device holds -------------------------------------------------------------------------------------


async def _traffic(
    home: OpenShard,
    crowd: Sequence[User],
    held: int,
    blocks: int,
    console: Console,
    rng: random.Random,
) -> list[Asked]:
    """Blocks of questions with the one budget and the other, in turns; the questions before each are not counted."""
    weights = [1 / (rank + 1) ** ZIPF_EXPONENT for rank in range(len(crowd))]
    tiers = home.shard.tiers
    asked: list[Asked] = []
    for block in track(range(blocks), "Asking a crowd", console=console, transient=True):
        for budget in rng.sample(BUDGETS, len(BUDGETS)):
            tiers.device.budget_bytes = held // 10 if budget == "tenth" else GIB
            tiers.host.budget_bytes = held // 5 if budget == "tenth" else GIB
            if budget == "tenth":
                for user, _ in crowd:
                    await tiers.demote(user.user)
            else:
                for user, _ in crowd:
                    await _on_device(home, user)
            for number, (user, facts) in enumerate(rng.choices(crowd, weights, k=len(crowd) + QUESTIONS_A_BLOCK)):
                before = dict(tiers.counters)
                question = f"{rng.choice(facts).question} ({uuid.uuid4().hex[:6]})"
                ttft_s, finished = await _ask(home, user, question, "inject", FACTS_A_USER)
                found = {name: count - before.get(name, 0) for name, count in tiers.counters.items()}
                found = {name.removeprefix("found_"): n for name, n in found.items() if name.startswith("found_")}
                if number >= len(crowd):
                    asked.append(Asked(budget, block, ttft_s, found, finished.memory.fallback))
    return asked


async def _told(home: OpenShard, name: str, facts: Sequence[Fact]) -> User:
    user = await home.owner_of(name)
    await home.shard.ask(AddCall(uuid.uuid4().hex, user, tuple(fact.text for fact in facts)))
    await _on_device(home, user)
    return user, facts


async def _ask(
    home: OpenShard, user: Placement, question: str, mode: Mode, top_k: int, began: float | None = None
) -> tuple[float, ChatFinished]:
    """Seconds from `began` (the call) to the first text, and the end. Raises `MemshardError` where there is none."""
    call = ChatCall(
        uuid.uuid4().hex,
        user,
        ({"role": "user", "content": question},),
        Sampling(max_tokens=ANSWER_TOKENS, temperature=0.0),
        mode,
        top_k,
    )
    first: float | None = None
    finished: ChatFinished | None = None
    began = time.perf_counter() if began is None else began
    async with aclosing(home.shard.chat(call)) as events:
        async for event in events:
            if isinstance(event, ChatDelta) and first is None:
                first = time.perf_counter()
            elif isinstance(event, ChatFinished):
                finished = event
    if first is None or finished is None:
        raise MemshardError(f"A chat was answered with no text: {question}")
    return first - began, finished
