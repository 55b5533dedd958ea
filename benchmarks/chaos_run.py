"""One chaos run: users who talk all the time, faults that strike one after the other, and a history that every answer
is checked against.

A fault strikes, the users must all be served again within BACK_S, the cluster must become whole, then the next one
strikes. What a fault is, and whom, follows from the seed; when answers come does not.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.chaos_cluster import ChaosCluster, user_name
from benchmarks.chaos_faults import FAULTS, Allowed
from benchmarks.chaos_talker import PLENTY, SCARCE, Talker
from sharding.errors import StartupError

USERS = 16
USERS_OF_A_MODEL = 6
BACK_S = 10.0
REQUEST_S = 40.0  # longer than the gateway's own deadline
SETTLE_S = 1.0  # between two faults
NOTICED_S = 0.5  # until nobody is sent to a gateway that was killed

Say = Callable[[str], None]


@dataclass(slots=True)
class Strike:
    """One fault and what followed. Times are seconds after it struck (of an outage: after its end, for `back_s`)."""

    kind: str
    requests: int = 0
    failures: Counter[str] = field(default_factory=Counter)  # allowed ones included
    forbidden: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    back_s: float = 0.0
    whole_s: float = 0.0


@dataclass(slots=True)
class Outcome:
    strikes: list[Strike]
    wrong: list[str]  # answers that the history does not explain
    answers: int
    facts: int  # that stood at the end

    @property
    def broken(self) -> list[str]:
        """Every promise that was not kept."""
        late = [f"{s.kind}: service was back after {s.back_s:.1f} s" for s in self.strikes if s.back_s > BACK_S]
        failed = [f"{s.kind}: {count} x {what}" for s in self.strikes for what, count in s.forbidden.items()]
        return [*self.wrong, *late, *failed]


async def run(seed: int, kinds: Sequence[str], seconds: float, say: Say, model: Path | None = None) -> Outcome:
    """Strikes with faults of these kinds for `seconds`, each at least once. `model`: the directory of one to serve, in
    place of the deterministic engine. Raises `StartupError`."""
    cluster = ChaosCluster(model)
    try:
        say("Starting a cluster")
        await cluster.start()
        say("Whole; breaking it")
        return await _break(cluster, random.Random(seed), kinds, seconds, say)
    finally:
        await cluster.stop()


async def _break(cluster: ChaosCluster, rng: random.Random, kinds: Sequence[str], seconds: float, say: Say) -> Outcome:
    limits = httpx.Limits(max_connections=4 * USERS, max_keepalive_connections=0)  # a dead gateway's are not kept
    async with httpx.AsyncClient(base_url=cluster.url, timeout=REQUEST_S, limits=limits, trust_env=False) as http:
        manners, users = (PLENTY, USERS) if cluster.exact else (SCARCE, USERS_OF_A_MODEL)
        crowd = [
            Talker(user_name(n), http, random.Random(rng.random()), cluster.served_name, manners) for n in range(users)
        ]
        talking = [asyncio.create_task(talker.talk()) for talker in crowd]
        strikes: list[Strike] = []
        try:
            await all_served(crowd, time.monotonic(), 30.0)
            ends_at = time.monotonic() + seconds
            left = list(kinds)
            while left or time.monotonic() < ends_at:
                kind = left.pop(0) if left else rng.choice(list(kinds))
                fault = FAULTS[kind]
                struck = fault.strike(cluster, rng)
                strikes.append(await strike(kind, struck, cluster.whole, fault.allows, fault.outage, crowd))
                last, bad = strikes[-1], sum(len(talker.wrong) for talker in crowd)
                counts = f"{last.requests} requests, {last.failures.total()} failed, {bad} answers wrong so far"
                say(f"{kind}: back after {last.back_s:.1f} s, whole after {last.whole_s:.1f} s; {counts}")
        finally:
            for talker in crowd:
                talker.stopping = True
            await asyncio.gather(*talking)
        for talker in crowd:
            await talker.list_facts()
    wrong = [sentence for talker in crowd for sentence in talker.wrong]
    facts = sum(len(talker.history.must) for talker in crowd)
    return Outcome(strikes, wrong, sum(talker.requests for talker in crowd), facts)


async def strike(
    kind: str,
    striking: Coroutine[Any, Any, None],
    whole: Callable[[], Coroutine[Any, Any, None]],
    allows: Allowed,
    outage: bool,
    crowd: Sequence[Talker],
) -> Strike:
    """Runs `striking`, and waits until everybody is served and the cluster is `whole` again."""
    result = Strike(kind)
    before = [talker.requests for talker in crowd]
    began = time.monotonic()
    for talker in crowd:
        talker.failures.clear()
        talker.slowest_s = 0.0
    strikes = asyncio.create_task(striking)
    if outage:
        await strikes
    over = time.monotonic()
    result.back_s = await all_served(crowd, over, 3 * BACK_S)
    await strikes
    try:
        await whole()
    except StartupError as error:
        result.forbidden[error.message] += 1
    result.whole_s = time.monotonic() - began
    await asyncio.sleep(SETTLE_S)
    for talker, count in zip(crowd, before, strict=True):
        result.requests += talker.requests - count
        result.slowest_s = max(result.slowest_s, talker.slowest_s)
        for failure in talker.failures:
            result.failures[failure.what] += 1
            allowed = {
                "nothing": False,
                "begun streams": failure.first_token_sent,
                "requests in flight": failure.began <= over + NOTICED_S,
                "anything while it lasts": failure.began <= over + BACK_S,
            }
            if not allowed[allows]:
                result.forbidden[failure.what] += 1
    return result


async def all_served(crowd: Sequence[Talker], since: float, deadline_s: float) -> float:
    """Seconds until everybody had an answer to something they asked after `since`, `deadline_s` at most."""
    while (passed := time.monotonic() - since) < deadline_s:
        if all(talker.served_since > since for talker in crowd):
            return max(talker.first_after(since) for talker in crowd) - since
        await asyncio.sleep(0.05)
    return passed
