"""One run of the load: people are made, talk to the server for a while, and are asked at the end what it kept of them.

    closed loop   `users` sessions at a time; each is somebody for some turns, thinks between two of them, and is then
                  somebody else: the load waits for the server
    open loop     requests come at `rate` a second, as a Poisson process, whatever the server does: it queues or refuses

Both ramp up evenly over `ramp_s`. locust runs the sessions and shows its page; requests, checks and figures are ours.
"""

from __future__ import annotations

import os
import random
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

os.environ["LOCUST_SKIP_MONKEY_PATCH"] = "1"  # the client is gevent's own; nothing else here needs the patches

import gevent
from gevent.pool import Pool
from locust import User, task
from locust.env import Environment
from locust.event import Events

from benchmarks.load_client import Failed, LoadClient, check_reachable
from benchmarks.load_people import Person, Population, settle
from benchmarks.load_plan import LoadPlan
from benchmarks.load_requests import Request, Requests
from benchmarks.load_watch import kill, look, watch
from deployments import deterministic
from sharding.errors import MemshardError

POPULATE_AT_ONCE = 16
POPULATE_FACTS = 50  # a call
SETTLE_S = 120.0
MAX_IN_FLIGHT = 4_000  # of the open loop

Say = Callable[[str], None]


@dataclass(slots=True)
class LoadResult:
    """What happened in the part that is measured, ramp excluded: requests that ended in it, or later but were sent
    before its end. `began` is on `time.perf_counter`'s clock; `statuses` are (seconds from then, /status); `wrong`
    counts what must not happen, over the whole run."""

    plan: LoadPlan
    model: str
    requests: list[Request]
    statuses: list[tuple[float, dict[str, Any]]]
    wrong: Counter[str]
    not_sent: int
    began: float
    seconds: float
    checked_people: int = 0
    kills: list[float] = field(default_factory=list)  # seconds from `began`

    @property
    def exact(self) -> bool:
        """Whether every word of every answer was checked."""
        return self.model == deterministic.NAME

    def per_second(self, requests: Iterable[Request]) -> float:
        """How many of them were answered a second."""
        return sum(self._in_time(request) for request in requests) / self.seconds

    def _in_time(self, request: Request) -> bool:
        return request.error is None and request.at + request.seconds <= self.began + self.seconds


def run(plan: LoadPlan, say: Say, went_on: Callable[[float], None] = lambda _: None) -> LoadResult:
    """Raises `MemshardError` where no server answers, or the people could not be made. `went_on` is told the seconds
    that went by, every second."""
    with _people(plan, say) as requests:
        result = _phase(plan, requests, went_on)
        result.checked_people = _finish(requests, say)
    return result


def compare(
    plan: LoadPlan, rounds: int, say: Say, went_on: Callable[[float], None] = lambda _: None
) -> list[LoadResult]:
    """Each of the plan's arms alone, chats only, one phase after the other; in every round in another order. All with
    the same people, and with answers of the same length: none ends before `max_tokens`. Raises as `run`."""
    rng = random.Random(plan.seed)
    with _people(plan, say) as requests:
        results: list[LoadResult] = []
        for round_ in range(rounds):
            for arm in rng.sample(plan.arms, len(plan.arms)):
                say(f"Round {round_ + 1} of {rounds}: {arm}")
                alone = replace(plan, mix={"chat": 1.0}, arms=(arm,), min_tokens=plan.max_tokens)
                results.append(_phase(alone, requests, went_on))
        checked = _finish(requests, say)
    for result in results:
        result.checked_people = checked
    return results


@contextmanager
def _people(plan: LoadPlan, say: Say) -> Iterator[Requests]:
    """Everybody, with their facts told and encoded."""
    client = LoadClient(plan.url, _connections(plan), plan.deadline_s)
    try:
        model = check_reachable(client, plan.url)
        population = Population(plan.people, uuid.uuid4().hex[:8], plan.seed, plan.zipf)
        requests = Requests(client, population, model)
        say(f"Telling {model} {plan.facts} facts about each of {plan.people} people")
        _each(population.people, lambda person: _populate(requests, person, plan.facts))
        _wait_encoded(client, say)
        yield requests
    finally:
        client.close()


def _phase(plan: LoadPlan, requests: Requests, went_on: Callable[[float], None]) -> LoadResult:
    requests.begin(plan)
    environment = Environment(user_classes=[_user_class(plan, requests)], events=Events(), host=plan.url)
    requests.tells = environment.events.request.fire
    runner = environment.create_local_runner()
    statuses: list[tuple[float, dict[str, Any]]] = []
    kills: list[float] = []
    beside = [gevent.spawn(watch, requests.client, statuses)]
    if plan.kill_every_s is not None:
        beside.append(gevent.spawn(kill, plan.kill_every_s, random.Random(f"kills-{plan.seed}"), kills))
    began = time.perf_counter()
    runner.start(1 if plan.rate else plan.users, plan.users / plan.ramp_s if plan.ramp_s else plan.users)
    try:
        with _page(environment, plan.page_port):
            while (passed := time.perf_counter() - began) < plan.ramp_s + plan.duration_s:
                went_on(passed)
                gevent.sleep(min(1.0, plan.ramp_s + plan.duration_s - passed))
    finally:
        ended = time.perf_counter()
        requests.stopping = True
        runner.stop()
        requests.running.join(plan.deadline_s)
        gevent.killall(beside)
        look(requests.client, statuses)
        runner.quit()
    began += plan.ramp_s
    done = [request for request in requests.done if request.at + request.seconds >= began]
    seen = [(at - began, status) for at, status in statuses]
    killed = [at - began for at in kills]
    figures = (requests.wrong, requests.not_sent, began, ended - began)
    return LoadResult(plan, requests.model, done, seen, *figures, kills=killed)


