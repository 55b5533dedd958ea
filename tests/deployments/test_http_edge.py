"""What holds for every request: ids, hang-ups, and that nothing of the inside gets out."""

from __future__ import annotations

import asyncio
import logging
import time

import httpx
import pytest
from gateway_fakes import MODEL, Cluster, FakeShard

CHAT = "/v1/chat/completions"
SECRET = "my secret is 12345"
HELLO = {"model": MODEL, "user_id": "ada", "messages": [{"role": "user", "content": SECRET}]}


def owner(cluster: Cluster) -> FakeShard:
    return cluster.shards.of("ada") if "ada" in cluster.directory.placements else cluster.place("ada")


async def test_every_response_has_a_request_id_and_a_given_one_is_kept(client: httpx.AsyncClient) -> None:
    for path in ("/healthz", "/nowhere", "/v1/models"):
        assert (await client.get(path, headers={"x-request-id": "abc-1"})).headers["x-request-id"] == "abc-1"
        made = (await client.get(path, headers={"x-request-id": "has space"})).headers["x-request-id"]
        assert len(made) == 32


async def test_an_unforeseen_error_is_a_500_that_says_only_where_to_look(
    client: httpx.AsyncClient, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    owner(cluster).break_with = RuntimeError("wires crossed")
    response = await client.post(CHAT, json=HELLO)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert response.headers["x-request-id"] in response.json()["detail"]
    assert "wires" not in response.text
    assert "wires crossed" in caplog.text
    assert response.headers["x-request-id"] in caplog.text


async def test_logs_never_carry_what_people_say(
    client: httpx.AsyncClient, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await client.post("/v1/memories", json={"user_id": "ada", "messages": SECRET})
    await client.post(CHAT, json=HELLO)
    await client.post(CHAT, json={**HELLO, "temperature": SECRET})
    owner(cluster).break_with = RuntimeError("wires crossed")
    await client.post(CHAT, json=HELLO)
    await client.post(CHAT, json={**HELLO, "stream": True})
    assert "wires crossed" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("before_first_token", [True, False])
async def test_a_client_that_hangs_up_ends_the_shards_work(
    server_url: str, cluster: Cluster, stream: bool, before_first_token: bool
) -> None:
    async with httpx.AsyncClient(base_url=server_url) as http:
        shard = owner(cluster)
        shard.stall, shard.stall_before_start = True, before_first_token
        with pytest.raises(httpx.ReadTimeout):
            await http.post(CHAT, json={**HELLO, "stream": stream}, timeout=0.3)
    hung_up_at = time.monotonic()
    while not shard.aborted.is_set():
        await asyncio.sleep(0.01)
        assert time.monotonic() - hung_up_at < 2
    assert len(shard.chats) == 1
