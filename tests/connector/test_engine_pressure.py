"""The real engine with too small a block pool: requests are preempted, resumed and refused, and answers stay exact.

float32 and tolerances as in `test_engine_exact.py`. 40 blocks of 32 tokens; a request may take 16.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from connector.chunk import memory_salt
from connector.engine import EngineSettings, MemoryEngine
from connector.plan import PromptPlan
from tests.connector.engines import Encoded, answer, encode, text, tokens_of

NOISE = 1e-3
BLOCK = 32
BLOCKS = 40
TAIL = tokens_of(99, 21)


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
    async with asyncio.timeout(20):
        while engine.llm.get_num_unfinished_requests():  # noqa: ASYNC110 - vLLM has no event for it
            await asyncio.sleep(0.01)
    # Every block is free again: 16 blocks of one request fit beside nothing else, thrice in a row.
    for n in range(3):
        after = await answer(engine, PromptPlan(plans[0].token_ids, plans[0].load, f"after-{n}"), 100)
        assert after.differs_from(expected) < NOISE


async def test_prompt_log_probabilities_are_computed_from_text(engine: MemoryEngine) -> None:
    """vLLM must compute every prompt token for them, so nothing is injected, and nothing breaks."""
    plan = memory_of(50, await encode(engine, pieces_of(50), "logprobs"))
    got = await answer(engine, plan, prompt_logprobs=1)
    assert got.injected_tokens == 0
    assert got.differs_from(await text(engine, plan.token_ids, None)) < NOISE


async def test_workers_and_scheduler_hold_nothing_of_requests_that_ended(engine: MemoryEngine) -> None:
    before = await counters(engine)
    plan = memory_of(60, await encode(engine, pieces_of(60), "nothing"))
    await answer(engine, plan)
    await engine.drop([id_ for id_, _ in plan.load])
    after = await counters(engine)
    assert (after["chunks"], after["bytes"]) == (before["chunks"], before["bytes"])
