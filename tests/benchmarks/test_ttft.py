"""What is asked in which order, which responses count, and what becomes of them."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import ttft_report
from benchmarks.facts import person_facts
from benchmarks.ttft import ARMS, MODES, Arm, Sample, arms_in_random_order, check, check_same_prompt, questions
from sharding.errors import MemshardError

PEOPLE = {f"user-{seed}": person_facts(seed) for seed in range(2)}


def sample(arm: Arm, k: int = 5, round: int = 1, ttft_s: float = 0.1, **memory: Any) -> Sample:
    """A response that is what its arm means, but for `memory`."""
    used = arm != "no_memory"
    told = {
        "mode": MODES[arm],
        "fact_ids": [f"fact-{i}" for i in range(k)] if used else [],
        "memory_tokens": 25 * k if used else 0,
        "injected_tokens": 25 * k + 20 if arm == "inject" else 0,
        "prefix_cached_tokens": 25 * k if arm == "native_hit" else 0,
        "fallback": None,
        "left_out": 0,
        **memory,
    }
    return Sample(arm, k, round, ttft_s + 0.05, ttft_s, 25 * k + 40 if used else 40, told)


def test_nobody_is_asked_anything_twice() -> None:
    asked = [(question.user, question.text) for question in questions(PEOPLE, (5, 10, 20, 50), 30)]
    assert len(set(asked)) == len(asked) == 120


def test_every_round_asks_about_each_number_of_facts_with_each_arm() -> None:
    asked = list(questions(PEOPLE, (5, 50), 3))
    assert sorted((q.round, q.k) for q in asked) == [(r, k) for r in range(3) for k in (5, 50)]
    assert all(sorted(q.arms) == sorted(ARMS) for q in asked)


def test_more_rounds_than_there_are_questions_are_refused() -> None:
    with pytest.raises(MemshardError, match="29 rounds"):
        list(questions(PEOPLE, (5, 10, 20, 50), 31))


def test_the_native_hit_comes_behind_the_prompt_that_warms_it_and_else_anywhere() -> None:
    rng = random.Random(0)
    orders = {arms_in_random_order(rng) for _ in range(500)}
    assert len(orders) == 12
    assert all(order.index("prompt") < order.index("native_hit") for order in orders)


@pytest.mark.parametrize("arm", ARMS)
def test_a_response_that_is_what_its_arm_means_counts(arm: Arm) -> None:
    check(sample(arm))


@pytest.mark.parametrize(
    ("arm", "memory"),
    [
        ("inject", {"injected_tokens": 0, "fallback": "chunk missing"}),
        ("inject", {"injected_tokens": 60}),
        ("inject", {"prefix_cached_tokens": 128}),
        ("inject", {"left_out": 1}),
        ("inject", {"fact_ids": ["fact-0"]}),
        ("prompt", {"prefix_cached_tokens": 128}),
        ("prompt", {"mode": "inject"}),
        ("native_hit", {"prefix_cached_tokens": 0}),
        ("no_memory", {"memory_tokens": 25}),
    ],
)
def test_any_other_response_is_an_error(arm: Arm, memory: dict[str, Any]) -> None:
    with pytest.raises(MemshardError, match=f"not what {arm} means"):
        check(sample(arm, **memory))


def test_arms_that_answered_different_prompts_are_an_error() -> None:
    prompt, inject = sample("prompt"), sample("inject")
    check_same_prompt(prompt, inject)
    with pytest.raises(MemshardError, match="same prompt"):
        check_same_prompt(prompt, replace(inject, prompt_tokens=inject.prompt_tokens + 1))


def measured() -> Iterator[Sample]:
    """Three rounds; a slow machine in the second one slows every arm alike."""
    for round, slowness in enumerate((1.0, 3.0, 1.0), start=1):
        for arm, ttft_s in zip(ARMS, (0.4, 0.08, 0.1, 0.05), strict=True):
            yield sample(arm, 50, round, ttft_s * slowness)


def test_rows_are_flat_and_alike_one_an_arm_and_number_of_facts() -> None:
    rows = list(ttft_report.rows("model", list(measured())))
    assert [(row["arm"], row["k"], row["n"]) for row in rows] == [(arm, 50, 3) for arm in ARMS]
    assert len({tuple(row) for row in rows}) == 1
    assert {type(value) for row in rows for value in row.values()} <= {str, int, float}
    row = rows[0]
    assert (row["memory_tokens"], row["prompt_tokens"]) == (1250, 1290)
    assert row["engine_ttft_s"] == pytest.approx(0.4)
    assert row["engine_ttft_q3_s"] == pytest.approx(0.8)
    assert row["client_ttft_s"] == pytest.approx(0.45)


def test_ratios_compare_within_a_round() -> None:
    samples = list(measured())
    assert ttft_report.ratio(samples, 50, "prompt", "inject", "engine_ttft_s") == pytest.approx(5.0)
    assert ttft_report.ratio(samples, 50, "inject", "native_hit", "engine_ttft_s") == pytest.approx(0.8)


def test_growth_compares_the_largest_number_of_facts_with_the_smallest_of_the_same_round() -> None:
    few = [sample("inject", 5, round, ttft_s) for round, ttft_s in enumerate((0.05, 0.1, 0.2))]
    many = [sample("inject", 50, round, ttft_s) for round, ttft_s in enumerate((0.1, 0.15, 0.24))]
    others = [sample(arm, k, round) for arm in ARMS for k in (5, 50) for round in range(3) if arm != "inject"]
    growth = ttft_report.growth([*few, *many, *others])
    told = dict(zip(*(column.cells for column in growth.columns[:2]), strict=True))
    assert told == {"prompt": "0", "inject": "50", "native_hit": "0", "no_memory": "0"}


def test_tables_and_lines_show_every_arm() -> None:
    samples = list(measured())
    assert ttft_report.times("model", samples).row_count == len(ARMS)
    assert ttft_report.ratios(samples).row_count == 2
    assert [line.name for line in ttft_report.lines(samples)] == list(ARMS)
