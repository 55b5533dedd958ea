"""Answers to questions about memory: the facts as text, and injected under one setting or another.

    for each person   encode the facts once for each window; find the k nearest to each question, as a chat does
    for each k        every question, to each arm: `text`, and each setting (see `deployments/trial.py::Setting`)

All arms get the same token ids and decode greedily, so that nothing but where the keys and values come from tells them
apart. The first questions of a person are asked one at a time, arms in random order, and timed; the others many at a
time. A timed answer that was not what its arm means (chunks missing, a native prefix-cache hit) ends the benchmark.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.in_process import shard_in_process
from benchmarks.quality_questions import Person, Question
from connector.plan import Piece, PromptPlan
from connector.port import CHAT_PRIORITY
from deployments.scoring import is_right, token_f1
from deployments.trial import Setting, Told, Trial
from sharding.errors import MemshardError

FACT_COUNTS = (5, 10, 20, 50)
QUICK_FACT_COUNTS = (5, 20)
QUICK_QUESTIONS = 20
QUESTIONS = 200
TIMED_QUESTIONS = 3  # of each person, at each k
AT_ONCE = 16
ANSWER_TOKENS = 20
SEED = 20262
TEXT = "text"


@dataclass(frozen=True, slots=True)
class Answer:
    """One arm's answer to one question. `ttft_s` is None where others were answered at the same time, `verdict` where
    no judge was asked."""

    arm: str
    memory: str  # the kind of the person's
    k: int
    person: str
    question: Question
    told: str
    memory_tokens: int
    injected_tokens: int
    ttft_s: float | None
    verdict: bool | None = None

    @property
    def right(self) -> float:
        """1 or 0."""
        return float(is_right(self.told, self.question.answers) if self.verdict is None else self.verdict)

    @property
    def f1(self) -> float:
        return token_f1(self.told, self.question.answers)


async def run(
    model: Path | None,
    people: Sequence[Person],
    fact_counts: Sequence[int],
    settings: Sequence[Setting],
    console: Console,
) -> tuple[str, list[Answer]]:
    """The model's name, and `measure` with an engine that is started and ended for it. Raises `StartupError`, too."""
    console.print("Starting an engine, about half a minute")
    async with shard_in_process(model) as opened:
        shard = opened.shard
        trial = Trial(shard.engine, shard.template, shard.embedder, shard.encoder, shard.tiers, priority=CHAT_PRIORITY)
        return opened.model, await measure(trial, people, fact_counts, settings, console)


async def measure(
    trial: Trial, people: Sequence[Person], fact_counts: Sequence[int], settings: Sequence[Setting], console: Console
) -> list[Answer]:
    """Everybody's answers, of `text` and of each setting. Raises MemshardError where facts cannot be encoded, or an
    answer is not its arm's."""
    rng = random.Random(SEED)
    answers: list[Answer] = []
    for person in track(people, "Asking", console=console, transient=True):
        arms = [_Text(trial, person), *[await _Injected.encoded(trial, person, setting) for setting in settings]]
        ranked = await trial.ranked(person.facts, [question.text for question in person.questions])
        for k in fact_counts:
            if k > len(person.facts):
                continue
            asked = [(question, [int(fact) for fact in ranked[i][:k]]) for i, question in enumerate(person.questions)]
            for question, nearest in asked[:TIMED_QUESTIONS]:
                in_random_order = rng.sample(arms, len(arms))
                answers += [await _ask(trial, person, question, nearest, arm, timed=True) for arm in in_random_order]
            room = asyncio.Semaphore(AT_ONCE)
            answers += await asyncio.gather(
                *(
                    _ask_in_turn(room, trial, person, question, nearest, arm)
                    for arm in arms
                    for question, nearest in asked[TIMED_QUESTIONS:]
                )
            )
        for arm in arms:
            await trial.forget(arm.owner)
    return answers


class _Text:
    """A person's memory as text."""

    def __init__(self, trial: Trial, person: Person) -> None:
        self.name = TEXT
        self.owner = person.name
        self.setting: Setting | None = None
        self.pieces = [Piece(line.token_ids) for line in trial.lines(person.facts)]


class _Injected(_Text):
    """A person's memory in chunks."""

    @classmethod
    async def encoded(cls, trial: Trial, person: Person, setting: Setting) -> _Injected:
        arm = cls(trial, person)
        arm.name = str(setting)
        arm.owner = f"{person.name} with {setting}"
        arm.setting = setting
        chunks = await trial.encode(arm.owner, person.facts, setting.window_facts)
        if chunks is None:
            raise MemshardError(f"The chunk store is too small for the {len(person.facts)} facts of {person.name}")
        arm.pieces = chunks
        return arm


async def _ask_in_turn(room: asyncio.Semaphore, *asked: Any) -> Answer:
    async with room:
        return await _ask(*asked, timed=False)


async def _ask(
    trial: Trial, person: Person, question: Question, nearest: Sequence[int], arm: _Text, *, timed: bool
) -> Answer:
    facts = [arm.pieces[fact] for fact in nearest]
    prefilled = None if arm.setting is None else arm.setting.prefilled(len(facts))
    plan = trial.plan(arm.owner, question.text, facts, prefilled, ANSWER_TOKENS)
    told = await trial.ask(plan, ANSWER_TOKENS)
    if timed:
        check(arm.name, plan, told)
    return Answer(
        arm.name,
        person.memory,
        len(nearest),
        person.name,
        question,
        told.text,
        plan.memory_tokens,
        told.injected_tokens,
        told.ttft_s if timed else None,
    )


def check(arm: str, plan: PromptPlan, told: Told) -> None:
    """Raise MemshardError unless exactly what was planned was injected, and nothing came out of vLLM's own cache."""
    if plan.left_out or told.injected_tokens != plan.load_tokens or told.cached_tokens:
        raise MemshardError(
            f"An answer is not what {arm} means: {told.injected_tokens} of {plan.load_tokens} tokens injected, "
            f"{told.cached_tokens} natively cached, {plan.left_out} facts left out"
        )


def memories(answers: Sequence[Answer]) -> list[tuple[str, int]]:
    """Every (kind of memory, k) that was asked about, in that order."""
    return list(dict.fromkeys((answer.memory, answer.k) for answer in answers))
