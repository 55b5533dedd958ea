"""An operator moves users between shards, and has memories rebuilt, over HTTP."""

from __future__ import annotations

import httpx
from gateway_fakes import Cluster

from sharding.errors import EngineFailed
from sharding.ids import UserId


async def test_a_user_is_moved_and_answered_from_the_new_shard(client: httpx.AsyncClient, cluster: Cluster) -> None:
    body = {"user_id": "alice", "messages": [{"role": "user", "content": "I row."}], "infer": False}
    assert (await client.post("/v1/memories", json=body)).is_success
    source = cluster.shards.of("alice")
    target = cluster.other_than(source)
    for _ in range(2):  # a repeated call is the same move
        answer = await client.post("/v1/admin/moves", json={"user_id": "alice", "shard": target.id})
        assert answer.status_code == 200
        report = answer.json()
        assert (report["end"], report["placement"]) == ("moved", {"shard": target.id, "epoch": 2})
    assert cluster.shards.of("alice") is target
    assert len(target.facts[UserId("alice")]) == 1


async def test_a_memory_is_rebuilt_and_what_that_took_is_told(client: httpx.AsyncClient, cluster: Cluster) -> None:
    cluster.place("alice")
    answer = await client.post("/v1/admin/rebuilds", json={"user_id": "alice"})
    assert answer.json() == {"facts": 3, "tokens": 120, "full_tokens": 800, "share": 0.15}
    assert (await client.post("/v1/admin/rebuilds", json={"user_id": "nobody"})).status_code == 404


async def test_a_user_whom_nobody_knows_cannot_be_moved(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/admin/moves", json={"user_id": "nobody", "shard": "shard-b"})
    assert answer.status_code == 404


async def test_a_shard_is_drained(client: httpx.AsyncClient, cluster: Cluster) -> None:
    answer = await client.post("/v1/admin/drains", json={"shard": "shard-a"})
    assert (answer.status_code, answer.json()) == (200, {"moved": 4, "left": 2})
    assert cluster.shards.drained == ["shard-a"]


async def test_a_shard_that_is_not_there_is_not_drained(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/admin/drains", json={"shard": "shard-x"})
    assert answer.status_code == 404
    assert "memshard status" in answer.json()["error"]["message"]


async def test_what_a_shard_says_of_a_move_that_failed_is_passed_on(
    client: httpx.AsyncClient, cluster: Cluster
) -> None:
    cluster.place("alice").refuse_with = EngineFailed("The engine of this shard has died.")
    answer = await client.post("/v1/admin/moves", json={"user_id": "alice", "shard": "shard-b"})
    assert answer.status_code == 500
