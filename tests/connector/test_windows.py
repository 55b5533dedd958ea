"""Which facts stand before a fact while it is encoded, and what is prefilled so that every fact has its chunk."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from connector.chunk import ChunkId, chunk_id
from connector.plan import Piece
from connector.windows import FactChunks, Line
from sharding.ids import FactId

HEAD = (1, 2, 3)
OWNER, DIGEST = "alice", "model"
AMPLE = 10_000


def line(seq: int, tokens: Sequence[int] | None = None) -> Line:
    return Line(FactId(f"f{seq}"), seq, tuple(tokens) if tokens is not None else (100 + seq, 200 + seq))


@st.composite
def told(draw: st.DrawFn, max_tokens: int = 4) -> list[Line]:
    """Facts in the order of telling, with gaps where some were deleted; token ids repeat among facts."""
    seqs = sorted(draw(st.sets(st.integers(0, 25), max_size=14)))
    tokens = st.lists(st.integers(0, 3), min_size=1, max_size=max_tokens)
    return [line(seq, draw(tokens)) for seq in seqs]


windows = st.integers(0, 5)


def chunks_of(lines: Sequence[Line], window: int, room: int = AMPLE) -> FactChunks:
    chunks = FactChunks(OWNER, DIGEST, HEAD, window_facts=window, room_tokens=room)
    chunks.update(lines)
    return chunks


def flat(lines: Sequence[Line]) -> tuple[int, ...]:
    return tuple(token for line in lines for token in line.token_ids)


def blocks_of(lines: Sequence[Line], window: int) -> list[list[Line]]:
    return [list(members) for _, members in groupby(lines, key=lambda line: line.seq // window)]


def prefixes(lines: Sequence[Line], window: int) -> dict[FactId, tuple[int, ...]]:
    """The module's docstring, word by word: head + the block before + the earlier facts of its block."""
    if window == 0:
        return {line.fact: HEAD for line in lines}
    before: dict[FactId, tuple[int, ...]] = {}
    previous: list[Line] = []
    for block in blocks_of(lines, window):
        for place, fact in enumerate(block):
            before[fact.fact] = HEAD + flat(previous) + flat(block[:place])
        previous = block
    return before


def nothing(_: ChunkId) -> bool:
    return False


@given(told(), windows)
def test_a_fact_is_encoded_behind_the_head_the_block_before_and_the_earlier_facts_of_its_block(
    lines: list[Line], window: int
) -> None:
    chunks = chunks_of(lines, window)
    expected = prefixes(lines, window)
    for fact in lines:
        id_ = chunk_id(DIGEST, OWNER, expected[fact.fact], fact.token_ids)
        assert chunks.piece(fact.fact) == Piece(fact.token_ids, id_)
    assert chunks.ids() == [chunks.piece(fact.fact).chunk for fact in lines]


@given(told(), st.integers(1, 5))
def test_a_fact_with_enough_told_before_it_sees_between_one_and_two_windows_less_one(
    lines: list[Line], window: int
) -> None:
    full = [line(seq) for seq in range(len(lines))]
    for fact in full[window:]:
        seen = (len(prefixes(full, window)[fact.fact]) - len(HEAD)) // 2
        assert window <= seen <= 2 * window - 1
    assert chunks_of(full, window).ids() == [
        chunk_id(DIGEST, OWNER, prefixes(full, window)[fact.fact], fact.token_ids) for fact in full
    ]


@given(told(), windows, st.integers(len(HEAD) + 4, 40), st.data())
def test_the_jobs_capture_exactly_the_missing_chunks_each_where_its_fact_stands(
    lines: list[Line], window: int, room: int, data: st.DataObject
) -> None:
    chunks = chunks_of(lines, window, room)
    ids = chunks.ids()
    resident = data.draw(st.sets(st.sampled_from(ids))) if ids else set()
    tokens_of = {chunks.piece(fact.fact).chunk: fact.token_ids for fact in lines}
    captured = set()
    for job in chunks.jobs(resident.__contains__):
        assert job.token_ids[: len(HEAD)] == HEAD, "never encode a bare fact"
        assert job.captures
        for range_ in job.captures:
            end = range_.start + range_.tokens
            assert job.token_ids[range_.start : end] == tokens_of[range_.id]
            assert (
                chunk_id(DIGEST, OWNER, job.token_ids[: range_.start], job.token_ids[range_.start : end]) == range_.id
            )
            assert range_.id not in resident
            captured.add(range_.id)
        last = job.captures[-1]
        assert len(job.token_ids) == last.start + last.tokens, "nothing is prefilled behind the last capture"
    assert captured == set(ids) - resident


@given(told(), windows, st.integers(len(HEAD) + 4, 40))
def test_every_fact_is_captured_once_and_the_latest_told_first(lines: list[Line], window: int, room: int) -> None:
    distinct = [line(fact.seq, (*fact.token_ids, 1000 + fact.seq)) for fact in lines]
    chunks = chunks_of(distinct, window, room + 1)
    jobs = [[range_.id for range_ in job.captures] for job in chunks.jobs(nothing)]
    assert [id_ for job in reversed(jobs) for id_ in job] == chunks.ids()
    assert len(set(chunks.ids())) == len(distinct)


@given(told(), windows, st.integers(len(HEAD) + 4, 40))
def test_no_encoding_prompt_is_longer_than_the_room(lines: list[Line], window: int, room: int) -> None:
    for job in chunks_of(lines, window, room).jobs(nothing):
        assert len(job.token_ids) <= room


