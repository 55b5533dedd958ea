"""What counts as a wrong answer: everything but what the history of a user's writes allows."""

from __future__ import annotations

import random
from typing import Any

import pytest

from benchmarks.load_client import Answer
from benchmarks.load_people import NEVER, Person, Population, Question, Told, settle
from deployments.deterministic import answer as deterministic_answer

ASKED, ANSWERED = 10.0, 12.0


@pytest.fixture
def population() -> Population:
    return Population(3, "run", seed=1, zipf=1.0)


@pytest.fixture
def person(population: Population) -> Person:
    """Somebody who told two facts long before the question."""
    person = population.people[0]
    person.facts = {"a": Told([("the first", 1.0, 2.0)]), "b": Told([("the second", 1.0, 2.0)])}
    return person


def judged(population: Population, person: Person, *ids: str, final: bool = False, **of: Any) -> str | None:
    given = {"text": "", "finish_reason": "stop", "left_out": 0, "injected_tokens": 0, "fallback": None, **of}
    exact, mode, top_k = given.pop("exact", False), given.pop("mode", "inject"), given.pop("top_k", 10)
    question = Question(person, mode, top_k, ASKED, ANSWERED)
    return population.wrong(question, Answer(fact_ids=ids, times=(), **given), exact, final)


def test_all_facts_in_any_order_are_right(population: Population, person: Person) -> None:
    assert judged(population, person, "a", "b") is None
    assert judged(population, person, "b", "a") is None


def test_a_fact_nobody_told_is_wrong_once_everything_is_known(population: Population, person: Person) -> None:
    assert judged(population, person, "a", "b", "c") == "unknown fact"
    assert judged(population, person, "a", "b", "c", final=True) == "a fact is not this user's"


def test_a_fact_that_is_not_found_is_wrong_unless_it_has_no_room(population: Population, person: Person) -> None:
    assert judged(population, person, "a") is not None
    assert judged(population, person, "a", left_out=1) is None
    assert judged(population, person, "a", top_k=1) is None
    assert judged(population, person, "a", "a") is not None


def test_a_fact_told_during_the_question_may_be_there_or_not(population: Population, person: Person) -> None:
    person.facts["c"] = Told([("the third", 11.0, 11.5)])
    assert judged(population, person, "a", "b") is None
    assert judged(population, person, "a", "b", "c") is None


@pytest.mark.parametrize(
    ("sent", "deleted", "with_it", "without_it"),
    [(1.0, 2.0, False, True), (9.0, 11.0, True, True), (13.0, 14.0, True, False), (9.0, NEVER, True, True)],
    ids=["before", "during", "after", "unanswered"],
)
def test_a_deleted_fact_may_be_served_until_its_deletion_is_acknowledged(
    population: Population, person: Person, sent: float, deleted: float, with_it: bool, without_it: bool
) -> None:
    person.facts["b"].delete_sent, person.facts["b"].deleted = sent, deleted
    assert (judged(population, person, "a", "b") is None) == with_it
    assert (judged(population, person, "a") is None) == without_it


def test_without_memory_there_are_no_facts(population: Population, person: Person) -> None:
    assert judged(population, person, mode="off") is None
    assert judged(population, person, "a", mode="off") is not None


def test_another_users_mark_in_the_text_is_wrong_and_the_own_is_not(population: Population, person: Person) -> None:
    other = population.people[1].mark
    assert judged(population, person, "a", "b", text=f"I know {person.mark}.") is None
    assert judged(population, person, "a", "b", text=f"I know {other}.") is not None


def test_the_deterministic_engines_words_are_checked_one_by_one(population: Population, person: Person) -> None:
    right = deterministic_answer(["the second", "the first"])  # the nearest stands last in the prompt
    assert judged(population, person, "a", "b", exact=True, text=right) is None
    assert judged(population, person, "b", "a", exact=True, text=right) is not None
    assert judged(population, person, "a", "b", exact=True, text=deterministic_answer(["the first"])) is not None
    cut = " ".join(right.split(" ")[:3])
    assert judged(population, person, "a", "b", exact=True, text=cut) is not None
    assert judged(population, person, "a", "b", exact=True, text=cut, finish_reason="length") is None


def test_after_an_update_only_the_new_text_is_read_and_during_it_both_are(
    population: Population, person: Person
) -> None:
    old, new = (deterministic_answer([second, "the first"]) for second in ("the second", "the newer"))
    person.facts["b"].texts.append(("the newer", 3.0, 4.0))
    assert judged(population, person, "a", "b", exact=True, text=new) is None
    assert judged(population, person, "a", "b", exact=True, text=old) is not None
    person.facts["b"].texts[-1] = ("the newer", 9.0, 11.0)
    assert judged(population, person, "a", "b", exact=True, text=new) is None
    assert judged(population, person, "a", "b", exact=True, text=old) is None


def test_what_is_kept_at_the_end_is_what_was_acknowledged(person: Person) -> None:
    assert settle(person, {"a": "the first", "b": "the second"}) == []
    assert settle(person, {"a": "the first"}) == ["an acknowledged fact is lost"]
    assert settle(person, {"a": "the first", "b": "else"}) != []
    assert settle(person, {"a": "the first", "b": "the second", "c": "more"}) == ["a listed fact was never told"]


def test_what_was_in_doubt_is_right_either_way(person: Person) -> None:
    person.doubtful.add("maybe")
    person.facts["b"].delete_sent = 3.0
    person.facts["a"].texts.append(("changed", 3.0, NEVER))
    assert settle(person, {"a": "the first", "b": "the second"}) == []
    assert settle(person, {"a": "changed", "c": "maybe"}) == []
    assert "c" in person.facts


def test_popular_people_come_more_often() -> None:
    population, rng = Population(100, "run", seed=1, zipf=1.2), random.Random(1)
    picked = [population.pick(rng) for _ in range(2_000)]
    first, last = (picked.count(population.people[n]) for n in (0, 99))
    assert first > 20 * max(1, last)
    even = Population(4, "run", seed=1, zipf=0.0)
    assert all(even.people.index(even.pick(rng)) in range(4) for _ in range(100))
