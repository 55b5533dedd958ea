"""An encode job is cut into short prefills, each behind what those before it left in the prefix cache."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from connector.chunk import CaptureRange, ChunkId
from connector.encode_steps import steps
from connector.windows import EncodeJob


def job(window: int, *facts: int, known: int = 0) -> EncodeJob:
    """Captures facts of these lengths behind a window of so many tokens."""
    captures, start = [], window
    for place, tokens in enumerate(facts):
        captures.append(CaptureRange(ChunkId(f"{place}"), start, tokens))
        start += tokens
    return EncodeJob(tuple(range(start)), tuple(captures), known)


def computed(step: EncodeJob) -> int:
    return len(step.token_ids) - step.known_tokens


lengths = st.lists(st.integers(1, 40), min_size=1, max_size=60)


@given(st.integers(0, 500), lengths, st.integers(1, 300), st.sampled_from([1, 16, 128]), st.integers(0, 500))
def test_steps_capture_everything_once_and_compute_no_more_than_they_may(
    window: int, facts: list[int], step_tokens: int, block_tokens: int, known: int
) -> None:
    whole = job(window, *facts, known=min(known, window))
    cut = list(steps(whole, step_tokens=step_tokens, block_tokens=block_tokens))
    assert [range_ for step in cut for range_ in step.captures] == list(whole.captures)
    cached = whole.known_tokens
    for step in cut:
        assert step.token_ids == whole.token_ids[: len(step.token_ids)]
        assert step.known_tokens % block_tokens == 0
        assert step.known_tokens <= cached, "it counts on what nobody computed"
        assert all(range_.start >= step.known_tokens for range_ in step.captures), "a cached token is not captured"
        assert all(range_.start + range_.tokens <= len(step.token_ids) for range_ in step.captures)
        assert computed(step) <= max(step_tokens, 2 * block_tokens) + 40
        cached = len(step.token_ids)
    assert cut[-1].token_ids == whole.token_ids


@given(st.integers(0, 500), lengths, st.integers(1, 300), st.sampled_from([1, 16, 128]), st.data())
def test_a_part_is_computed_in_the_steps_of_the_whole(
    window: int, facts: list[int], step_tokens: int, block_tokens: int, data: st.DataObject
) -> None:
    whole = job(window, *facts)
    part = {*data.draw(st.sets(st.sampled_from(whole.captures))), whole.captures[-1]}
    kept = tuple(range_ for range_ in whole.captures if range_ in part)
    sizes = {"step_tokens": step_tokens, "block_tokens": block_tokens}
    expected = [
        EncodeJob(step.token_ids, tuple(range_ for range_ in step.captures if range_ in part), step.known_tokens)
        for step in steps(whole, **sizes)
    ]
    assert list(steps(EncodeJob(whole.token_ids, kept, 0, whole.captures), **sizes)) == expected


def test_one_step_is_enough_for_what_fits_into_one() -> None:
    [step] = steps(job(100, 25, 25, 25), step_tokens=200, block_tokens=128)
    assert step == job(100, 25, 25, 25)


def test_a_window_that_was_prefilled_before_is_not_prefilled_again() -> None:
    [step] = steps(job(1_300, 25, known=1_300), step_tokens=200, block_tokens=128)
    assert computed(step) == 1_325 % 128


def test_little_is_computed_twice_where_facts_are_short() -> None:
    cut = list(steps(job(50, *[25] * 100), step_tokens=160, block_tokens=128))
    assert sum(map(computed, cut)) < 1.2 * (50 + 100 * 25)
    assert max(map(computed, cut)) <= 160


def test_steps_of_a_window_end_on_blocks_borders() -> None:
    cut = list(steps(job(640, 25), step_tokens=160, block_tokens=128))
    assert [len(step.token_ids) for step in cut] == [128, 256, 384, 512, 640, 665]
    assert [bool(step.captures) for step in cut] == [False] * 5 + [True]


def test_captures_with_gaps_between_them_are_taken_in_their_order() -> None:
    captures = (CaptureRange(ChunkId("late"), 900, 20), CaptureRange(ChunkId("early"), 10, 20))
    cut = list(steps(EncodeJob(tuple(range(920)), captures), step_tokens=100, block_tokens=10))
    assert [range_.id for step in cut for range_ in step.captures] == ["early", "late"]
    assert max(map(computed, cut)) <= 120
    assert all(len(before.token_ids) < len(after.token_ids) for before, after in pairwise(cut))
