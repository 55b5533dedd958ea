"""What /healthz, /readyz and /status say while parts of the cluster are missing."""

from __future__ import annotations

from dataclasses import asdict

import httpx
from gateway_fakes import MODEL, Cluster

from deployments.messages import Verdict
from sharding.ids import ShardId


async def test_a_gateway_is_healthy_without_redis_and_shards(client: httpx.AsyncClient, cluster: Cluster) -> None:
    cluster.directory.away = True
    cluster.directory.reports.clear()
    assert (await client.get("/healthz")).status_code == 200


async def test_it_is_ready_with_one_ready_shard(client: httpx.AsyncClient, cluster: Cluster) -> None:
    cluster.shards.kill(ShardId("shard-a"))
    assert (await client.get("/readyz")).status_code == 200


async def test_it_says_that_memory_is_text_where_one_shard_serves_it_so(
    client: httpx.AsyncClient, cluster: Cluster
) -> None:
    reports = cluster.directory.reports
    for shard in list(reports):
        passed = {"canary": asdict(Verdict("passed", 0, "as good"))}
        reports[shard] = reports[shard].model_copy(update={"status": passed})
    assert (await client.get("/readyz")).json() == {"status": "ready", "memory": "injected"}
    failed = {"canary": asdict(Verdict("failed", None, "worse"))}
    reports[shard] = reports[shard].model_copy(update={"status": failed})
    assert (await client.get("/readyz")).json() == {"status": "ready", "memory": "text"}


async def test_on_demand_every_shard_asks_its_canary_again(client: httpx.AsyncClient, cluster: Cluster) -> None:
    cluster.shards.kill(ShardId("shard-b"), heartbeat_remains=True)
    shards = {shard["shard"]: shard for shard in (await client.post("/canary")).json()["shards"]}
    assert shards["shard-a"]["canary"]["state"] == "failed"
    assert shards["shard-b"]["reachable"] is False


async def test_it_is_not_ready_without_a_ready_shard_or_without_redis(
    client: httpx.AsyncClient, cluster: Cluster
) -> None:
    reports = cluster.directory.reports
    for shard in list(reports):
        reports[shard] = reports[shard].model_copy(update={"ready": False})
    starting = await client.get("/readyz")
    assert (starting.status_code, starting.headers["retry-after"]) == (503, "1")
    assert starting.json()["reason"] == "None of the 2 shards is ready yet."
    cluster.directory.away = True
    assert "Redis" in (await client.get("/readyz")).json()["reason"]


async def test_status_has_every_live_shard_and_says_which_do_not_answer(
    client: httpx.AsyncClient, cluster: Cluster
) -> None:
    cluster.shards.kill(ShardId("shard-b"), heartbeat_remains=True)
    status = (await client.get("/status")).json()
    assert (status["model"], status["expected"], status["most"]) == (MODEL, 2, 2)
    answered, silent = status["shards"]
    assert (answered["shard"], answered["reachable"], answered["tiers"]) == ("shard-a", True, [["device", 10, 100]])
    assert (silent["shard"], silent["reachable"]) == ("shard-b", False)
