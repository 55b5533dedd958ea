"""What the load does: one request at a time for somebody, timed, remembered, checked."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from gevent.pool import Pool

from benchmarks.load_client import Answer, Failed, LoadClient
from benchmarks.load_people import NEVER, Person, Population, Question, Told
from benchmarks.load_plan import LoadPlan
from deployments import deterministic

UNKNOWN = "unknown fact"


@dataclass(frozen=True, slots=True)
class Request:
    """One that was sent. Seconds; `at` on `time.perf_counter`'s clock. `arm` is the memory mode of a chat, else "".
    `error` None means that it was answered, and rightly unless `wrong` says how not."""

    kind: str
    arm: str
    at: float
    seconds: float
    ttft_s: float | None = None
    gaps_s: tuple[float, ...] = ()
    pieces: int = 0
    injected_tokens: int = 0
    fallback: str | None = None
    error: str | None = None
    wrong: str | None = None


class Requests:
    """Sends for everybody, and keeps what came back. Single-threaded: only at network waits do others run."""

    plan: LoadPlan

    def __init__(self, client: LoadClient, population: Population, model: str) -> None:
        self.client = client
        self.population = population
        self.model = model
        self.wrong: Counter[str] = Counter()
        self.settled = 0  # people whose facts were listed at the end
        self.tells: Callable[..., Any] = lambda **_: None  # locust's event, for its page
        self._exact = model == deterministic.NAME
        self._pending: list[tuple[Question, Answer]] = []

    def begin(self, plan: LoadPlan) -> None:
        """What comes now is a phase of its own, by this plan."""
        self.plan = plan
        self.done: list[Request] = []
        self.running = Pool()
        self.stopping = False
        self.sessions = 0
        self.not_sent = 0

    def one(self, person: Person, rng: random.Random) -> None:
        """One request of the mix."""
        kind = rng.choices(list(self.plan.mix), list(self.plan.mix.values()))[0]
        target = rng.choice(free) if kind in ("update", "delete") and (free := person.deletable()) else None
        if kind == "add" or (target is None and kind != "chat"):
            self._record("add", lambda: self._add(person))
        elif kind == "update":
            self._record(kind, lambda: self._update(person, str(target)))
        elif kind == "delete":
            self._record(kind, lambda: self._delete(person, str(target)))
        else:
            arm = rng.choice(self.plan.arms)
            self._record(kind, lambda: self._chat(person, arm), arm)

    def tell(self, person: Person, texts: Sequence[str]) -> Failed | None:
        """Tells facts; why it failed, or None."""
        sent = time.perf_counter()
        person.adds_running += len(texts)
        try:
            told = self.client.add(person.user, texts)
        except Failed as failure:
            if failure.sent:
                person.doubtful.update(texts)
            return failure
        finally:
            person.adds_running -= len(texts)
        person.doubtful.difference_update(texts)
        done = time.perf_counter()
        for id_, text in told:
            person.facts[id_] = Told([(text, sent, done)])
        return None

    def judge_pending(self) -> None:
        """Answers that could not be judged when they came: all that was told is known now."""
        for question, answer in self._pending:
            if reason := self.population.wrong(question, answer, self._exact, final=True):
                self.wrong[reason] += 1
        self._pending.clear()

    def _record(self, kind: str, send: Callable[[], dict[str, Any]], arm: str = "") -> None:
        at = time.perf_counter()
        try:
            told = send()
        except Failed as failure:
            told = {"error": failure.kind}
        request = Request(kind, arm, at, time.perf_counter() - at, **told)
        self.done.append(request)
        if request.wrong:
            self.wrong[request.wrong] += 1
        failed = request.error or request.wrong
        self.tells(
            request_type=kind,
            name=arm or kind,
            response_time=1000 * (request.ttft_s or request.seconds),
            response_length=0,
            exception=Failed(failed) if failed else None,
            context={},
        )

    def _add(self, person: Person) -> dict[str, Any]:
        if failure := self.tell(person, [person.invent()]):
            raise failure
        return {}

    def _update(self, person: Person, id_: str) -> dict[str, Any]:
        told, text = person.facts[id_], person.invent()
        sent = time.perf_counter()
        told.texts.append((text, sent, NEVER))
        try:
            self.client.update(id_, text)
        except Failed as failure:
            if not failure.sent:
                told.texts.pop()
            raise
        told.texts[-1] = (text, sent, time.perf_counter())
        return {}

    def _delete(self, person: Person, id_: str) -> dict[str, Any]:
        told = person.facts[id_]
        told.delete_sent = time.perf_counter()
        try:
            self.client.delete(person.user, id_)
        except Failed as failure:
            if failure.kind.startswith("404"):
                return {"wrong": "a fact that was to be deleted was not found"}
            if not failure.sent:
                told.delete_sent = NEVER
            raise
        told.deleted = time.perf_counter()
        return {}

    def _chat(self, person: Person, arm: str) -> dict[str, Any]:
        plan = self.plan
        asked = time.perf_counter()
        length = (plan.max_tokens, plan.min_tokens)
        answer = self.client.chat(self.model, person.user, person.question(), arm, plan.top_k, *length)
        question = Question(person, arm, plan.top_k, asked, time.perf_counter())
        wrong = self.population.wrong(question, answer, self._exact)
        if wrong == UNKNOWN:
            self._pending.append((question, answer))
            wrong = None
        return {
            "ttft_s": answer.times[0] - asked if answer.times else None,
            "gaps_s": tuple(after - before for before, after in pairwise(answer.times)),
            "pieces": len(answer.times),
            "injected_tokens": answer.injected_tokens,
            "fallback": answer.fallback,
            "wrong": wrong,
        }
