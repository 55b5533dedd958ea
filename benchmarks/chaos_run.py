"""One chaos run: users who talk all the time, faults that strike one after the other, and a history that every answer
is checked against.

A fault strikes, the users must all be served again within BACK_S, the cluster must become whole, then the next one
strikes. What a fault is, and whom, follows from the seed; when answers come does not.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.chaos_cluster import ChaosCluster
from benchmarks.chaos_faults import FAULTS, Allowed
from benchmarks.chaos_history import History
from deployments import deterministic
from sharding.errors import StartupError

USERS = 16
BACK_S = 10.0
REQUEST_S = 40.0  # longer than the gateway's own deadline
THINK_S = 0.1  # mean
SETTLE_S = 1.0  # between two faults
NOTICED_S = 0.5  # until nobody is sent to a gateway that was killed
MOST_FACTS = 60  # fewer than are retrieved for a question
TOP_K = 100

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


async def run(seed: int, kinds: Sequence[str], seconds: float, say: Say) -> Outcome:
    """Strikes with faults of these kinds for `seconds`, each at least once. Raises `StartupError`."""
    cluster = ChaosCluster()
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
        crowd = [Talker(f"chaos-{n}", http, random.Random(rng.random())) for n in range(USERS)]
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
                say(f"{kind}: back after {strikes[-1].back_s:.1f} s, whole after {strikes[-1].whole_s:.1f} s")
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


@dataclass(frozen=True, slots=True)
class Failure:
    what: str
    began: float
    first_token_sent: bool


class Talker:
    """One user, who does one thing at a time and believes what was acknowledged."""

    def __init__(self, user: str, http: httpx.AsyncClient, rng: random.Random) -> None:
        self.history = History(user)
        self.wrong: list[str] = []
        self.failures: list[Failure] = []
        self.requests = 0
        self.slowest_s = 0.0
        self.served_since = 0.0  # when the last request that succeeded was sent
        self.stopping = False
        self._successes: list[tuple[float, float]] = []  # sent, answered
        self._http = http
        self._rng = rng

    def first_after(self, since: float) -> float:
        """When the first request that was sent after `since` was answered."""
        return min(answered for sent, answered in self._successes if sent > since)

    async def talk(self, requests: float = math.inf) -> None:
        """Until `stopping`, or for so many requests."""
        await self.add()
        while not self.stopping and self.requests < requests:
            known = [text for text, id in self.history.must.items() if id is not None]
            draw = self._rng.random()
            if draw < 0.25 and len(self.history.must) + len(self.history.may) < MOST_FACTS:
                await self.add()
            elif draw < 0.35 and known:
                await self.delete(self._rng.choice(known))
            elif draw < 0.45:
                await self.list_facts()
            else:
                await self.chat(stream=draw < 0.75)
            await asyncio.sleep(self._rng.expovariate(1 / THINK_S))

    async def add(self) -> None:
        text = self.history.next_text()
        self.history.may.add(text)
        body = {"user_id": self.history.user, "messages": [{"role": "user", "content": text}], "infer": False}
        answer = await self._send("POST", "/v1/memories", json=body)
        if answer is not None:
            self.history.told(text, answer["results"][0]["id"])

    async def delete(self, text: str) -> None:
        id = self.history.must[text]
        answer = await self._send(
            "DELETE", f"/v1/memories/{id}/", params={"user_id": self.history.user}, missing_is_fine=False
        )
        if answer is None:
            self.history.doubtful(text)
        else:
            self.history.deleted(text)

    async def list_facts(self) -> None:
        params = {"user_id": self.history.user, "page_size": 2 * MOST_FACTS}
        answer = await self._send("GET", "/v1/memories", params=params)
        if answer is not None:
            self._judge(self.history.listed({one["memory"]: one["id"] for one in answer["results"]}))

    async def chat(self, stream: bool) -> None:
        body = {
            "model": deterministic.NAME,
            "user_id": self.history.user,
            "messages": [{"role": "user", "content": f"What is in the box, case {self._rng.randrange(10**6)}?"}],
            "memory": {"top_k": TOP_K},
            "max_tokens": 2 * TOP_K,
            "stream": stream,
        }
        if stream:
            text = await self._stream(body)
        else:
            answer = await self._send("POST", "/v1/chat/completions", json=body)
            text = None if answer is None else answer["choices"][0]["message"]["content"]
        if text is not None:
            self._judge(self.history.answered(text))

    async def _stream(self, body: dict[str, object]) -> str | None:
        began, text, ended = time.monotonic(), "", False
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    self._failed(began, f"stream {response.status_code}", False)
                    return None
                async for line in response.aiter_lines():
                    data = line.removeprefix("data: ")
                    if data == "[DONE]":
                        ended = True
                    elif data.startswith("{"):
                        event = json.loads(data)
                        if "error" in event:
                            self._failed(began, f"stream ended: {event['error']['message'][:60]}", bool(text))
                            return None
                        text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        except httpx.HTTPError as error:
            self._failed(began, f"stream {type(error).__name__}", bool(text))
            return None
        if not ended:
            self._failed(began, "stream cut", bool(text))
            return None
        self._succeeded(began)
        return text

    async def _send(self, method: str, path: str, missing_is_fine: bool = False, **request: object) -> dict | None:  # type: ignore[type-arg]
        began = time.monotonic()
        try:
            response = await self._http.request(method, path, **request)  # type: ignore[arg-type]
        except httpx.HTTPError as error:
            self._failed(began, f"{method} {type(error).__name__}", False)
            return None
        if response.status_code >= 300:
            self._failed(began, f"{method} {path.split('/')[2]} {response.status_code} {_said(response)}", False)
            return None
        self._succeeded(began)
        answer: dict[str, object] = response.json() if response.content else {}
        return answer

    def _succeeded(self, began: float) -> None:
        self.requests += 1
        self.served_since = began
        now = time.monotonic()
        self.slowest_s = max(self.slowest_s, now - began)
        self._successes = [*self._successes[-500:], (began, now)]

    def _failed(self, began: float, what: str, first_token_sent: bool) -> None:
        self.requests += 1
        self.failures.append(Failure(what, began, first_token_sent))

    def _judge(self, wrong: str | None) -> None:
        if wrong is not None:
            self.wrong.append(wrong)


def _said(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])[:60]
    except (ValueError, KeyError, TypeError):
        return response.text[:60]
