"""Router, shard client and gateway on a real Ray Serve: pinning, cancellation and death."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import serve_app
from serve_app import MAX_ONGOING, MODEL, Running

from deployments.memory_calls import AddCall
from deployments.messages import ChatCall, ChatDelta, Sampling
from sharding.errors import Busy, DeadlineExceeded, EngineFailed, MemshardError, NotFound, ShardGone
from sharding.ids import Placement, ShardId, UserId

CHAT = "/v1/chat/completions"
DEADLINE_S = 10.0


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file with the ids of the shards that have a heartbeat."""
    return tmp_path_factory.mktemp("serve") / "live.json"


@pytest.fixture(scope="module")
def port(live: Path) -> Iterator[int]:
    """The application's HTTP port. At the end everything is stopped, and no process may be left."""
    with pytest.MonkeyPatch.context() as patch, socket.create_server(("127.0.0.1", 0)) as probe:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        port = probe.getsockname()[1]
        probe.close()
        before = {child.pid for child in psutil.Process().children(recursive=True)}
        try:
            serve_app.start(port, live)
            yield port
        finally:
            started = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
            serve_app.stop()
        _, left = psutil.wait_procs(started, timeout=10)
        assert not left


@pytest.fixture(scope="module")
async def running(port: int) -> Running:
    return await serve_app.connect(port)


@pytest.fixture(scope="module")
def app(running: Running, live: Path) -> Running:
    live.write_text(json.dumps([running.first, running.second]))
    return running


@pytest.fixture
async def http(app: Running) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=app.url, timeout=20) as client:
        yield client


def add_call(shard: ShardId, *texts: str) -> AddCall:
    return AddCall("r", Placement(UserId("ada"), shard, 1), texts)


def chat_call(word: str = "hello") -> ChatCall:
    return ChatCall("r", None, ({"role": "user", "content": word},), Sampling(), "off")


def body(word: str, user: str = "ada", stream: bool = False) -> dict[str, Any]:
    return {"model": MODEL, "user_id": user, "messages": [{"role": "user", "content": word}], "stream": stream}


async def answered_by(app: Running, shard: ShardId) -> str:
    events = [event async for event in app.client.chat(shard, chat_call(), DEADLINE_S)]
    return next(event.text for event in events if isinstance(event, ChatDelta))


async def ended_last(app: Running, shard: ShardId) -> str | None:
    ended = (await status(app, shard))["ended"]
    return ended[-1] if ended else None


async def status(app: Running, shard: ShardId) -> dict[str, Any]:
    found: Any = await app.client.status(shard, DEADLINE_S)
    return dict(found)


async def test_every_pinned_call_reaches_its_replica(app: Running) -> None:
    wanted = [app.first, app.second] * 40
    rounds = [wanted[i : i + MAX_ONGOING] for i in range(0, len(wanted), MAX_ONGOING)]
    got = [name for some in rounds for name in await asyncio.gather(*(answered_by(app, shard) for shard in some))]
    assert got == wanted


async def test_an_unknown_replica_is_gone_within_the_grace(app: Running) -> None:
    began = time.monotonic()
    with pytest.raises(ShardGone):
        await app.client.ask(ShardId("nobody"), add_call(app.first), DEADLINE_S)
    with pytest.raises(ShardGone):
        await answered_by(app, ShardId("nobody"))
    assert time.monotonic() - began < 2


async def test_a_call_without_a_pin_is_refused(app: Running) -> None:
    with pytest.raises(MemshardError, match="session_id"):
        await app.handle.ask.remote(add_call(app.first))


async def test_a_full_replica_refuses_at_once_and_delays_nobody_else(app: Running) -> None:
    sleeping = [
        asyncio.ensure_future(app.client.ask(app.first, add_call(app.first, "sleep"), DEADLINE_S))
        for _ in range(MAX_ONGOING)
    ]
    await asyncio.sleep(0.5)
    began = time.monotonic()
    refused = asyncio.gather(
        *(app.client.ask(app.first, add_call(app.first), DEADLINE_S) for _ in range(60)), return_exceptions=True
    )
    assert [await answered_by(app, app.second) for _ in range(5)] == [app.second] * 5
    assert {type(error) for error in await refused} == {Busy}
    assert time.monotonic() - began < 3
    for call in sleeping:
        call.cancel()
    assert {type(error) for error in await asyncio.gather(*sleeping, return_exceptions=True)} == {
        asyncio.CancelledError
    }
    await asyncio.sleep(0.5)
    assert await answered_by(app, app.first) == app.first


