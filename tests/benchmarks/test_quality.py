"""`memshard bench quality`: what is asked, which answers count, and what becomes of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI

from benchmarks import quality_report
from benchmarks.judge import judged
from benchmarks.quality import TEXT, Answer, check
from benchmarks.quality_questions import LARGE, SMALL, Question, first_questions, invented_people, locomo_people
from connector.chunk import ChunkId
from connector.plan import PromptPlan
from deployments.scoring import is_right
from deployments.trial import Told
from sharding.errors import MemshardError

INJECTED = "window 20, r = 0"
MEMORY = "60 facts"


def answer(arm: str, number: int, right: bool, ttft_s: float | None = 0.1, k: int = 5) -> Answer:
    question = Question(f"question {number}", ("baker",), "single" if number % 2 else "two")
    return Answer(arm, MEMORY, k, "ada", question, "a baker" if right else "a judge", 100, 0, ttft_s)


def test_at_least_200_questions_are_asked_about_large_memories_and_all_kinds_about_small_ones_too() -> None:
    people = invented_people()
    asked = Counter((len(person.facts), question.kind) for person in people for question in person.questions)
    assert sum(count for (facts, _), count in asked.items() if facts == LARGE) >= 200
    assert {facts for facts, _ in asked} == {LARGE, SMALL}
    assert all(asked[facts, kind] for facts in (LARGE, SMALL) for kind in ("single", "two", "temporal", "shared"))


def test_a_seed_always_gives_the_same_people_and_another_one_others() -> None:
    assert invented_people(1) == invented_people(1) != invented_people(2)


def test_nobody_has_a_fact_or_is_asked_a_question_twice() -> None:
    for person in invented_people():
        assert len(set(person.facts)) == len(person.facts)
        assert len({question.text for question in person.questions}) == len(person.questions)


def test_every_answer_stands_in_the_facts() -> None:
    for person in invented_people():
        for question in person.questions:
            assert any(is_right(fact, question.answers) for fact in person.facts)


def test_fewer_questions_are_those_of_the_first_people_of_each_size() -> None:
    kept = first_questions(invented_people(), 55)
    assert Counter(len(person.facts) for person in kept for _ in person.questions) == {LARGE: 55, SMALL: 55}
    assert kept[0] == invented_people()[0]


def test_locomo_is_read_without_its_adversarial_questions(tmp_path: Path) -> None:
    told = {
        "sample_id": "conv-1",
        "conversation": {"session_1_date_time": "1:56 pm on 8 May, 2023"},
        "observation": {
            "session_1_observation": {"Ann": [["Ann has a dog.", "D1:1"]], "Bob": [["Bob sings.", "D1:2"]]}
        },
        "qa": [
            {"question": "When?", "answer": 2023, "evidence": [], "category": 2},
            {"question": "Who flies?", "adversarial_answer": "Ann", "evidence": [], "category": 5},
        ],
    }
    (path := tmp_path / "locomo.json").write_text(json.dumps([told]))
    (person,) = locomo_people(path)
    assert person.facts == ("8 May, 2023: Ann has a dog.", "8 May, 2023: Bob sings.")
    assert person.questions == (Question("When?", ("2023",), "temporal"),)


@pytest.mark.parametrize("content", ["{", "[1]", '[{"qa": []}]'])
def test_another_file_is_not_locomo(tmp_path: Path, content: str) -> None:
    (path := tmp_path / "locomo.json").write_text(content)
    with pytest.raises(MemshardError, match="is not LoCoMo's file"):
        locomo_people(path)


def test_an_answer_counts_only_where_exactly_what_was_planned_was_injected() -> None:
    plan = PromptPlan((1, 2, 3), ((ChunkId("a"), 2),), "salt", kept=1)
    check(INJECTED, plan, Told("", 0.1, 3, 2, 0))
    for told in (Told("", 0.1, 3, 0, 0), Told("", 0.1, 3, 2, 1)):
        with pytest.raises(MemshardError, match="not what"):
            check(INJECTED, plan, told)


def test_arms_are_compared_question_by_question() -> None:
    text = [answer(TEXT, number, right=number < 4) for number in range(6)]
    injected = [answer(INJECTED, number, right=number in (1, 2, 3, 4)) for number in reversed(range(6))]
    differences = quality_report.minus_text([*text, *injected], MEMORY, 5, INJECTED, "all")
    assert sorted(differences) == [-1, 0, 0, 0, 0, 1]
    assert quality_report.minus_text([*text, *injected], MEMORY, 5, INJECTED, "single") == [0, 0, 0]


def test_the_interval_is_narrow_where_questions_agree_and_holds_zero_where_they_do_not() -> None:
    assert quality_report.interval([1.0] * 50) == (1.0, 1.0)
    low, high = quality_report.interval([1.0, -1.0] * 25)
    assert low < 0 < high
    assert quality_report.interval([1.0, -1.0] * 25) == (low, high)
    wide = quality_report.interval([1.0, -1.0] * 5)
    assert wide[0] < low < high < wide[1]


def test_rows_and_table_say_what_each_arm_got_right_and_what_it_has_over_text() -> None:
    text = [answer(TEXT, number, right=True, ttft_s=0.4) for number in range(4)]
    injected = [answer(INJECTED, number, right=number > 0, ttft_s=0.1 if number < 2 else None) for number in range(4)]
    rows = {(row["arm"], row["kind"]): row for row in quality_report.rows("m", [*injected, *text])}
    assert rows[INJECTED, "all"]["right"] == 0.75
    assert rows[INJECTED, "all"]["minus_text"] == -0.25
    assert rows[INJECTED, "all"]["engine_ttft_s"] == 0.1
    assert rows[TEXT, "two"]["n"] == 2
    assert quality_report.arms([*injected, *text]) == [TEXT, INJECTED]
    assert quality_report.table("m", [*injected, *text]).row_count == 2
    assert quality_report.kinds_table([*injected, *text]).row_count == 2


def a_judge(says: Callable[[str], str]) -> tuple[AsyncOpenAI, list[str]]:
    """A client whose server answers with what `says` makes of each prompt; and the prompts."""
    prompts: list[str] = []

    def answered(request: httpx.Request) -> httpx.Response:
        prompts.append(json.loads(request.content)["messages"][0]["content"])
        message = {"role": "assistant", "content": says(prompts[-1])}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        body = {"id": "1", "object": "chat.completion", "created": 0, "model": "judge", "choices": [choice]}
        return httpx.Response(200, json=body)

    http = httpx.AsyncClient(transport=httpx.MockTransport(answered))
    return AsyncOpenAI(base_url="http://judge/v1", api_key="none", max_retries=0, http_client=http), prompts


async def test_a_judge_has_the_last_word_and_is_asked_once_about_the_same_answer() -> None:
    client, prompts = a_judge(lambda prompt: "No." if "Given answer: a baker" in prompt else " Yes")
    async with client:
        said = await judged([answer(TEXT, 1, True), answer(INJECTED, 1, True), answer(TEXT, 2, False)], client, "judge")
    assert [one.right for one in said] == [0.0, 0.0, 1.0]
    assert len(prompts) == 2
    assert all("Expected answer: baker" in prompt for prompt in prompts)


async def test_a_judge_that_says_neither_yes_nor_no_ends_the_benchmark() -> None:
    client, _ = a_judge(lambda _: "Perhaps")
    async with client:
        with pytest.raises(MemshardError, match="neither yes nor no"):
            await judged([answer(TEXT, 1, True)], client, "judge")