@contextmanager
def _page(environment: Environment, port: int | None) -> Iterator[None]:
    """locust's page, which reads the command's arguments as its own."""
    if port is None:
        yield
        return
    arguments, sys.argv = sys.argv, sys.argv[:1]
    page = environment.create_web_ui("127.0.0.1", port)
    try:
        yield
    finally:
        page.stop()
        sys.argv = arguments


def _finish(requests: Requests, say: Say) -> int:
    """Checks what was kept of everybody, then has them forgotten; how many could be checked."""
    say("Asking what was kept")
    _each(requests.population.people, lambda person: _settle(requests, person))
    requests.judge_pending()
    say("Forgetting everybody")
    _each(requests.population.people, lambda person: _forget(requests.client, person))
    return requests.settled


def _user_class(plan: LoadPlan, requests: Requests) -> type[User]:
    """What locust runs: sessions, or the one who lets requests arrive."""

    class Session(User):  # type: ignore[misc]
        """Somebody for some turns, then somebody else."""

        @task  # type: ignore[untyped-decorator]
        def sessions(self) -> None:
            rng = random.Random(f"{plan.seed}-{requests.sessions}")
            requests.sessions += 1
            while not requests.stopping:
                person = requests.population.pick(rng)
                for _ in range(_geometric(rng, plan.turns)):
                    gevent.sleep(rng.expovariate(1 / plan.think_s) if plan.think_s else 0)
                    if requests.stopping:
                        return
                    requests.running.spawn(requests.one, person, rng).join()

    class Arrivals(User):  # type: ignore[misc]
        """Requests that come whatever the server does."""

        @task  # type: ignore[untyped-decorator]
        def arrivals(self) -> None:
            rng = random.Random(f"{plan.seed}")
            assert plan.rate
            began = due = time.perf_counter()
            while not requests.stopping:
                ramped = min(1.0, max(0.05, (due - began) / plan.ramp_s)) if plan.ramp_s else 1.0
                due += rng.expovariate(plan.rate * ramped)
                gevent.sleep(max(0.0, due - time.perf_counter()))
                if len(requests.running) >= MAX_IN_FLIGHT:
                    requests.not_sent += 1
                else:
                    requests.running.spawn(requests.one, requests.population.pick(rng), rng)

    return Arrivals if plan.rate else Session


def _connections(plan: LoadPlan) -> int:
    return POPULATE_AT_ONCE + (MAX_IN_FLIGHT if plan.rate else plan.users)


def _geometric(rng: random.Random, mean: float) -> int:
    turns = 1
    while rng.random() > 1 / mean:
        turns += 1
    return turns


def _each(people: Iterable[Person], work: Callable[[Person], None]) -> None:
    """Does it for everybody, some at once; raises the first failure."""
    pool = Pool(POPULATE_AT_ONCE)
    for _ in pool.imap_unordered(work, people):
        pass


def _populate(requests: Requests, person: Person, count: int) -> None:
    left = count
    while left:
        texts = [person.invent() for _ in range(min(left, POPULATE_FACTS))]
        left -= len(texts)
        give_up = time.perf_counter() + SETTLE_S
        while failure := requests.tell(person, texts):
            if time.perf_counter() > give_up:
                raise MemshardError(f"The people's facts could not be told: {failure.kind}")
            gevent.sleep(1.0)


def _wait_encoded(client: LoadClient, say: Say) -> None:
    """Until no shard has anything to encode, or it takes too long: then it begins with what is encoded."""
    say("Waiting until their facts are encoded")
    give_up = time.perf_counter() + SETTLE_S
    while time.perf_counter() < give_up:
        if not sum(shard.get("encode_backlog", 0) for shard in client.status()["shards"]):
            return
        gevent.sleep(0.5)
    say("Not all facts are encoded yet; those are served as text")


def _settle(requests: Requests, person: Person) -> None:
    """Asks for the person's facts, again where the server cannot say now. What cannot be asked is wrong, too."""
    give_up = time.perf_counter() + SETTLE_S
    while True:
        try:
            listed = requests.client.list_facts(person.user)
        except Failed as failure:
            if failure.kind.startswith("404"):
                listed = {}
            elif time.perf_counter() < give_up:
                gevent.sleep(1.0)
                continue
            else:
                requests.wrong["a user's facts could not be listed"] += 1
                return
        requests.settled += 1
        requests.wrong.update(settle(person, listed))
        return


def _forget(client: LoadClient, person: Person) -> None:
    with suppress(Failed):  # nobody else meets them: each run has users of its own
        client.forget(person.user)
