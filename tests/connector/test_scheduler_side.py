"""The scheduler's half: how many tokens come out of chunks, into which slots, and which slots are kept as chunks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.chunk import ChunkId, ChunkRef
from connector.metadata import CaptureRange, StepReport, Wishes, transfer_params
from connector.reason import Reason
from connector.scheduler_side import Scheduled, SchedulerSide

BLOCK = 4

loads = st.lists(
    st.tuples(st.integers(0, 9).map(lambda n: ChunkId(f"{n:032x}")), st.integers(1, 9)), min_size=1, max_size=4
)


def side() -> SchedulerSide:
    return SchedulerSide(BLOCK)


def blocks_for(tokens: int, shuffle: st.DataObject | None = None) -> list[int]:
    needed = list(range(10, 10 + -(-tokens // BLOCK)))
    return shuffle.draw(st.permutations(needed)) if shuffle is not None else needed


def slot(blocks: list[int], position: int) -> int:
    return blocks[position // BLOCK] * BLOCK + position % BLOCK


@given(loads, st.integers(1, 60), st.integers(0, 15), st.data())
def test_what_follows_a_prefix_hit_is_loaded_into_its_own_slots_and_never_into_the_hit(
    load: list[ChunkRef], prompt: int, hit_blocks: int, data: st.DataObject
) -> None:
    hit = min(hit_blocks, (prompt - 1) // BLOCK) * BLOCK
    scheduler = side()
    scheduler.arrived("r", transfer_params(load), prompt)
    matched = scheduler.matched_tokens("r", hit)
    assert matched is not None
    assert 0 <= matched <= max(0, prompt - 1 - hit), "one token is left to compute"
    assert matched == max(0, min(sum(tokens for _, tokens in load), prompt - 1) - hit)
    blocks = blocks_for(prompt, data)
    scheduler.allocated("r", blocks, matched)
    step = scheduler.step([])
    if matched == 0:
        assert step.loads == []
        return
    [write] = step.loads
    assert write.chunks == tuple(load)
    assert write.skip == hit
    assert write.slots == tuple(slot(blocks, position) for position in range(hit, hit + matched))
    assert write.blocks == tuple(dict.fromkeys(s // BLOCK for s in write.slots))
    assert not set(write.blocks) & set(blocks[: hit // BLOCK])


@given(loads, st.integers(1, 60), st.lists(st.integers(0, 60), min_size=1, max_size=20))
def test_being_asked_any_number_of_times_changes_no_answer(load: list[ChunkRef], prompt: int, hits: list[int]) -> None:
    scheduler = side()
    scheduler.arrived("r", transfer_params(load), prompt)
    first = [scheduler.matched_tokens("r", hit) for hit in hits]
    assert [scheduler.matched_tokens("r", hit) for hit in hits] == first
    assert scheduler.step([]).loads == []


def test_a_request_that_was_preempted_is_loaded_again_into_its_new_blocks() -> None:
    scheduler = side()
    scheduler.arrived("r", transfer_params([(ChunkId("a"), 6)]), 9)
    scheduler.allocated("r", [1, 2, 3], scheduler.matched_tokens("r", 0) or 0)
    assert scheduler.step([]).loads[0].slots == (4, 5, 6, 7, 8, 9)
    scheduler.allocated("r", [7, 5, 9], scheduler.matched_tokens("r", 4) or 0)
    [again] = scheduler.step([]).loads
    assert (again.skip, again.slots, again.blocks) == (4, (20, 21), (5,))
    assert scheduler.step([]).loads == [], "a load is handed out once"


def test_a_request_allocated_twice_before_a_step_loads_into_the_last_blocks_only() -> None:
    scheduler = side()
    scheduler.arrived("r", transfer_params([(ChunkId("a"), 6)]), 9)
    scheduler.allocated("r", [1, 2, 3], 6)
    scheduler.allocated("r", [4, 5, 6], 6)
    [load] = scheduler.step([]).loads
    assert load.blocks == (4, 5)


def test_an_allocation_without_external_tokens_takes_the_earlier_load_back() -> None:
    scheduler = side()
    scheduler.arrived("r", transfer_params([(ChunkId("a"), 8)]), 9)
    scheduler.allocated("r", [1, 2, 3], 8)
    scheduler.allocated("r", [1, 2, 3], 0)
    assert scheduler.step([]).loads == []
    assert scheduler.finished("r") == {"injected_tokens": 0, "hit_tokens": 0, "fallback": None}


def test_several_requests_of_one_step_are_all_loaded() -> None:
    scheduler = side()
    for name in "xyz":
        scheduler.arrived(name, transfer_params([(ChunkId(name), 4)]), 6)
        scheduler.allocated(name, [ord(name), 0], 4)
    assert [load.request_id for load in scheduler.step([]).loads] == ["x", "y", "z"]


def test_a_request_that_ended_before_its_step_is_not_loaded() -> None:
    scheduler = side()
    scheduler.arrived("r", transfer_params([(ChunkId("a"), 4)]), 6)
    scheduler.allocated("r", [1, 2], 4)
    scheduler.finished("r")
    assert scheduler.step([]).loads == []
    assert scheduler.finished("r") is None
    assert scheduler.matched_tokens("r", 0) == 0
    scheduler.allocated("r", [1, 2], 0)


def test_a_load_that_failed_is_told_with_its_reason_and_not_tried_again() -> None:
    scheduler = side()
    for name in ("r", "other"):
        scheduler.arrived(name, transfer_params([(ChunkId(name), 4)]), 6, salt=name)
        scheduler.allocated(name, [1, 2], scheduler.matched_tokens(name, 0) or 0)
    scheduler.step([])
    scheduler.reported(StepReport({"r": Reason.MISSING_CHUNK, "unknown": Reason.LOAD_FAILED}))
    assert scheduler.matched_tokens("r", 0) == 0
    scheduler.allocated("r", [1, 2], 0)
    assert scheduler.finished("r") == {"injected_tokens": 0, "hit_tokens": 0, "fallback": "missing_chunk"}
    assert scheduler.finished("other") == {"injected_tokens": 4, "hit_tokens": 0, "fallback": None}


def test_reports_of_several_workers_add_up() -> None:
    both = StepReport({"r": Reason.MISSING_CHUNK}).aggregate(StepReport({"s": Reason.LOAD_FAILED}))
    assert both.failed == {"r": Reason.MISSING_CHUNK, "s": Reason.LOAD_FAILED}


def test_what_of_the_memory_was_in_the_prefix_cache_is_told() -> None:
    scheduler = side()
    for name, hit, told in (("part", 4, (2, 4)), ("all", 8, (0, 6))):
        scheduler.arrived(name, transfer_params([(ChunkId("a"), 6)]), 9)
        scheduler.allocated(name, [1, 2, 3], scheduler.matched_tokens(name, hit))
        assert scheduler.finished(name) == {"injected_tokens": told[0], "hit_tokens": told[1], "fallback": None}


def test_who_shares_a_salt_with_a_load_of_this_step_waits_until_it_is_known_to_have_worked() -> None:
    scheduler = side()
    for name, salt in (("first", "s"), ("second", "s"), ("fallen", "s"), ("other", "t")):
        scheduler.arrived(name, transfer_params([(ChunkId("a"), 6)]), 9, salt=salt)
    scheduler.reported(StepReport({"fallen": Reason.MISSING_CHUNK}))
    scheduler.allocated("first", [1, 2, 3], 6)
    asked = {name: scheduler.matched_tokens(name, 4) for name in ("first", "second", "fallen", "other")}
    assert asked == {"first": 2, "second": None, "fallen": None, "other": 2}
    scheduler.step([])
    assert (scheduler.matched_tokens("second", 4), scheduler.matched_tokens("fallen", 4)) == (2, 0)


def test_a_request_that_reads_no_prefix_cache_is_offered_nothing_and_told_so() -> None:
    scheduler = side()
    scheduler.arrived("r", transfer_params([(ChunkId("a"), 6)]), 9, reads_cache=False)
    assert scheduler.matched_tokens("r", 4) == 0
    scheduler.allocated("r", [1, 2, 3], 0)
    told = {"injected_tokens": 0, "hit_tokens": 0, "fallback": "skip_reading_prefix_cache"}
    assert scheduler.finished("r") == told


# -- captures ---------------------------------------------------------------------------------------------------------


@st.composite
def captured_prompts(draw: st.DrawFn) -> tuple[int, list[CaptureRange]]:
    prompt = draw(st.integers(1, 40))
    ranges = []
    for number in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, prompt - 1))
        ranges.append(CaptureRange(ChunkId(f"{number:032x}"), start, draw(st.integers(1, prompt - start))))
    return prompt, ranges


@given(captured_prompts(), st.sets(st.integers(1, 39), max_size=8), st.data())
def test_over_any_split_of_a_prompt_into_steps_each_token_of_a_capture_is_kept_once_where_it_is_written(
    captured: tuple[int, list[CaptureRange]], cuts: set[int], data: st.DataObject
) -> None:
    prompt, ranges = captured
    blocks = blocks_for(prompt, data)
    scheduler = side()
    scheduler.arrived("r", transfer_params(capture=ranges), prompt)
    kept: dict[ChunkId, dict[int, int]] = {range_.id: {} for range_ in ranges}
    for start, end in pairwise([0, *sorted(cut for cut in cuts if cut < prompt), prompt]):
        step = scheduler.step([Scheduled("r", start, end - start, blocks[: -(-end // BLOCK)])])
        for capture in step.captures:
            for place, written in enumerate(capture.slots, capture.offset):
                assert place not in kept[capture.id]
                kept[capture.id][place] = written
    for range_ in ranges:
        where = {place: slot(blocks, range_.start + place) for place in range(range_.tokens)}
        assert kept[range_.id] == where


@given(captured_prompts())
def test_a_capture_says_where_and_how_long_its_chunk_is_in_every_step(
    captured: tuple[int, list[CaptureRange]],
) -> None:
    prompt, ranges = captured
    scheduler = side()
    scheduler.arrived("r", transfer_params(capture=ranges), prompt)
    said = {
        (capture.id, capture.position, capture.tokens)
        for start in range(prompt)
        for capture in scheduler.step([Scheduled("r", start, 1, blocks_for(prompt))]).captures
    }
    assert said == {(range_.id, range_.start, range_.tokens) for range_ in ranges}


def test_tokens_computed_behind_a_capture_are_not_kept() -> None:
    scheduler = side()
    scheduler.arrived("r", transfer_params(capture=[CaptureRange(ChunkId("a"), 2, 2)]), 4)
    assert scheduler.step([Scheduled("r", 4, 1, [0, 1])]).captures == []
    assert scheduler.step([Scheduled("r", 0, 2, [0])]).captures == []


def test_only_requests_that_capture_need_to_be_heard_of_in_a_step() -> None:
    scheduler = side()
    scheduler.arrived("captures", transfer_params(capture=[CaptureRange(ChunkId("a"), 0, 1)]), 4)
    scheduler.arrived("loads", transfer_params([(ChunkId("a"), 1)]), 4)
    scheduler.arrived("plain", None, 4)
    assert [scheduler.captures_anything(id_) for id_ in ("captures", "loads", "plain", "unknown")] == [
        True,
        False,
        False,
        False,
    ]


# -- wishes -----------------------------------------------------------------------------------------------------------

anything: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)
malformed = anything | st.fixed_dictionaries({}, optional={"load": anything, "capture": anything})


@given(malformed, st.integers(1, 50))
def test_whatever_a_request_brings_as_wishes_no_hook_raises(params: Any, prompt: int) -> None:
    scheduler = side()
    scheduler.arrived("r", params, prompt)
    matched = scheduler.matched_tokens("r", 0)
    assert matched is not None
    assert 0 <= matched < prompt
    scheduler.allocated("r", blocks_for(prompt), matched)
    if scheduler.captures_anything("r"):
        scheduler.step([Scheduled("r", 0, prompt, blocks_for(prompt))])
    scheduler.step([])
    scheduler.finished("r")


@pytest.mark.parametrize(
    "params",
    [
        {"load": [["a", 0]]},
        {"load": [["a", -1]]},
        {"load": [["a", float("inf")]]},
        {"load": [["a", 1], ["b"]]},
        {"load": None},
        {"capture": [["a", -1, 2]]},
        {"capture": [["a", 0, 0]]},
        {"capture": 7},
        ["load"],
        "load",
        {"do_remote_prefill": True},
    ],
)
def test_malformed_wishes_are_none(params: Any) -> None:
    assert Wishes.of(params) == Wishes()


@given(loads, captured_prompts())
def test_wishes_survive_the_way_into_the_engine(load: list[ChunkRef], captured: tuple[int, list[CaptureRange]]) -> None:
    wishes = Wishes.of(transfer_params(load, captured[1]))
    assert wishes == Wishes(tuple(load), tuple(captured[1]))
    assert wishes.load_tokens == sum(tokens for _, tokens in load)