@pytest.mark.parametrize("text", ["not found", "not found, as a value"])
async def test_a_shards_error_arrives_as_itself_with_its_details(app: Running, text: str) -> None:
    with pytest.raises(NotFound) as error:
        await app.client.ask(app.first, add_call(app.first, text), DEADLINE_S)
    assert type(error.value) is NotFound
    assert error.value.details == {"field": "user_id"}


async def test_a_bug_in_a_shard_arrives_as_a_failure_without_its_text(app: Running) -> None:
    with pytest.raises(EngineFailed) as error:
        await app.client.ask(app.first, add_call(app.first, "bug"), DEADLINE_S)
    assert "a bug" not in error.value.message


async def test_a_deadline_ends_the_shards_work_too(app: Running) -> None:
    with pytest.raises(DeadlineExceeded):
        await app.client.ask(app.first, add_call(app.first, "sleep"), 0.3)
    assert await eventually_ended(app, app.first, "CancelledError")
    with pytest.raises(DeadlineExceeded):
        async for _ in app.client.chat(app.second, chat_call("sleep"), 0.3):
            pass
    assert await eventually_ended(app, app.second, "CancelledError")


async def test_the_gateway_answers_over_http_with_one_request_id(app: Running, http: httpx.AsyncClient) -> None:
    response = await http.post(CHAT, json=body("hello"), headers={"x-request-id": "abc"})
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"] in (app.first, app.second)
    assert response.headers.get_list("x-request-id") == ["abc"]
    assert (await http.post(CHAT, content=b"{")).status_code == 400
    assert (await http.get("/readyz")).status_code == 200
    streamed = await http.post(CHAT, json=body("hello", stream=True))
    assert streamed.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("word", ["sleep", "sleep at once"])
async def test_a_client_that_hangs_up_cancels_the_shards_generator(
    app: Running, http: httpx.AsyncClient, stream: bool, word: str
) -> None:
    owner = ShardId((await http.post(CHAT, json=body("hello"))).json()["choices"][0]["message"]["content"])
    assert await ended_last(app, owner) == "finished"
    with pytest.raises(httpx.ReadTimeout):
        await http.post(CHAT, json=body(word, stream=stream), timeout=0.5)
    hung_up_at = time.monotonic()
    assert await eventually_ended(app, owner, "CancelledError")
    assert time.monotonic() - hung_up_at < 2


async def test_a_killed_shard_fails_its_calls_and_its_users_are_answered_by_the_other(
    app: Running, http: httpx.AsyncClient
) -> None:
    owner = ShardId((await http.post(CHAT, json=body("hello", "eve"))).json()["choices"][0]["message"]["content"])
    other = app.second if owner == app.first else app.first
    pid = (await status(app, owner))["pid"]
    in_flight = asyncio.ensure_future(app.client.ask(owner, add_call(owner, "sleep"), DEADLINE_S))
    stranded = asyncio.ensure_future(http.post(CHAT, json=body("sleep at once", "eve"), timeout=3))
    await asyncio.sleep(0.5)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ShardGone):
        await asyncio.wait_for(in_flight, timeout=5)
    with pytest.raises(ShardGone) as gone:
        await app.client.ask(owner, add_call(owner), DEADLINE_S)
    assert gone.value.details["certain"] is True
    with pytest.raises(httpx.ReadTimeout):  # retried before its first token, and asleep on the other shard by now
        await stranded
    # Its heartbeat has not run out: the file still names it.
    response = await http.post(CHAT, json=body("hello", "eve"))
    assert (response.status_code, response.json()["choices"][0]["message"]["content"]) == (200, other)


async def eventually_ended(app: Running, shard: ShardId, how: str) -> bool:
    for _ in range(40):
        if await ended_last(app, shard) == how:
            return True
        await asyncio.sleep(0.05)
    return False
