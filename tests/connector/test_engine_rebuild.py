"""The packaged model on the real engine: what a rebuild encodes is, byte for byte, what a full build encodes.

In bfloat16 two prefills of one prompt differ by how its tokens were batched, so this holds only where a rebuild cuts a
prompt as a full build does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from connector.chunk import ChunkId
from connector.engine import EngineSettings, MemoryEngine
from connector.ledger import ChunkLedger
from connector.template import PromptTemplate
from connector.windows import FactChunks, Line
from deployments.encode_pace import CPU_STEP_TOKENS, EncodePace
from deployments.encoder import Encoder
from sharding.ids import FactId
from tests.connector.engines import check_integrity, read_chunk

BUDGET = 256 << 20
WINDOW, FACTS = 10, 40
OWNER = "ada"

pytestmark = pytest.mark.usefixtures("left_as_it_was")


@pytest.fixture(scope="module")
async def engine(language_model: Path) -> AsyncIterator[MemoryEngine]:
    engine = await MemoryEngine.start(
        EngineSettings(language_model, chunk_budget_bytes=BUDGET, kv_cache_bytes=BUDGET, max_model_len=2048)
    )
    yield engine
    engine.shutdown()


@pytest.fixture
async def encoder(engine: MemoryEngine) -> AsyncIterator[Encoder]:
    encoder = Encoder(engine, ChunkLedger(BUDGET, engine.token_bytes), EncodePace(CPU_STEP_TOKENS))
    yield encoder
    encoder.close()


@pytest.fixture
def template(language_model: Path) -> PromptTemplate:
    return PromptTemplate(AutoTokenizer.from_pretrained(language_model))


def lines(template: PromptTemplate, corrected: int | None = None) -> list[Line]:
    texts = [f"My friend number {n} lives in house {1000 + n} of the street by the river." for n in range(FACTS)]
    if corrected is not None:
        texts[corrected] = f"My friend number {corrected} has moved to a flat beside the old harbour."
    return [Line(FactId(f"{n}"), n, tuple(template.fact(text))) for n, text in enumerate(texts)]


def memory(engine: MemoryEngine, template: PromptTemplate, facts: Sequence[Line]) -> FactChunks:
    head = template.default_head()
    chunks = FactChunks(OWNER, engine.model_digest, head, window_facts=WINDOW, room_tokens=2047, keep_stale=True)
    chunks.update(facts)
    return chunks


async def encoded(encoder: Encoder, chunks: FactChunks) -> None:
    await encoder.submit(OWNER, chunks)
    await encoder.settled(OWNER)


async def read(engine: MemoryEngine, chunks: FactChunks) -> dict[ChunkId, torch.Tensor]:
    """Each fact's bytes as the worker holds them, in the order of telling."""
    return {id_: (await engine.llm.collective_rpc(read_chunk, args=(id_,)))[0] for id_ in chunks.ids()}


@pytest.mark.parametrize("corrected", [0, 13, 29, FACTS - 1])
async def test_a_rebuild_leaves_the_ids_and_bytes_of_a_full_build_for_a_part_of_its_tokens(
    engine: MemoryEngine, encoder: Encoder, template: PromptTemplate, corrected: int
) -> None:
    counters = engine.counters
    before = counters["encode_prefilled_tokens"]
    chunks = memory(engine, template, lines(template))
    await encoded(encoder, chunks)
    built = counters["encode_prefilled_tokens"] - before
    chunks.update(lines(template, corrected))
    chunks.renew("the first rebuild")
    await encoded(encoder, chunks)
    rebuilt = counters["encode_prefilled_tokens"] - before - built
    warm = await read(engine, chunks)

    await check_integrity(engine)  # drops every chunk, and the prefix cache
    encoder.close()
    anew = Encoder(engine, ChunkLedger(BUDGET, engine.token_bytes), EncodePace(CPU_STEP_TOKENS))
    full = memory(engine, template, lines(template, corrected))
    await encoded(anew, full)
    anew.close()
    expected = await read(engine, full)
    assert list(warm) == list(expected), "the ids"
    assert [id_ for id_ in warm if not torch.equal(warm[id_], expected[id_])] == [], "the bytes"
    assert 0 < rebuilt < 0.6 * built, "two windows of four at most"
