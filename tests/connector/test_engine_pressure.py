"""The real engine with too small a block pool: requests are preempted, resumed and refused, and answers stay exact.

float32 and tolerances as in `test_engine_exact.py`. 40 blocks of 32 tokens; a request may take 16.
"""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from transformers import DynamicCache

from connector.chunk import memory_salt
from connector.engine import EngineSettings, MemoryEngine
from connector.plan import PromptPlan
from connector.reason import Reason
from tests.connector.engines import Answer, Encoded, Oracle, answer, encode, text, tokens_of

NOISE = 1e-3
BLOCK = 32
BLOCKS = 40
TAIL = tokens_of(99, 21)

pytestmark = pytest.mark.usefixtures("left_as_it_was")


@pytest.fixture(scope="module")
async def engine(tiny_llama: Path) -> AsyncIterator[MemoryEngine]:
    engine = await MemoryEngine.start(
        EngineSettings(
            tiny_llama,
            chunk_budget_bytes=64 << 20,
            kv_cache_bytes=BLOCKS * BLOCK * 2048,
            max_model_len=16 * BLOCK,
            block_tokens=BLOCK,
            max_batched_tokens=128,
            max_seqs=16,
            dtype="float32",
        )
    )
    yield engine
    engine.shutdown()


async def counters(engine: MemoryEngine) -> dict[str, int]:
    (rank,) = await engine.stats()
    return rank


def memory_of(user: int, encoded: Encoded) -> PromptPlan:
    """The user's pieces in reverse, so that all of them move."""
    order = range(len(encoded.ranges))[::-1]
    load = tuple((encoded.ranges[i].id, encoded.ranges[i].tokens) for i in order)
    front = tuple(token for i in order for token in encoded.tokens(i))
    return PromptPlan(front + TAIL, load, memory_salt(str(user), load))


def pieces_of(user: int) -> list[tuple[int, ...]]:
    return [tokens_of(100 + 10 * user + i, 40 + 5 * i) for i in range(4)]


async def test_preempted_memory_is_loaded_again_and_answers_as_if_it_never_was(engine: MemoryEngine) -> None:
    """Eight requests of up to 13 blocks each share 40."""
    users = range(8)
    plans = [memory_of(user, await encode(engine, pieces_of(user), f"preempt-{user}")) for user in users]
    alone = [await answer(engine, PromptPlan(plan.token_ids, plan.load, "alone"), 200) for plan in plans]
    before = await counters(engine)
    together = await asyncio.gather(*(answer(engine, plan, 200) for plan in plans))
    after = await counters(engine)
    assert after["loads"] - before["loads"] > len(plans), "nobody was preempted: the pool is too large for this test"
    assert after["failed_loads"] == before["failed_loads"]
    for expected, got in zip(alone, together, strict=True):
        assert got.fallback is None
        assert got.differs_from(expected) < NOISE


async def test_preempted_text_fallbacks_end_as_well(engine: MemoryEngine) -> None:
    users = range(10, 16)
    encoded = [await encode(engine, pieces_of(user), f"fallen-{user}") for user in users]
    plans = [memory_of(user, of_user) for user, of_user in zip(users, encoded, strict=True)]
    for of_user in encoded:
        await engine.drop([of_user.ranges[1].id])
    alone = [await text(engine, plan.token_ids, f"text-{user}", 200) for user, plan in zip(users, plans, strict=True)]
    together = await asyncio.gather(*(answer(engine, plan, 200) for plan in plans))
    for expected, got in zip(alone, together, strict=True):
        assert got.fallback is not None
        assert got.differs_from(expected) < NOISE


async def test_chunks_encoded_under_pressure_are_whole_and_exact(engine: MemoryEngine) -> None:
    """Encoding has the lower priority: chats preempt it, and its captures are taken up where they were."""
    chats = [memory_of(user, await encode(engine, pieces_of(user), f"chat-{user}")) for user in range(20, 26)]
    outcomes = await asyncio.gather(
        *(encode(engine, pieces_of(user), f"pressed-{user}") for user in range(30, 36)),
        *(answer(engine, plan, 150) for plan in chats),
    )
    for user, encoded in zip(range(30, 36), outcomes[:6], strict=True):
        load = tuple((range_.id, range_.tokens) for range_ in encoded.ranges)
        memory = await answer(engine, PromptPlan(encoded.prompt + TAIL, load, f"pressed-{user}"))
        assert memory.injected_tokens == len(encoded.prompt)
        assert memory.differs_from(await text(engine, encoded.prompt + TAIL, None)) < NOISE


