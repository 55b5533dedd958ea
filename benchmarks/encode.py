"""What encoding costs: per fact, by window, and for the chats that go on meanwhile.

Cost. Each round, for windows of 0, 5, 20 and 50 facts in random order, a user nobody knows tells 140 facts:

    at once        the first 90 in one call, as an import does
    turn by turn   the rest in turns of two, each encoded before the next is told, as a conversation does

timed from handing them to the encoder until the last chunk is there, with nothing else running. Prefilled tokens are
those that the engine computed: prompts less what vLLM's prefix cache had. A window of 0 is a fact alone behind the
prompt's head, and can be shared with nobody.

Chats. Each round, in random order, some chats alone, and as many while other users' facts are encoded without a pause.
They come one at a time at random moments, with injected memory. Time to first token is from the call of the shard to
the first piece of text: embedding, search and composition included, HTTP not.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.progress import track

from benchmarks.facts import Fact, person_facts
from benchmarks.in_process import OpenShard, shard_in_process
from connector.windows import FactChunks, Line
from deployments.memory_calls import AddCall
from deployments.messages import ChatCall, ChatDelta, ChatFinished, Sampling
from sharding.errors import MemshardError
from sharding.ids import FactId, Placement

How = Literal["at once", "turn by turn"]
Arm = Literal["alone", "encoding"]
ARMS: tuple[Arm, ...] = ("alone", "encoding")

WINDOWS = (0, 5, 20, 50)
AT_ONCE_FACTS = 90
TURNS, TURN_FACTS = 25, 2  # with one new window of 50 facts among them, as in every 50 facts
ROUNDS, QUICK_ROUNDS = (4, 5), (1, 2)  # of the costs, of the chats
CHATS_A_ROUND = 10

TOP_K = 20
ANSWER_TOKENS = 12
GAP_S = (0.1, 0.8)  # between two chats, uniform
ENCODING_USERS = 3  # how many wait for their chunks at any moment
FACTS_A_USER = 40
ENCODE_DEADLINE_S = 240.0
SEED = 20261


@dataclass(frozen=True, slots=True)
class Cost:
    """Encoding so many facts of one user in one way."""

    window: int
    how: How
    round: int
    facts: int
    seconds: float
    prefilled_tokens: int


@dataclass(frozen=True, slots=True)
class Chat:
    """One chat. `gaps_s` are the times between pieces of its text."""

    arm: Arm
    round: int
    ttft_s: float
    engine_ttft_s: float
    gaps_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Encoded:
    """What was encoded while the chats of one round went on."""

    round: int
    chunks: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Measured:
    model: str
    costs: list[Cost]
    chats: list[Chat]
    encoded: list[Encoded]


async def measure(model: Path | None, console: Console, cost_rounds: int, chat_rounds: int) -> Measured:
    """Raises `MemshardError` where the engine does not start, or facts do not get their chunks."""
    async with shard_in_process(model) as home:
        rng = random.Random(SEED)
        costs: list[Cost] = []
        for round_ in track(range(cost_rounds), "Encoding", console=console, transient=True):
            for window in rng.sample(WINDOWS, len(WINDOWS)):
                costs += await _costs(home, window, round_)
        chats: list[Chat] = []
        encoded: list[Encoded] = []
        asked = iter(await _questions(home, rng, 1 + chat_rounds * len(ARMS) * CHATS_A_ROUND))
        await _ask(home, *next(asked), "alone", 0)  # pays for what is loaded with the first
        for round_ in track(range(chat_rounds), "Chatting", console=console, transient=True):
            for arm in rng.sample(ARMS, len(ARMS)):
                if arm == "alone":
                    chats += [await _ask(home, *next(asked), arm, round_, rng) for _ in range(CHATS_A_ROUND)]
                    continue
                began, before = time.perf_counter(), len(home.shard.ledger)
                async with _encoding(home, round_):
                    chats += [await _ask(home, *next(asked), arm, round_, rng) for _ in range(CHATS_A_ROUND)]
                    chunks = len(home.shard.ledger) - before
                encoded.append(Encoded(round_, chunks, time.perf_counter() - began))
        return Measured(home.model, costs, chats, encoded)


async def _costs(home: OpenShard, window: int, round_: int) -> list[Cost]:
    facts = person_facts(round_, AT_ONCE_FACTS + TURNS * TURN_FACTS)
    chunks, owner = _chunks(home, window), f"cost-{uuid.uuid4().hex}"
    at_once = await _timed(home, chunks, owner, facts, [AT_ONCE_FACTS])
    turns = [AT_ONCE_FACTS + TURN_FACTS * (turn + 1) for turn in range(TURNS)]
    by_turn = await _timed(home, chunks, owner, facts, turns)
    await home.shard.encoder.forget(home.shard.ledger.ids_of(owner))
    return [
        Cost(window, "at once", round_, AT_ONCE_FACTS, *at_once),
        Cost(window, "turn by turn", round_, TURNS * TURN_FACTS, *by_turn),
    ]


def _chunks(home: OpenShard, window: int) -> FactChunks:
    shard = home.shard
    head = shard.template.default_head()
    room = shard.engine.max_model_len - 1
    return FactChunks(uuid.uuid4().hex, shard.engine.model_digest, head, window_facts=window, room_tokens=room)


async def _timed(
    home: OpenShard, chunks: FactChunks, owner: str, facts: Sequence[Fact], told: Sequence[int]
) -> tuple[float, int]:
    """Seconds and prefilled tokens of encoding the first so many facts, each time after those before."""
    counters = home.shard.engine.counters
    began, before = time.perf_counter(), counters["encode_prefilled_tokens"]
    for count in told:
        await _encode(home, chunks, owner, facts[:count])
    return time.perf_counter() - began, counters["encode_prefilled_tokens"] - before


async def _encode(home: OpenShard, chunks: FactChunks, owner: str, facts: Sequence[Fact]) -> None:
    """Returns when each has its chunk. Raises `MemshardError` where one does not get it."""
    shard = home.shard
    lines = [Line(FactId(f"{n}"), n, tuple(shard.template.fact(fact.text))) for n, fact in enumerate(facts)]
    chunks.update(lines)
    async with asyncio.timeout(ENCODE_DEADLINE_S):
        await shard.encoder.submit(owner, chunks)
        await shard.encoder.settled(owner)
    if not all(map(shard.ledger.peek_resident, chunks.ids())):
        raise MemshardError("Some facts were not encoded; the chunk budget is too small for this benchmark")


async def _questions(home: OpenShard, rng: random.Random, count: int) -> list[tuple[Placement, Fact]]:
    """Who asks about what; nobody anything twice, or vLLM's prefix cache would answer. Tells as many people their facts
    as it takes."""
    questions: list[tuple[Placement, Fact]] = []
    while len(questions) < count:
        known, asker = person_facts(len(questions)), await home.owner_of(f"asker-{len(questions)}")
        await _tell(home, asker, known)
        questions += [(asker, fact) for fact in known]
    return rng.sample(questions, count)


async def _tell(home: OpenShard, user: Placement, facts: Sequence[Fact]) -> None:
    await home.shard.ask(AddCall(uuid.uuid4().hex, user, tuple(fact.text for fact in facts)))
    async with asyncio.timeout(ENCODE_DEADLINE_S):
        await home.shard.encoder.settled(user.user)


@asynccontextmanager
async def _encoding(home: OpenShard, round_: int) -> AsyncIterator[None]:
    """Inside, the facts of some users are encoded, and when one's are, another's."""
    owners: list[str] = []

    async def on_and_on() -> None:
        while True:
            facts = person_facts(1_000 * (round_ + 1) + len(owners), FACTS_A_USER)
            owners.append(owner := f"background-{uuid.uuid4().hex}")
            await _encode(home, _chunks(home, home.window_facts), owner, facts)

    tasks = [asyncio.create_task(on_and_on()) for _ in range(ENCODING_USERS)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    for owner in owners:
        await home.shard.encoder.submit(owner, _chunks(home, 0))  # wants nothing any more
        await home.shard.encoder.settled(owner)
        await home.shard.encoder.forget(home.shard.ledger.ids_of(owner))
    for failure in ended:
        if not isinstance(failure, asyncio.CancelledError) and failure is not None:
            raise failure


async def _ask(
    home: OpenShard, user: Placement, fact: Fact, arm: Arm, round_: int, rng: random.Random | None = None
) -> Chat:
    """One chat after a random pause. Raises `MemshardError` where it was not answered from injected memory."""
    await asyncio.sleep(rng.uniform(*GAP_S) if rng is not None else 0)
    call = ChatCall(
        uuid.uuid4().hex,
        user,
        ({"role": "user", "content": fact.question},),
        Sampling(max_tokens=ANSWER_TOKENS, temperature=0.0),
        "inject",
        TOP_K,
    )
    times: list[float] = []
    finished: ChatFinished | None = None
    sent = time.perf_counter()
    async with aclosing(home.shard.chat(call)) as events:
        async for event in events:
            if isinstance(event, ChatDelta):
                times.append(time.perf_counter())
            elif isinstance(event, ChatFinished):
                finished = event
    if finished is None or not times or finished.memory.fallback or not finished.memory.injected_tokens:
        raise MemshardError(f"A chat was not answered from injected memory: {finished}")
    gaps = tuple(after - before for before, after in pairwise(times))
    return Chat(arm, round_, times[0] - sent, finished.memory.engine_ttft_s, gaps)
