"""The head of a system prompt that comes again becomes one chunk at position 0, shared by all users."""

from __future__ import annotations

import asyncio

import pytest
from slow_engine import SlowEngine, dead

from connector.chunk import chunk_id
from connector.ledger import SHARED, ChunkLedger
from connector.plan import Piece
from deployments.encoder import Encoder
from deployments.heads import HEADS_WAITING, Heads

BUDGET = 800  # a hundred of them for heads
DEFAULT = (9, 9)


@pytest.fixture
def heads(engine: SlowEngine, ledger: ChunkLedger, encoder: Encoder) -> Heads:
    return Heads(engine.model_digest, encoder, ledger, DEFAULT)


async def seen_twice(heads: Heads, *token_ids: int) -> Piece:
    await heads.piece(token_ids)
    return await heads.piece(token_ids)


def resident(ledger: ChunkLedger, piece: Piece) -> bool:
    return piece.chunk is not None and ledger.peek_resident(piece.chunk)


async def test_a_head_is_encoded_once_where_it_is_always_served(
    heads: Heads, engine: SlowEngine, ledger: ChunkLedger
) -> None:
    piece = await seen_twice(heads, 1, 2, 3)
    await heads.encoded()
    assert await heads.piece([1, 2, 3]) == piece
    await heads.encoded()
    assert piece.token_ids == (1, 2, 3)
    assert piece.chunk == chunk_id("model", SHARED, (), (1, 2, 3))
    assert resident(ledger, piece)
    [prefill] = engine.prefills
    assert prefill.token_ids == (1, 2, 3)
    assert [(range_.start, range_.tokens) for range_ in prefill.captures] == [(0, 3)]


async def test_a_head_that_never_comes_again_costs_nothing(heads: Heads, engine: SlowEngine) -> None:
    for minute in range(60):
        await heads.piece([1, 2, 3, minute])
    await heads.encoded()
    assert engine.prefills == []


async def test_the_default_head_is_encoded_at_once(heads: Heads, ledger: ChunkLedger) -> None:
    piece = await heads.piece(DEFAULT)
    await heads.encoded()
    assert resident(ledger, piece)


async def test_a_head_is_answered_without_waiting_for_its_chunk(
    heads: Heads, engine: SlowEngine, ledger: ChunkLedger
) -> None:
    engine.gate.clear()
    async with asyncio.timeout(1):
        piece = await seen_twice(heads, 1, 2, 3)
    assert not resident(ledger, piece)
    engine.gate.set()
    await heads.encoded()
    assert resident(ledger, piece)


@pytest.mark.parametrize("failure", [dead(), ValueError("no")])
async def test_a_head_whose_encoding_failed_is_tried_when_it_is_seen_again(
    heads: Heads, engine: SlowEngine, ledger: ChunkLedger, failure: Exception
) -> None:
    engine.fails_with = failure
    piece = await seen_twice(heads, 1)
    await heads.encoded()
    engine.fails_with = None
    await heads.piece([1])
    await heads.encoded()
    assert resident(ledger, piece)


async def test_one_head_that_cannot_be_encoded_keeps_no_other_from_it(
    heads: Heads, engine: SlowEngine, ledger: ChunkLedger
) -> None:
    long = await seen_twice(heads, *range(101))  # more than all heads may take
    short = await seen_twice(heads, 1)
    await heads.encoded()
    assert (resident(ledger, long), resident(ledger, short)) == (False, True)


async def test_the_head_used_longest_ago_goes_for_one_more_and_comes_back_when_it_is_seen_again(
    heads: Heads, engine: SlowEngine, ledger: ChunkLedger
) -> None:
    pieces = []
    for n in range(11):
        pieces.append(await seen_twice(heads, *[n] * 10))
        await heads.encoded()
    assert [resident(ledger, piece) for piece in pieces] == [False, *[True] * 10]
    await heads.piece([0] * 10)
    await heads.encoded()
    assert [resident(ledger, piece) for piece in pieces] == [True, False, *[True] * 9]
    assert len(ledger) == len(engine.chunks) == 10


async def test_heads_that_come_faster_than_they_are_encoded_do_not_queue_without_bound(
    heads: Heads, engine: SlowEngine
) -> None:
    engine.gate.clear()
    for n in range(3 * HEADS_WAITING):
        await seen_twice(heads, n)
    assert len(list(heads.ids())) == HEADS_WAITING
    engine.gate.set()
    await heads.encoded()
    assert list(heads.ids()) == []
