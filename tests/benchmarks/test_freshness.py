"""`memshard bench freshness`: what is corrected, what a rebuild costs in counts, and what becomes of the answers."""

from __future__ import annotations

import statistics

import pytest

from benchmarks.freshness import FACTS, FULL, OLD, TEXT, WARM, Answer, Cost, Measured, as_text, shares_of_full_build
from benchmarks.freshness_report import cost_table, rows, table
from benchmarks.quality_questions import before_and_after
from cluster.settings import Settings
from deployments.scoring import is_right

WINDOW = Settings.model_fields["window_facts"].default


def test_every_fact_of_a_profile_has_a_question_and_its_correction_another_answer() -> None:
    before, after = before_and_after(0, FACTS)
    assert len(set(before.facts)) == len({question.text for question in before.questions}) == FACTS
    for old, new, asked, again in zip(before.facts, after.facts, before.questions, after.questions, strict=True):
        assert asked.text == again.text
        assert is_right(old, asked.answers)
        assert is_right(new, again.answers)
        assert asked.answers != again.answers
        assert old != new
    assert before_and_after(0, FACTS) == (before, after) != before_and_after(1, FACTS)


@pytest.mark.parametrize(("turn_facts", "most"), [(1, 0.40), (2, 0.20), (3, 0.20), (5, 0.20)])
def test_one_changed_turn_of_a_hundred_is_rebuilt_for_a_fifth_of_a_full_build_where_turns_leave_two_facts(
    turn_facts: int, most: float
) -> None:
    """Without any prefix cache. Where a turn leaves one fact, twenty and more of a hundred depend on each, and a fifth
    cannot be had."""
    shares = shares_of_full_build(100, turn_facts, WINDOW, fact_tokens=3, head_tokens=7)
    assert statistics.fmean(shares) <= most


def answer(arm: str, place: int, new: bool, old: bool = False) -> Answer:
    return Answer(arm, "profile-0", f"question {place}", new, old)


MEASURED = Measured(
    "m",
    WINDOW,
    [
        *(answer(TEXT, place, new=place < 3) for place in range(4)),
        *(answer(OLD, place, new=False, old=True) for place in range(4)),
        *(answer(as_text("{}"), place, new=place != 0) for place in range(4)),
        *(answer(WARM, place, new=True) for place in range(4)),
        *(answer(FULL, place, new=True) for place in range(4)),
    ],
    [Cost(as_text("{}"), chat_tokens=12), Cost(WARM, 200, 100), Cost(WARM, 400, 200), Cost(FULL, 2000, 1000)],
)


def test_followed_is_the_share_of_what_text_follows() -> None:
    followed = {row["arm"]: (row["followed"], row["followed_of"], row["new"], row["old"]) for row in rows(MEASURED)}
    assert followed[TEXT] == (1.0, 3, 0.75, 0.0)
    assert followed[OLD] == (0.0, 3, 0.0, 1.0)
    assert followed[as_text("{}")] == (2 / 3, 3, 0.75, 0.0)


def test_costs_are_means_and_shares_of_a_full_build() -> None:
    (warm,) = [row for row in rows(MEASURED) if row["arm"] == WARM]
    assert (warm["prompt_tokens"], warm["computed_tokens"]) == (300, 150)
    assert warm["share_of_full_build"] == warm["share_of_full_computed"] == 0.15


def test_the_tables_have_a_line_for_each_arm_and_each_number_of_facts() -> None:
    assert table(MEASURED).row_count == 5
    assert cost_table(WINDOW).row_count == 4
