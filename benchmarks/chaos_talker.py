"""One user of a chaos run, who does one thing at a time and believes what was acknowledged."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from dataclasses import dataclass

import httpx

from benchmarks.chaos_history import History
from deployments import deterministic

TOP_K = 100


@dataclass(frozen=True, slots=True)
class Manners:
    """How a user talks. `most_facts`: fewer than are retrieved for a question, and than a prompt has room for."""

    think_s: float  # mean
    most_facts: int
    max_tokens: int


PLENTY = Manners(0.1, 60, 2 * TOP_K)
SCARCE = Manners(0.5, 20, 8)
"""For a model, which takes its time."""


@dataclass(frozen=True, slots=True)
class Failure:
    what: str
    began: float
    first_token_sent: bool


class Talker:
    """One user. Of what `deterministic.NAME` answers every word is checked, of another model which facts it read."""

    def __init__(
        self,
        user: str,
        http: httpx.AsyncClient,
        rng: random.Random,
        model: str = deterministic.NAME,
        manners: Manners = PLENTY,
    ) -> None:
        self.history = History(user)
        self._model = model
        self._manners = manners
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
            if draw < 0.25 and len(self.history.must) + len(self.history.may) < self._manners.most_facts:
                await self.add()
            elif draw < 0.35 and known:
                await self.delete(self._rng.choice(known))
            elif draw < 0.45:
                await self.list_facts()
            else:
                await self.chat(stream=draw < 0.75)
            await asyncio.sleep(self._rng.expovariate(1 / self._manners.think_s))

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
        params = {"user_id": self.history.user, "page_size": 2 * self._manners.most_facts}
        answer = await self._send("GET", "/v1/memories", params=params)
        if answer is not None:
            self._judge(self.history.listed({one["memory"]: one["id"] for one in answer["results"]}))

    async def chat(self, stream: bool) -> None:
        body = {
            "model": self._model,
            "user_id": self.history.user,
            "messages": [{"role": "user", "content": f"What is in the box, case {self._rng.randrange(10**6)}?"}],
            "memory": {"top_k": TOP_K},
            "max_tokens": self._manners.max_tokens,
            "stream": stream,
        }
        if stream:
            said = await self._stream(body)
        else:
            whole = await self._send("POST", "/v1/chat/completions", json=body)
            said = None if whole is None else (whole["choices"][0]["message"]["content"], whole["memory"]["fact_ids"])
        if said is not None:
            text, ids = said
            exact = self._model == deterministic.NAME
            self._judge(self.history.served(ids) or (self.history.answered(text) if exact else None))

    async def _stream(self, body: dict[str, object]) -> tuple[str, list[str]] | None:
        """The text, and the ids of the facts that it was given."""
        began, text, ended = time.monotonic(), "", False
        ids: list[str] = []
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
                        ids = event.get("memory", {}).get("fact_ids", ids)
                        text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        except httpx.HTTPError as error:
            self._failed(began, f"stream {type(error).__name__}", bool(text))
            return None
        if not ended:
            self._failed(began, "stream cut", bool(text))
            return None
        self._succeeded(began)
        return text, ids

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
