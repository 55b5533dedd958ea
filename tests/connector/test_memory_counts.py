"""Where memory's tokens came from: every token of every request once, under the reason it has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from connector.chunk import ChunkId
from connector.memory_counts import MemoryCounts
from connector.plan import Piece, plan_memory
from connector.port import EngineDelta
from connector.reason import Reason

pieces = st.builds(
    lambda tokens, chunk, why: Piece((7,) * tokens, chunk, None if chunk else why),
    st.integers(1, 9),
    st.none() | st.just(ChunkId("a")),
    st.sampled_from([Reason.NOT_ENCODED, Reason.EVICTED]),
)


@given(pieces, st.lists(pieces, min_size=1, max_size=5), st.sampled_from([None, *Reason]), st.data())
def test_every_token_of_memory_is_counted_once(
    head: Piece, facts: list[Piece], failed: Reason | None, data: st.DataObject
) -> None:
    plan = plan_memory(head, facts, (1, 2), "alice", inject=True, max_model_len=1000, max_tokens=1)
    hit = data.draw(st.integers(0, plan.load_tokens))
    injected = 0 if failed else plan.load_tokens - hit
    counts = MemoryCounts()
    counts.add(plan, EngineDelta((3,), "", "stop", injected, hit, failed, hit))
    assert counts.injected + counts.hit + counts.prefilled.total() == len(head.token_ids) + plan.memory_tokens


def test_text_is_counted_under_the_reason_of_the_piece_it_begins_with() -> None:
    head, there = Piece((1,) * 4, ChunkId("h")), Piece((2,) * 3, ChunkId("f"))
    gone, new = Piece((3,) * 5, unready=Reason.EVICTED), Piece((4,) * 6, unready=Reason.NOT_ENCODED)
    plan = plan_memory(head, [there, new, gone, there], (9,), "alice", inject=True, max_model_len=99, max_tokens=1)
    counts = MemoryCounts()
    counts.add(plan, EngineDelta((3,), "", "stop", 4, 3, None, 3))  # behind the head, there: both came out of chunks
    assert counts.plain() == {
        "memory_tokens_injected": 4,
        "memory_tokens_hit": 3,
        "memory_tokens_prefilled_not_encoded": 0,
        "memory_tokens_prefilled_evicted": 14,
        "memory_tokens_prefilled_late": 0,
        "memory_tokens_prefilled_missing_chunk": 0,
        "memory_tokens_prefilled_load_failed": 0,
        "memory_tokens_prefilled_model_refused": 0,
        "memory_tokens_prefilled_skip_reading_prefix_cache": 0,
    }


def test_memory_that_was_asked_for_as_text_is_not_counted() -> None:
    facts = [Piece((2,) * 3, unready=Reason.NOT_ENCODED)]
    plan = plan_memory(Piece((1,)), facts, (9,), "alice", inject=False, max_model_len=99, max_tokens=1)
    counts = MemoryCounts()
    counts.add(plan, EngineDelta((3,), "", "stop", 0, 0, None))
    assert not any(counts.plain().values())
