"""The HTTP client of the load: gevent's own, so that thousands of requests wait at the same time in one thread, and no
library is patched.

Every failure is a `Failed` with its kind, by which reports count.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from gevent import Timeout
from geventhttpclient import HTTPClient
from geventhttpclient.response import HTTPParseError

from sharding.errors import MemshardError

PAGE_SIZE = 200
JSON = {"Content-Type": "application/json"}


class Failed(Exception):
    """A request that did not end well. `kind`: an HTTP status with the error's code, or what happened to the
    connection. `sent` says whether the server may have acted on it."""

    def __init__(self, kind: str, sent: bool = True) -> None:
        super().__init__(kind)
        self.kind = kind
        self.sent = sent


@dataclass(frozen=True, slots=True)
class Answer:
    """A chat's answer. `times` are when each piece of text came, on `time.perf_counter`'s clock."""

    text: str
    finish_reason: str
    fact_ids: tuple[str, ...]
    left_out: int
    injected_tokens: int
    fallback: str | None
    times: tuple[float, ...]


class LoadClient:
    """For any number of greenlets. `deadline_s`: the longest that a request may take in all."""

    def __init__(self, url: str, connections: int, deadline_s: float) -> None:
        self._http = HTTPClient.from_url(
            url, concurrency=connections, connection_timeout=deadline_s, network_timeout=deadline_s
        )
        self._deadline_s = deadline_s

    def close(self) -> None:
        self._http.close()

    def model(self) -> str:
        """The served model's name."""
        return str(self._call("GET", "/v1/models")["data"][0]["id"])

    def status(self) -> dict[str, Any]:
        """What the shards say of themselves."""
        status: dict[str, Any] = self._call("GET", "/status")
        return status

    def add(self, user: str, texts: Sequence[str]) -> list[tuple[str, str]]:
        """Tells facts; id and text of each, in order."""
        messages = [{"role": "user", "content": text} for text in texts]
        told = self._call("POST", "/v1/memories", {"user_id": user, "messages": messages, "infer": False})
        return [(fact["id"], fact["memory"]) for fact in told["results"]]

    def update(self, id_: str, text: str) -> None:
        self._call("PUT", f"/v1/memories/{quote(id_, safe='')}/", {"text": text})

    def delete(self, user: str, id_: str) -> None:
        self._call("DELETE", f"/v1/memories/{quote(id_, safe='')}/?{urlencode({'user_id': user})}")

    def forget(self, user: str) -> None:
        """Deletes all of the user's facts."""
        self._call("DELETE", f"/v1/memories?{urlencode({'user_id': user})}")

    def list_facts(self, user: str) -> dict[str, str]:
        """Text by id, all of them."""
        listed: dict[str, str] = {}
        page = 1
        while True:
            query = urlencode({"user_id": user, "page": page, "page_size": PAGE_SIZE})
            found = self._call("GET", f"/v1/memories?{query}")
            listed |= {fact["id"]: fact["memory"] for fact in found["results"]}
            if not found["next"]:
                return listed
            page += 1

    def chat(
        self, model: str, user: str, question: str, mode: str, top_k: int, max_tokens: int, min_tokens: int = 0
    ) -> Answer:
        """One streamed completion."""
        body = {
            "model": model,
            "user_id": user,
            "messages": [{"role": "user", "content": question}],
            "memory": {"mode": mode, "top_k": top_k},
            "temperature": 0,
            "max_tokens": max_tokens,
            "min_tokens": min_tokens,
            "stream": True,
        }
        times: list[float] = []
        pieces: list[str] = []
        last: dict[str, Any] = {}
        with self._deadline():
            response = self._http.request("POST", "/v1/chat/completions", json.dumps(body), JSON)
            if response.status_code != 200:
                raise _refused(response)
            while line := response.readline(b"\n"):
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise Failed(f"in the stream: {chunk['error'].get('type')}")
                for choice in chunk["choices"]:
                    if text := choice["delta"].get("content"):
                        times.append(time.perf_counter())
                        pieces.append(text)
                    if choice.get("finish_reason"):
                        last = {**chunk, "finish_reason": choice["finish_reason"]}
            response.read()
        if "memory" not in last:
            raise Failed("the stream ended early")
        memory = last["memory"]
        return Answer(
            "".join(pieces),
            last["finish_reason"],
            tuple(memory["fact_ids"]),
            memory["left_out"],
            memory["injected_tokens"],
            memory["fallback"],
            tuple(times),
        )

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        with self._deadline():
            response = self._http.request(method, path, json.dumps(body) if body is not None else b"", JSON)
            if response.status_code != 200:
                raise _refused(response)
            return json.loads(response.read())

    def _deadline(self) -> _Deadline:
        return _Deadline(self._deadline_s)


class _Deadline:
    """Ends what takes too long; turns what may happen to a connection into `Failed`."""

    def __init__(self, seconds: float) -> None:
        self._timeout = Timeout(seconds)

    def __enter__(self) -> None:
        self._timeout.start()

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        self._timeout.close()
        if error is self._timeout or isinstance(error, TimeoutError):
            raise Failed("no answer in time") from error
        if isinstance(error, ConnectionRefusedError):
            raise Failed("connection refused", sent=False) from error
        if isinstance(error, OSError | HTTPParseError):
            raise Failed("the connection was lost") from error
        if isinstance(error, ValueError | KeyError):
            raise Failed("an answer that is not the API's") from error


def _refused(response: Any) -> Failed:
    try:
        error = json.loads(response.read())["error"]
        kind = error["code"] or error["type"]
    except (ValueError, KeyError, TypeError):
        kind = "no error object"
    return Failed(f"{response.status_code} {kind}", sent=response.status_code not in (400, 404, 405, 413, 429))


def check_reachable(client: LoadClient, url: str) -> str:
    """The model that the server at `url` serves. Raises `MemshardError`."""
    try:
        return client.model()
    except Failed as failure:
        raise MemshardError(f"No Memshard answers at {url} ({failure.kind}); start one with `make up`") from failure
