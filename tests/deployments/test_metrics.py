"""One page of metrics for the whole cluster, from whichever gateway is asked."""

from __future__ import annotations

import asyncio
import shutil
import subprocess

import httpx
import pytest
from gateway_fakes import MODEL, Cluster, FakeNames, NoKeys, NoLimits
from prometheus_client.parser import text_string_to_metric_families

from deployments import exposition
from deployments.gateway import Gateway, GatewayStores, create_app
from deployments.settings import GatewaySettings
from sharding.errors import Unavailable
from sharding.ids import ShardId
from sharding.placement import PlacementPolicy

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parsed(page: str) -> Samples:
    """Every sample of a page by name and labels; refuses one that stands there twice."""
    found: Samples = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, key
            found[key] = sample.value
    return found


def values(samples: Samples, name: str, **labels: str) -> list[float]:
    wanted = set(labels.items())
    return [value for (named, has), value in samples.items() if named == name and wanted <= has]


class SharedDictionary:
    """`sharding.pages.Pages` in memory."""

    def __init__(self) -> None:
        self.pages: dict[str, str] = {}
        self.away = False

    async def publish(self, name: str, page: str) -> None:
        self._reach()
        self.pages[name] = page

    async def read(self) -> dict[str, str]:
        self._reach()
        return dict(self.pages)

    def _reach(self) -> None:
        if self.away:
            raise Unavailable("Redis could not be reached.")


async def scrape(client: httpx.AsyncClient) -> Samples:
    answer = await client.get("/metrics")
    assert (answer.status_code, answer.headers["content-type"]) == (200, exposition.CONTENT_TYPE)
    return parsed(answer.text)


async def test_a_page_has_every_shard_and_the_gateway_by_name(client: httpx.AsyncClient) -> None:
    await client.get("/healthz")
    page = await scrape(client)
    assert values(page, "memshard_shard_up") == [1, 1]
    assert values(page, "memshard_tier_bytes", shard="shard-a", tier="device") == [10]
    assert values(page, "memshard_tier_budget_bytes", shard="shard-b", tier="device") == [100]
    assert values(page, "memshard_expected_shards") == values(page, "memshard_live_shards") == [2]
    assert values(page, "memshard_http_requests_total", gateway="gateway", route="/healthz")[0] >= 1


async def test_a_chat_leaves_the_duration_of_its_steps(client: httpx.AsyncClient, cluster: Cluster) -> None:
    before = await scrape(client)
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "user_id": "ada"}
    assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
    after = await scrape(client)
    for name, labels in (
        ("memshard_step_seconds_count", {"walk": "chat", "step": "owner"}),
        ("memshard_first_token_seconds_count", {"memory": "inject", "at": "gateway"}),
        ("memshard_http_requests_total", {"route": "/v1/chat/completions", "status": "200"}),
    ):
        assert sum(values(after, name, **labels)) == sum(values(before, name, **labels)) + 1, name


async def test_a_call_that_was_sent_again_is_counted(client: httpx.AsyncClient, cluster: Cluster) -> None:
    before = sum(values(await scrape(client), "memshard_retries_total", reason="ShardGone"))
    cluster.place("ada")
    cluster.shards.kill(ShardId("shard-a"))
    cluster.directory.reports[ShardId("shard-a")] = cluster.directory.reports[ShardId("shard-b")]
    await client.post(
        "/v1/chat/completions",
        json={"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "user_id": "ada"},
    )
    assert sum(values(await scrape(client), "memshard_retries_total", reason="ShardGone")) > before


async def test_a_path_that_does_not_exist_is_no_label(client: httpx.AsyncClient) -> None:
    await client.get("/secret-of-ada")
    assert not [key for key in await scrape(client) if "secret-of-ada" in str(key)]


async def test_a_silent_shard_is_down_with_the_numbers_of_its_last_heartbeat(
    client: httpx.AsyncClient, cluster: Cluster
) -> None:
    shard = ShardId("shard-b")
    report = cluster.directory.reports[shard]
    cluster.directory.reports[shard] = report.model_copy(update={"status": {"encode_backlog": 7}})
    cluster.shards.kill(shard, heartbeat_remains=True)
    page = await scrape(client)
    assert values(page, "memshard_shard_up", shard="shard-b") == [0]
    assert values(page, "memshard_encode_backlog_chunks", shard="shard-b") == [7]


async def test_without_redis_the_page_says_so_and_has_the_shards_that_were_known(
    client: httpx.AsyncClient, cluster: Cluster
) -> None:
    assert values(await scrape(client), "memshard_redis_up") == [1]
    cluster.directory.away = True
    page = await scrape(client)
    assert values(page, "memshard_redis_up") == [0]
    assert values(page, "memshard_shard_up") == [1, 1]


async def test_any_gateway_answers_for_all(cluster: Cluster) -> None:
    shared = SharedDictionary()
    shared.pages["another"] = "# HELP memshard_retries_total x\n# TYPE memshard_retries_total counter\n" + (
        'memshard_retries_total{reason="WrongShard"} 41.0\n'
    )
    stores = GatewayStores(cluster.directory, FakeNames(cluster.directory), NoKeys(), NoLimits(), shared)
    gateway = Gateway(cluster.shards, stores, PlacementPolicy(), GatewaySettings(MODEL), "me")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(create_app(gateway)), base_url="http://me") as client:
        page = await scrape(client)
        assert values(page, "memshard_retries_total", gateway="another") == [41]
        assert values(page, "memshard_http_request_seconds_count", gateway="me")
        shared.away = True
        assert values(await scrape(client), "memshard_http_request_seconds_count", gateway="me")


def test_counters_of_a_shard_become_families_with_labels() -> None:
    counters = {"chats_inject": 3, "chats_off": 1, "memory_tokens_prefilled_evicted": 9, "found_disk": 2, "new_one": 5}
    page = parsed(exposition.of_status({"counters": counters}))
    assert values(page, "memshard_chats_total", memory="inject") == [3]
    assert values(page, "memshard_memory_tokens_prefilled_total", reason="evicted") == [9]
    assert values(page, "memshard_chunks_found_total", tier="disk") == [2]
    assert values(page, "memshard_new_one_total") == [5]


@pytest.mark.parametrize(("nearest", "injects"), [(0, 1), (2, 1), (None, 0)])
def test_what_the_canary_found_is_a_number(nearest: int | None, injects: int) -> None:
    page = parsed(exposition.of_status({"canary": {"state": "passed", "prefill_nearest": nearest}}))
    assert values(page, "memshard_canary_injects") == [injects]


def test_pages_of_one_family_are_put_together_under_one_head() -> None:
    one = "# HELP a_total x\n# TYPE a_total counter\na_total 1.0\n"
    two = '# HELP a_total x\n# TYPE a_total counter\na_total{k="}"} 2.0\n'
    assert exposition.merged([("shard", "s", one), ("shard", "t", two)]) == (
        '# HELP a_total x\n# TYPE a_total counter\na_total{shard="s"} 1.0\na_total{k="}",shard="t"} 2.0\n'
    )


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
async def test_promtool_finds_nothing_to_say_of_our_names(client: httpx.AsyncClient) -> None:
    page = (await client.get("/metrics")).text
    command = ["promtool", "check", "metrics"]
    done = await asyncio.to_thread(subprocess.run, command, input=page, capture_output=True, text=True, check=False)
    ours = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("memshard_")]
    assert ours == []
