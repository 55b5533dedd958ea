"""The real engine with a tiny random Llama in float32: small enough for an oracle, exact enough to see any fault.

float32 leaves no noise to hide in: sums of a few hundred terms in another order differ by about 1e-5, so 1e-3 on a
log-probability and on a key is generous to rounding and far below any wrong position, token or layer (about 1).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache
from vllm import SamplingParams

from connector.chunk import CaptureRange, ChunkId, chunk_id, memory_salt, text_salt
from connector.engine import EngineSettings, MemoryEngine
from connector.plan import PromptPlan
from connector.reason import Reason
from connector.rotation import Rotation, rotate_keys
from tests.connector.canaries import ask_canary
from tests.connector.engines import (
    Encoded,
    Oracle,
    answer,
    encode,
    keys_and_values,
    read_chunk,
    read_rotation,
    set_budget,
    text,
    tokens_of,
)

NOISE = 1e-3
BLOCK = 32

pytestmark = pytest.mark.usefixtures("left_as_it_was")


@pytest.fixture(scope="module")
async def engine(tiny_llama: Path) -> AsyncIterator[MemoryEngine]:
    engine = await MemoryEngine.start(
        EngineSettings(
            tiny_llama,
            chunk_budget_bytes=64 << 20,
            kv_cache_bytes=64 << 20,
            block_tokens=BLOCK,
            max_batched_tokens=64,  # prompts are prefilled in many pieces
            max_seqs=16,
            dtype="float32",
        )
    )
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def oracle(tiny_llama: Path) -> Oracle:
    return Oracle(tiny_llama)


def injected(encoded: Encoded, order: list[int], tail: tuple[int, ...], owner: str) -> PromptPlan:
    """Pieces of an encoding, in any order, then `tail`."""
    load = tuple((encoded.ranges[i].id, encoded.ranges[i].tokens) for i in order)
    front = tuple(token for i in order for token in encoded.tokens(i))
    return PromptPlan(front + tail, load, memory_salt(owner, load))


PIECES = [tokens_of(seed, count) for seed, count in enumerate([37, 1, 25, 64, 32, 5, 90])]
TAIL = tokens_of(99, 21)


async def test_memory_injected_where_it_was_encoded_answers_as_plain_prefill_does(engine: MemoryEngine) -> None:
    encoded = await encode(engine, PIECES, "place")
    plan = injected(encoded, list(range(7)), TAIL, "place")
    plain = await text(engine, plan.token_ids, None)
    memory = await answer(engine, plan)
    assert memory.injected_tokens == len(encoded.prompt)
    assert memory.fallback is None
    assert memory.differs_from(plain) < NOISE


async def test_a_captured_chunk_holds_what_the_model_computes_in_every_layer(
    engine: MemoryEngine, oracle: Oracle
) -> None:
    encoded = await encode(engine, PIECES, "capture")  # 254 tokens, prefilled 64 at a time
    expected = keys_and_values(oracle.cache(encoded.prompt))
    for range_ in encoded.ranges:
        (kv,) = await engine.llm.collective_rpc(read_chunk, args=(range_.id,))
        assert (kv - expected[:, :, range_.start : range_.start + range_.tokens]).abs().max() < NOISE


@pytest.mark.parametrize("distance", [-40, 1, 700])
async def test_a_moved_chunk_holds_the_keys_that_the_model_computes_there(
    engine: MemoryEngine, oracle: Oracle, distance: int
) -> None:
    """The oracle computes the whole prompt `distance` positions further on. Attention sees differences of positions
    only, so hidden states stay, and in every layer its keys must be ours, rotated by the distance."""
    encoded = await encode(engine, PIECES, "moved", kept=[3])
    (range_,) = encoded.ranges
    (kv,) = await engine.llm.collective_rpc(read_chunk, args=(range_.id,))
    ((frequencies, neox),) = await engine.llm.collective_rpc(read_rotation)
    rotation = Rotation(torch.tensor(frequencies), neox)
    for layer in kv:
        rotate_keys(layer[0], rotation.table(torch.full((range_.tokens,), distance)), rotation.neox)
    expected = keys_and_values(oracle.cache(encoded.prompt, first_position=distance))
    assert (kv - expected[:, :, range_.start : range_.start + range_.tokens]).abs().max() < NOISE


@pytest.mark.parametrize("order", [[6, 0, 3, 2], [5, 4, 3, 2, 1, 0], [1], [3, 3, 6]])
async def test_moved_and_reordered_chunks_answer_as_transformers_does_behind_the_same_cache(
    engine: MemoryEngine, oracle: Oracle, order: list[int]
) -> None:
    encoded = await encode(engine, PIECES, "reordered")
    plan = injected(encoded, order, TAIL, "reordered")
    tokens, logprobs = oracle.continue_from(oracle.composed(encoded, order), TAIL, 8)
    memory = await answer(engine, plan)
    assert memory.injected_tokens == plan.load_tokens
    assert list(memory.token_ids) == tokens
    assert max(abs(a - b) for a, b in zip(memory.logprobs, logprobs, strict=True)) < NOISE


async def test_the_same_composition_hits_natively_the_second_time_and_copies_nothing(engine: MemoryEngine) -> None:
    encoded = await encode(engine, PIECES, "twice")
    plan = injected(encoded, [6, 5, 3], TAIL, "twice")
    first, loads = await answer(engine, plan), (await engine.stats())[0]["loads"]
    second = await answer(engine, plan)
    blocks = len(plan.token_ids) // BLOCK
    assert second.injected_tokens == max(0, plan.load_tokens - blocks * BLOCK)
    assert second.cached_tokens == blocks * BLOCK
    assert second.differs_from(first) < NOISE
    assert (await engine.stats())[0]["loads"] - loads == (second.injected_tokens > 0)


@pytest.mark.parametrize("tail_tokens", [1, 3, 40])
async def test_a_partial_native_hit_is_completed_from_the_right_offset(engine: MemoryEngine, tail_tokens: int) -> None:
    """The first request leaves a few whole blocks of the composition; the second, longer one loads the rest."""
    owner = f"partial-{tail_tokens}"
    encoded = await encode(engine, PIECES, owner)
    short = injected(encoded, [6, 0, 1], tokens_of(7, tail_tokens), owner)
    await answer(engine, short)
    long = injected(encoded, [6, 0, 1, 2, 3], TAIL, owner)
    shared = PromptPlan(long.token_ids, long.load, short.salt)  # as if the longer memory lived under the same salt
    memory = await answer(engine, shared)
    assert memory.cached_tokens == len(short.token_ids[: short.load_tokens]) // BLOCK * BLOCK > 0
    assert memory.injected_tokens == long.load_tokens - memory.cached_tokens
    assert memory.differs_from(await answer(engine, PromptPlan(long.token_ids, long.load, "fresh" + owner))) < NOISE


async def test_a_prompt_that_is_all_memory_still_computes_its_last_token(engine: MemoryEngine) -> None:
    encoded = await encode(engine, PIECES, "all")
    plan = injected(encoded, list(range(7)), (), "all")
    memory = await answer(engine, plan)
    assert memory.injected_tokens == len(encoded.prompt) - 1
    assert memory.differs_from(await text(engine, plan.token_ids, None)) < NOISE


@pytest.mark.parametrize("missing", [0, 3, 6])
async def test_a_missing_chunk_falls_back_to_the_same_prompt_as_text(engine: MemoryEngine, missing: int) -> None:
    owner = f"missing-{missing}"
    encoded = await encode(engine, PIECES, owner)
    plan = injected(encoded, list(range(7)), TAIL, owner)
    await engine.drop([encoded.ranges[missing].id])
    fallen = await answer(engine, plan)
    assert fallen.fallback == Reason.MISSING_CHUNK
    assert fallen.injected_tokens == fallen.cached_tokens == 0
    plain = await text(engine, plan.token_ids, None)
    assert fallen.differs_from(plain) < NOISE
    again = await answer(engine, plan)  # what the fallback left in the prefix cache is right as well
    assert again.differs_from(plain) < NOISE


async def test_a_chunk_of_another_length_than_planned_is_not_served(engine: MemoryEngine) -> None:
    encoded = await encode(engine, PIECES, "length")
    good = injected(encoded, [3, 2], TAIL, "length")
    (first, tokens), second = good.load
    wrong = PromptPlan(good.token_ids, ((first, tokens - 1), second), "wrong-length")
    fallen = await answer(engine, wrong)
    assert fallen.fallback is not None
    assert fallen.differs_from(await text(engine, good.token_ids, None)) < NOISE


async def test_one_failed_load_does_not_harm_the_others_in_its_step(engine: MemoryEngine) -> None:
    encoded = await encode(engine, PIECES, "together")
    good = injected(encoded, [4, 2, 0], TAIL, "together")
    bad = PromptPlan(good.token_ids, ((ChunkId("0" * 32), 32), *good.load[1:]), "bad")
    plain = await text(engine, good.token_ids, None)
    plans = [good if i % 2 else bad for i in range(8)]
    answers = await asyncio.gather(*(answer(engine, _salted(plan, f"s{i}")) for i, plan in enumerate(plans)))
    alone = await answer(engine, _salted(good, "alone"))
    for plan, got in zip(plans, answers, strict=True):
        assert (got.fallback is None) == (plan is good)
        assert got.differs_from(alone if plan is good else plain) < NOISE


async def test_many_captures_and_loads_share_steps_without_mixing(engine: MemoryEngine) -> None:
    """Eight users encode while eight others answer; each then gets its own memory back, exactly."""
    ready = [await encode(engine, _pieces_of(user), f"ready-{user}") for user in range(8)]
    plans = [injected(encoded, [0, 1, 2], TAIL, f"ready-{user}") for user, encoded in enumerate(ready)]
    alone = [await text(engine, plan.token_ids, f"alone-{user}") for user, plan in enumerate(plans)]
    outcomes = await asyncio.gather(
        *(encode(engine, _pieces_of(user + 8), f"new-{user}") for user in range(8)),
        *(answer(engine, plan) for plan in plans),
    )
    for expected, got in zip(alone, outcomes[8:], strict=True):
        assert got.injected_tokens > 0
        assert got.differs_from(expected) < NOISE
    for user, encoded in enumerate(outcomes[:8]):
        plan = injected(encoded, [0, 1, 2], TAIL, f"new-{user}")
        assert (await answer(engine, plan)).differs_from(await text(engine, plan.token_ids, f"new-{user}")) < NOISE


async def test_tokens_found_in_the_prefix_cache_are_computed_again_to_be_captured(engine: MemoryEngine) -> None:
    encoded = await encode(engine, PIECES, "cached")
    await engine.drop([range_.id for range_ in encoded.ranges])
    again = await encode(engine, PIECES, "cached")  # same tokens, same salt: vLLM has most blocks in its cache
    plan = injected(again, list(range(7)), TAIL, "cached")
    assert (await answer(engine, plan)).differs_from(await text(engine, plan.token_ids, None)) < NOISE


async def test_plain_text_is_answered_as_by_a_cold_engine_after_the_same_tokens_were_injected(
    engine: MemoryEngine,
) -> None:
    """Moved chunks are an approximation of these tokens; the plain prompt must never meet it."""
    encoded = await encode(engine, PIECES, "salted")
    plan = injected(encoded, [6, 3, 2, 0], TAIL, "salted")
    memory = await answer(engine, plan)
    plain = await text(engine, plan.token_ids, None)
    assert plain.cached_tokens == 0
    assert plain.differs_from(memory) > NOISE  # the approximation can be told from the exact answer
    tokens, logprobs = Oracle(Path(engine.llm.model_config.model)).continue_from(DynamicCache(), plan.token_ids, 8)
    assert list(plain.token_ids) == tokens
    assert max(abs(a - b) for a, b in zip(plain.logprobs, logprobs, strict=True)) < NOISE


async def test_two_users_with_the_same_facts_never_hit_each_others_cache(engine: MemoryEngine) -> None:
    ada, bob = await encode(engine, PIECES, "ada"), await encode(engine, PIECES, "bob")
    assert not {range_.id for range_ in ada.ranges} & {range_.id for range_ in bob.ranges}
    first = await answer(engine, injected(ada, [6, 3], TAIL, "ada"))
    second = await answer(engine, injected(bob, [6, 3], TAIL, "bob"))
    assert first.cached_tokens == second.cached_tokens == 0
    for owner in ("ada", "bob"):
        assert (await text(engine, ada.prompt, text_salt(owner))).cached_tokens == 0


async def test_closing_the_stream_aborts_the_request_and_leaves_nothing(engine: MemoryEngine) -> None:
    encoded = await encode(engine, PIECES, "gone")
    plan = injected(encoded, [6, 3], TAIL, "gone")
    deltas = engine.generate("gone", plan, SamplingParams(max_tokens=500, ignore_eos=True))
    async for _ in deltas:
        break
    await deltas.aclose()
    async with asyncio.timeout(10):
        while engine.llm.get_num_unfinished_requests():  # noqa: ASYNC110 - vLLM has no event for it
            await asyncio.sleep(0.01)


async def test_an_aborted_encode_leaves_no_half_chunk(engine: MemoryEngine) -> None:
    before = (await engine.stats())[0]
    task = asyncio.create_task(encode(engine, [tokens_of(5, 900), tokens_of(6, 900)], "aborted"))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    after = (await engine.stats())[0]
    assert (after["chunks"], after["bytes"]) == (before["chunks"], before["bytes"])


async def test_captures_over_the_budget_are_refused_and_reads_go_on(engine: MemoryEngine) -> None:
    encoded = await encode(engine, PIECES, "full")
    await engine.llm.collective_rpc(set_budget, args=(0,))
    try:
        range_ = CaptureRange(chunk_id(engine.model_digest, "full", (), TAIL), 0, len(TAIL))
        assert await engine.encode("over-budget", TAIL, [range_], "full") == set()
        assert (await answer(engine, injected(encoded, [0], TAIL, "full"))).injected_tokens == len(PIECES[0])
    finally:
        await engine.llm.collective_rpc(set_budget, args=(64 << 20,))


def _salted(plan: PromptPlan, salt: str) -> PromptPlan:
    return PromptPlan(plan.token_ids, plan.load, salt)


def _pieces_of(user: int) -> list[tuple[int, ...]]:
    return [tokens_of(1000 + 10 * user + i, 20 + 7 * i) for i in range(3)]


async def test_a_model_that_answers_nothing_from_text_is_not_trusted_with_injected_memory(
    engine: MemoryEngine, tiny_llama: Path
) -> None:
    verdict = await ask_canary(engine, tiny_llama, 8 << 20)
    assert (verdict.state, verdict.prefill_nearest) == ("unjudged", None)
    assert "even from text" in verdict.reason
