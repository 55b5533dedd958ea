"""The packaged model in bfloat16, through template and plan: what the tiny models show exactly, on real weights.

Two exact computations of one prompt differ in bfloat16 as well, by how the tokens were batched. What memory may differ
by is therefore measured beside it: text prefilled in one piece against text behind a native prefix-cache hit.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from connector.chunk import ChunkId, chunk_id
from connector.engine import EngineSettings, MemoryEngine
from connector.ledger import ChunkLedger
from connector.metadata import CaptureRange
from connector.plan import Piece, plan_memory, plan_plain
from connector.template import PromptTemplate
from connector.windows import FactChunks, Line
from deployments.encode_pace import CPU_STEP_TOKENS, EncodePace
from deployments.encoder import Encoder
from sharding.ids import FactId
from tests.connector.canaries import ask_canary
from tests.connector.engines import Answer, answer, check_integrity, read_chunk, read_composition

FACTS = [
    f"My {relation} {name} lives in {place} and keeps {count} {things}."
    for relation, name, place, count, things in zip(
        ["sister", "cousin", "aunt", "neighbour", "colleague"] * 4,
        ["Ingrid", "Tomas", "Beate", "Olu", "Marek", "Yuki", "Pilar", "Sven", "Amina", "Jonas"] * 2,
        ["Lisbon", "Prague", "Oslo", "Turin", "Gdansk", "Kyoto", "Malaga", "Umea", "Tunis", "Riga"] * 2,
        range(3, 23),
        ["boats", "clocks", "violins", "kites", "maps"] * 4,
        strict=True,
    )
]
QUESTIONS = ["Where does Ingrid live?", "How many clocks does Tomas keep?", "What does Olu keep?"]
LIMITS = {"max_model_len": 2048, "max_tokens": 12}

pytestmark = pytest.mark.usefixtures("left_as_it_was")


@pytest.fixture(scope="module")
async def engine(language_model: Path) -> AsyncIterator[MemoryEngine]:
    engine = await MemoryEngine.start(
        EngineSettings(language_model, chunk_budget_bytes=256 << 20, kv_cache_bytes=256 << 20, max_model_len=2048)
    )
    yield engine
    engine.shutdown()


def largest_difference(one: Answer, other: Answer) -> float:
    return max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))


async def test_memory_answers_as_text_within_bfloat16_noise_and_leaves_plain_prompts_alone(
    engine: MemoryEngine, language_model: Path
) -> None:
    template = PromptTemplate(AutoTokenizer.from_pretrained(language_model))
    plain = [plan_plain(template.plain([{"role": "user", "content": q}]), "ada", **LIMITS) for q in QUESTIONS]
    cold = [await answer(engine, plan, 12) for plan in plain]  # nothing was ever injected

    head = template.default_head()
    pieces, captures, prompt = [], [CaptureRange(chunk_id(engine.model_digest, "", (), head), 0, len(head))], list(head)
    for fact in FACTS:
        tokens = template.fact(fact)
        captures.append(CaptureRange(chunk_id(engine.model_digest, "ada", prompt, tokens), len(prompt), len(tokens)))
        pieces.append(Piece(tuple(tokens), captures[-1].id))
        prompt += tokens
    assert len(await engine.encode("encode-all", prompt, captures, "encode")) == len(captures)

    noise, memory_noise = [], []
    for question in QUESTIONS:
        tail = template.split([{"role": "user", "content": question}])[1]
        plans = [
            plan_memory(Piece(tuple(head), captures[0].id), pieces[::-1], tail, "ada", inject=inject, **LIMITS)
            for inject in (False, True)
        ]
        as_text, again, memory = [await answer(engine, plan, 12) for plan in (plans[0], *plans)]
        assert again.cached_tokens > 0
        assert memory.injected_tokens + memory.cached_tokens == len(prompt)  # later questions: natively, in part
        assert memory.token_ids == as_text.token_ids
        noise.append(largest_difference(as_text, again))
        memory_noise.append(largest_difference(as_text, memory))
    assert max(memory_noise) <= 4 * max(*noise, 2**-5), (memory_noise, noise)

    for plan, before in zip(plain, cold, strict=True):
        after = await answer(engine, plan, 12)
        assert after.token_ids == before.token_ids
        assert largest_difference(before, after) <= max(*noise, 2**-5)


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this CPU has no matrix tiles")
async def test_on_one_core_with_amx_memory_is_composed_in_one_pass(engine: MemoryEngine) -> None:
    assert await engine.llm.collective_rpc(read_composition) == ["FusedCPUComposition"]


async def test_the_packaged_model_passes_the_canary_and_is_injected(engine: MemoryEngine, language_model: Path) -> None:
    before = await engine.stats()
    verdict = await ask_canary(engine, language_model, 64 << 20)
    assert (verdict.state, verdict.prefill_nearest) == ("passed", 0), verdict.reason
    after = await engine.stats()
    assert [rank["chunks"] for rank in after] == [rank["chunks"] for rank in before], "nothing of it is left"


# -- a rebuild --------------------------------------------------------------------------------------------------------

LONG = [f"My friend number {n} lives in house {1000 + n} of the street by the river." for n in range(40)]
SHORT = [
    f"{name} {does}."
    for does in ("rows", "sails")
    for name in ["Ann", "Bob", "Carl", "Emma", "Fred", "Hans", "Jon", "Karl", "Lisa", "Max", "Nina"]
]


def lines(template: PromptTemplate, texts: Sequence[str]) -> list[Line]:
    return [Line(FactId(f"{n}"), n, tuple(template.fact(text))) for n, text in enumerate(texts)]


def memory(engine: MemoryEngine, template: PromptTemplate, facts: Sequence[Line], window: int) -> FactChunks:
    head = template.default_head()
    chunks = FactChunks("ada", engine.model_digest, head, window_facts=window, room_tokens=2047, keep_stale=True)
    chunks.update(facts)
    return chunks


async def encoded(engine: MemoryEngine, encoder: Encoder, chunks: FactChunks) -> dict[ChunkId, torch.Tensor]:
    """Each fact's chunk as the worker holds it, once all are there."""
    await encoder.submit("ada", chunks)
    await encoder.settled("ada")
    return {id_: (await engine.llm.collective_rpc(read_chunk, args=(id_,)))[0] for id_ in chunks.ids()}