async def test_aborts_at_any_time_leave_the_engine_as_it_was(engine: MemoryEngine) -> None:
    plans = [memory_of(user, await encode(engine, pieces_of(user), f"abort-{user}")) for user in range(40, 48)]
    expected = await answer(engine, PromptPlan(plans[0].token_ids, plans[0].load, "before"), 100)
    for delay_s in (0.0, 0.01, 0.05, 0.2):
        tasks = [asyncio.create_task(answer(engine, plan, 200)) for plan in plans]
        await asyncio.sleep(delay_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    after = await answer(engine, PromptPlan(plans[0].token_ids, plans[0].load, "after"), 100)
    assert after.differs_from(expected) < NOISE


async def test_prompt_log_probabilities_are_computed_from_text(engine: MemoryEngine) -> None:
    """vLLM must compute every prompt token for them, so nothing is injected, and nothing breaks."""
    plan = memory_of(50, await encode(engine, pieces_of(50), "logprobs"))
    got = await answer(engine, plan, prompt_logprobs=1)
    assert (got.injected_tokens, got.fallback) == (0, Reason.READS_NO_CACHE)
    assert got.differs_from(await text(engine, plan.token_ids, None)) < NOISE


class Storm:
    """What may befall the engine, at random: memory asked for in any order, by text, with prompt log-probabilities;
    requests aborted; chunks evicted and encoded again, while others run.

    As the ledger sees to it, no chunk goes that a running request names; later ones may name it all the same. Users 0
    and 1 lose no chunk and share their compositions through the prefix cache.
    """

    def __init__(self, engine: MemoryEngine, oracle: Oracle, seed: int) -> None:
        self.engine, self.oracle, self.dice, self.seed = engine, oracle, random.Random(seed), seed
        self.encoded: list[Encoded] = []
        self.gone: set[tuple[int, int]] = set()  # (user, piece): evicted, and not here again for certain
        self.coming: set[tuple[int, int]] = set()  # of these, what is being encoded
        self.running: dict[
            asyncio.Task[Answer], tuple[int, tuple[int, ...], bool]
        ] = {}  # user, order, whether a piece is gone
        self.background: list[asyncio.Task[None]] = []
        self.caches: dict[tuple[int, tuple[int, ...]], DynamicCache] = {}
        self.checked = 0

    async def blow(self, steps: int) -> None:
        users = range(4)
        self.encoded = [await encode(self.engine, pieces_of(70 + user), f"{self.seed}-{user}") for user in users]
        for step in range(steps):
            (happens,) = self.dice.choices([self.ask, self.abort, self.evict, self.encode_again], [12, 4, 3, 2])
            await happens(step)
            await asyncio.sleep(self.dice.choice([0, 0.01, 0.05]))
        await asyncio.gather(*self.running, return_exceptions=True)
        await asyncio.gather(*self.background)
        for task, asked in self.running.items():
            if not task.cancelled():
                self.check(await task, *asked)

    async def ask(self, step: int) -> None:
        user = self.dice.randrange(4)
        order = self.dice.choice([(3, 2, 1, 0), (0, 2), (2, 3, 1)])
        load = tuple((self.encoded[user].ranges[i].id, self.encoded[user].ranges[i].tokens) for i in order)
        wants = {"prompt_logprobs": 1} if self.dice.random() < 0.1 else {}
        salt = f"{self.seed}-{step}" if user > 1 or wants else f"{self.seed}-{user}-{order}"
        plan = PromptPlan(self.front(user, order) + TAIL, load, salt)
        asked = answer(self.engine, plan, self.dice.choice([1, 30, 120]), **wants)
        self.running[asyncio.create_task(asked)] = (user, order, any((user, piece) in self.gone for piece in order))

    async def abort(self, step: int) -> None:
        if self.running:
            self.dice.choice(list(self.running)).cancel()

    async def evict(self, step: int) -> None:
        user, piece = self.dice.randrange(2, 4), self.dice.randrange(4)
        used = any(asked[0] == user and not task.done() for task, asked in self.running.items())
        if not used and (user, piece) not in self.coming:
            self.gone.add((user, piece))
            await self.engine.drop([self.encoded[user].ranges[piece].id])

    async def encode_again(self, step: int) -> None:
        async def encode(user: int, piece: int) -> None:
            encoded, range_ = self.encoded[user], self.encoded[user].ranges[piece]
            done = await self.engine.encode(f"again-{step}", encoded.prompt, [range_], f"salt-{self.seed}-{user}")
            assert done == {range_.id}
            self.gone.discard((user, piece))
            self.coming.discard((user, piece))

        for missing in sorted(self.gone - self.coming)[:1]:
            self.coming.add(missing)
            self.background.append(asyncio.create_task(encode(*missing)))

    def check(self, got: Answer, user: int, order: tuple[int, ...], incomplete: bool) -> None:
        if got.fallback is None:  # also where the missing piece was encoded again in time
            if (user, order) not in self.caches:
                self.caches[user, order] = self.oracle.composed(self.encoded[user], order)
            off = self.oracle.shortfall(copy.deepcopy(self.caches[user, order]), TAIL, got)
        else:
            assert incomplete or got.fallback == Reason.READS_NO_CACHE
            off = self.oracle.shortfall(DynamicCache(), self.front(user, order) + TAIL, got)
        assert off < NOISE, (user, order, got)
        self.checked += 1

    def front(self, user: int, order: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(token for i in order for token in self.encoded[user].tokens(i))


@pytest.mark.parametrize("seed", range(2))
async def test_whatever_befalls_the_engine_each_answer_is_memorys_or_texts(
    engine: MemoryEngine, tiny_llama: Path, seed: int
) -> None:
    storm = Storm(engine, Oracle(tiny_llama), seed)
    await storm.blow(40)
    assert storm.checked >= 10


async def test_requests_with_one_composition_that_cannot_be_loaded_all_fall_back(engine: MemoryEngine) -> None:
    """The first publishes its blocks when it is scheduled; the others hit them natively in the same step."""
    encoded = await encode(engine, pieces_of(61), "shared")
    plan = memory_of(61, encoded)
    await engine.drop([encoded.ranges[2].id])
    plain = await text(engine, plan.token_ids, "text-61", 20)
    for got in await asyncio.gather(*(answer(engine, plan, 20) for _ in range(6))):
        assert got.differs_from(plain) < NOISE


async def test_workers_and_scheduler_hold_nothing_of_requests_that_ended(engine: MemoryEngine) -> None:
    before = await counters(engine)
    plan = memory_of(60, await encode(engine, pieces_of(60), "nothing"))
    await answer(engine, plan)
    await engine.drop([id_ for id_, _ in plan.load])
    after = await counters(engine)
    assert (after["chunks"], after["bytes"]) == (before["chunks"], before["bytes"])
