"""The head of every system prompt becomes one chunk at position 0, shared by all users; only the latest are kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from slow_engine import SlowEngine, dead

from connector.chunk import chunk_id
from connector.ledger import SHARED, ChunkLedger
from deployments.encoder import Encoder
from deployments.heads import HEADS_KEPT, Heads

BUDGET = 10_000


@pytest.fixture
def engine() -> SlowEngine:
    return SlowEngine(BUDGET)


@pytest.fixture
def ledger(engine: SlowEngine) -> Iterator[ChunkLedger]:
    ledger = ChunkLedger(BUDGET, engine.token_bytes)
    yield ledger
    ledger.check_integrity()


@pytest.fixture
async def heads(engine: SlowEngine, ledger: ChunkLedger) -> AsyncIterator[Heads]:
    encoder = Encoder(engine, ledger)  # type: ignore[arg-type]
    yield Heads(engine.model_digest, encoder, ledger)
    encoder.close()


async def test_a_head_is_encoded_once_where_it_is_always_served(
    heads: Heads, engine: SlowEngine, ledger: ChunkLedger
) -> None:
    piece = await heads.piece([1, 2, 3])
    await heads.encoded()
    assert await heads.piece([1, 2, 3]) == piece
    await heads.encoded()
    assert piece.token_ids == (1, 2, 3)
    assert piece.chunk == chunk_id("model", SHARED, (), (1, 2, 3))
    assert ledger.peek_resident(piece.chunk)
    [prefill] = engine.prefills
    assert prefill.token_ids == (1, 2, 3)
    assert [(range_.start, range_.tokens) for range_ in prefill.captures] == [(0, 3)]


async def test_a_head_seen_for_the_first_time_is_answered_without_waiting_for_its_chunk(
    heads: Heads, engine: SlowEngine, ledger: ChunkLedger
) -> None:
    engine.gate.clear()
    async with asyncio.timeout(1):
        piece = await heads.piece([1, 2, 3])
    assert piece.chunk is not None
    assert not ledger.peek_resident(piece.chunk)
    engine.gate.set()
    await heads.encoded()
    assert ledger.peek_resident(piece.chunk)


async def test_a_head_whose_encoding_failed_is_tried_when_the_next_new_one_comes(
    heads: Heads, engine: SlowEngine, ledger: ChunkLedger
) -> None:
    engine.fails_with = dead()
    first = await heads.piece([1])
    await heads.encoded()
    engine.fails_with = None
    second = await heads.piece([2])
    await heads.encoded()
    assert all(piece.chunk is not None and ledger.peek_resident(piece.chunk) for piece in (first, second))


async def test_the_head_used_longest_ago_is_forgotten_for_one_more(
    heads: Heads, engine: SlowEngine, ledger: ChunkLedger
) -> None:
    pieces = [await heads.piece([n]) for n in range(HEADS_KEPT)]
    await heads.piece([0])
    await heads.piece([HEADS_KEPT])
    await heads.encoded()
    kept = [piece.chunk is not None and ledger.peek_resident(piece.chunk) for piece in pieces]
    assert kept == [True, False, *[True] * (HEADS_KEPT - 2)]
    assert len(ledger) == len(engine.chunks) == HEADS_KEPT


async def test_a_head_forgotten_before_its_turn_came_is_not_encoded_after_all(
    heads: Heads, engine: SlowEngine, ledger: ChunkLedger
) -> None:
    engine.gate.clear()
    for n in range(HEADS_KEPT):
        await heads.piece([n])
    await asyncio.sleep(0.01)
    assert engine.running == 1
    asking = [asyncio.create_task(heads.piece([n])) for n in range(HEADS_KEPT, HEADS_KEPT + 9)]
    await asyncio.sleep(0.01)
    engine.gate.set()
    await asyncio.gather(*asking)
    await heads.encoded()
    assert len(ledger) == len(engine.chunks) == HEADS_KEPT


async def test_a_head_that_is_crowded_out_while_it_is_answered_is_answered_all_the_same(
    heads: Heads, engine: SlowEngine
) -> None:
    engine.gate.clear()
    for n in range(HEADS_KEPT):
        await heads.piece([n])
    await asyncio.sleep(0.01)
    asking = [asyncio.create_task(heads.piece([n])) for n in range(HEADS_KEPT, 3 * HEADS_KEPT)]
    await asyncio.sleep(0.01)  # the first of them waits until the worker has dropped the oldest
    engine.gate.set()
    pieces = await asyncio.gather(*asking)
    assert [piece.token_ids for piece in pieces] == [(n,) for n in range(HEADS_KEPT, 3 * HEADS_KEPT)]