@pytest.mark.parametrize(
    ("texts", "window", "corrected", "made_anew"),
    [
        pytest.param(LONG, 10, 13, 17, id="two windows of four"),
        pytest.param(SHORT, 20, 20, 2, id="two facts, ten tokens behind what the prefix cache holds"),
    ],
)
async def test_a_rebuild_leaves_the_ids_and_bytes_of_a_full_build_for_a_part_of_its_tokens(
    engine: MemoryEngine, language_model: Path, texts: list[str], window: int, corrected: int, made_anew: int
) -> None:
    """Byte for byte in bfloat16, where prefills of one prompt differ by how many of its tokens were computed at once: a
    rebuild cuts its prompts as a full build does, whatever the prefix cache holds of them."""
    template = PromptTemplate(AutoTokenizer.from_pretrained(language_model))
    before = engine.counters["encode_prefilled_tokens"]
    encoder = Encoder(engine, ChunkLedger(256 << 20, engine.token_bytes), EncodePace(CPU_STEP_TOKENS))
    chunks = memory(engine, template, lines(template, texts), window)
    old = await encoded(engine, encoder, chunks)
    built = engine.counters["encode_prefilled_tokens"] - before
    after = lines(template, [*texts[:corrected], "Ann swims.", *texts[corrected + 1 :]])
    chunks.update(after)
    chunks.renew("a salt")
    warm = await encoded(engine, encoder, chunks)
    rebuilt = engine.counters["encode_prefilled_tokens"] - before - built
    encoder.close()

    await check_integrity(engine)  # drops every chunk, and the prefix cache
    encoder = Encoder(engine, ChunkLedger(256 << 20, engine.token_bytes), EncodePace(CPU_STEP_TOKENS))
    full = await encoded(engine, encoder, memory(engine, template, after, window))
    encoder.close()
    assert list(warm) == list(full), "the ids"
    assert [id_ for id_ in full if not torch.equal(warm[id_], full[id_])] == [], "the bytes"
    assert len(full.keys() - old.keys()) == made_anew
    assert 0 < rebuilt < 0.6 * built