@given(told(max_tokens=12), windows, st.integers(len(HEAD) + 4, 40))
def test_a_fact_that_alone_is_longer_than_the_room_is_never_prefilled_and_the_others_are(
    lines: list[Line], window: int, room: int
) -> None:
    chunks = chunks_of(lines, window, room)
    jobs = list(chunks.jobs(nothing))
    assert all(len(job.token_ids) <= room for job in jobs)
    fits = {chunks.piece(fact.fact).chunk for fact in lines if len(HEAD) + len(fact.token_ids) <= room}
    assert {range_.id for job in jobs for range_ in job.captures} >= fits


@given(told(), windows, st.integers(len(HEAD) + 4, 40), st.integers(0, 14))
def test_a_fact_told_later_changes_no_id_told_before_be_the_room_as_small_as_it_may(
    lines: list[Line], window: int, room: int, told_first: int
) -> None:
    chunks = chunks_of(lines[:told_first], window, room)
    before = chunks.ids()
    assert chunks.update(lines) == set()
    assert chunks.ids()[: len(before)] == before


@given(told(), windows, st.data())
def test_a_deleted_fact_changes_only_the_later_facts_of_its_block_and_those_of_the_next(
    lines: list[Line], window: int, data: st.DataObject
) -> None:
    assume(lines)
    deleted = data.draw(st.sampled_from(lines))
    chunks = chunks_of(lines, window)
    before = {fact.fact: chunks.piece(fact.fact).chunk for fact in lines}
    left = [fact for fact in lines if fact != deleted]
    gone = chunks.update(left)
    changed = {fact.fact for fact in left if chunks.piece(fact.fact).chunk != before[fact.fact]}
    if window == 0:
        named: set[FactId] = set()
    else:
        blocks = blocks_of(lines, window)
        own = next(i for i, block in enumerate(blocks) if deleted in block)
        named = {fact.fact for fact in blocks[own] if fact.seq > deleted.seq}
        named |= {fact.fact for fact in blocks[own + 1]} if own + 1 < len(blocks) else set()
    assert changed <= named
    assert gone == set(before.values()) - set(chunks.ids())
    with pytest.raises(KeyError):
        chunks.piece(deleted.fact)


def test_a_deleted_fact_takes_every_chunk_along_that_was_encoded_behind_it() -> None:
    lines = [line(seq) for seq in range(9)]
    chunks = chunks_of(lines, 3)
    before = dict(zip(range(9), chunks.ids(), strict=True))
    gone = chunks.update([fact for fact in lines if fact.seq != 4])
    assert gone == {before[seq] for seq in (4, 5, 6, 7, 8)}


@given(told(), windows, st.integers(len(HEAD) + 4, 40))
def test_an_update_with_the_same_facts_changes_nothing(lines: list[Line], window: int, room: int) -> None:
    chunks = chunks_of(lines, window, room)
    before = chunks.ids()
    assert chunks.update(list(lines)) == set()
    assert chunks.ids() == before


@given(told(), windows, st.integers(len(HEAD) + 4, 40), st.data())
def test_however_the_facts_came_to_be_these_their_ids_are_the_same(
    lines: list[Line], window: int, room: int, data: st.DataObject
) -> None:
    """A shard that loads the user anew finds the chunks of the one that saw every change, the cold tier's included."""
    chunks = FactChunks(OWNER, DIGEST, HEAD, window_facts=window, room_tokens=room)
    for _ in range(3):
        some = data.draw(st.sets(st.sampled_from(lines))) if lines else set()
        chunks.update([fact for fact in lines if fact in some])
    chunks.update(lines)
    assert chunks.ids() == chunks_of(lines, window, room).ids()


def test_without_a_window_every_fact_is_encoded_behind_the_head_alone() -> None:
    chunks = chunks_of([line(0), line(1)], 0)
    assert [job.token_ids for job in chunks.jobs(nothing)] == [(*HEAD, 101, 201), (*HEAD, 100, 200)]


def test_one_prompt_captures_a_whole_block_behind_the_block_before() -> None:
    jobs = list(chunks_of([line(seq) for seq in range(5)], 3).jobs(nothing))
    assert [len(job.captures) for job in jobs] == [2, 3]
    assert jobs[0].token_ids == (*HEAD, 100, 200, 101, 201, 102, 202, 103, 203, 104, 204)
    assert [range_.start for range_ in jobs[0].captures] == [9, 11]


def test_jobs_end_where_the_facts_change_meanwhile() -> None:
    """A fact that was deleted between two prefills must not be encoded after all."""
    lines = [line(seq) for seq in range(6)]
    chunks = chunks_of(lines, 2)
    jobs = chunks.jobs(nothing)
    next(jobs)
    chunks.update(lines[1:])
    assert list(jobs) == []


def test_two_owners_and_two_models_have_no_chunk_in_common() -> None:
    lines = [line(seq) for seq in range(4)]
    others = [
        FactChunks("bob", DIGEST, HEAD, window_facts=2, room_tokens=AMPLE),
        FactChunks(OWNER, "another model", HEAD, window_facts=2, room_tokens=AMPLE),
        FactChunks(OWNER, DIGEST, (*HEAD, 4), window_facts=2, room_tokens=AMPLE),
    ]
    for other in others:
        other.update(lines)
        assert not set(other.ids()) & set(chunks_of(lines, 2).ids())
