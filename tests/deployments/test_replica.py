"""A shard's replica in this process: real Redis, the deterministic engine, and what it tells of itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from ray import serve

from deployments import deterministic
from deployments.autoscaling import ACTIVE_BYTES, ASKED_LATELY, ENCODE_BACKLOG, REQUESTS
from deployments.memory_calls import AddCall
from deployments.messages import ChatCall, ChatFinished, Sampling
from deployments.replica import ShardReplica
from deployments.settings import ShardSettings
from sharding.client import connect
from sharding.directory import Directory
from sharding.errors import WrongShard
from sharding.ids import Placement, ShardId, UserId
from sharding.keys import KeySpace
from tests.sharding.real_valkey import running_valkey

ME = ShardId("replica-1")
ADA = UserId("ada")


class Collected(ShardReplica):
    """Serve awaits what ends a replica; the collector would not."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


@pytest.fixture(scope="module")
async def replica(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ShardReplica]:
    nowhere = Path("/nonexistent")
    sizes: dict[str, Any] = {"kv_cache_bytes": 1, "chunk_device_bytes": 1 << 20, "window_facts": 2}
    more: dict[str, Any] = {"threads": 1, "max_model_len": None, "max_fact_tokens": 99, "max_requests_in_flight": 9}
    times = {"heartbeat_interval_s": 0.2, "heartbeat_ttl_s": 60.0, "redis_grace_s": 60.0}
    handlers = logging.getLogger().handlers[:]
    with pytest.MonkeyPatch.context() as patch, running_valkey(tmp_path_factory.mktemp("v")) as valkey:
        context = SimpleNamespace(replica_id=SimpleNamespace(unique_id=ME))
        patch.setattr(serve, "get_replica_context", lambda: context)
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "")  # set by the replica, and put back here
        settings = ShardSettings("m", nowhere, nowhere, valkey.url, "test", 1, **sizes, **more, **times)
        replica = Collected.__new__(Collected)
        await replica.__init__(settings, deterministic.open_shard)  # type: ignore[misc]  # as Serve does
        logging.getLogger().handlers = handlers
        async with connect(valkey.url) as redis:
            placement = await Directory(redis, KeySpace("test", "m")).claim(ADA, ME, None)
        await tell_and_ask(replica, placement)
        yield replica
        await ShardReplica.__del__(replica)


async def tell_and_ask(replica: ShardReplica, placement: Placement) -> None:
    along = {"request_id": "r-9", "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    await replica.ask(AddCall("a", placement, ("Ada likes tea",)), along)
    call = ChatCall("c", placement, ({"role": "user", "content": "What does Ada like?"},), Sampling())
    events = [event async for event in replica.chat(call, along)]
    assert isinstance(events[-1], ChatFinished), events


async def samples(replica: ShardReplica) -> dict[tuple[str, str], float]:
    """By name and the label that tells one of its samples from the others."""
    found = {}
    for family in text_string_to_metric_families(await replica.metrics()):
        for sample in family.samples:
            labels = sample.labels
            found[sample.name, labels.get("step") or labels.get("memory") or labels.get("tier") or ""] = sample.value
    return found


async def test_its_page_has_its_numbers_and_the_duration_of_every_step(replica: ShardReplica) -> None:
    page = await samples(replica)
    for step in ("plan", "facts", "embed", "search", "append", "encode"):
        assert page["memshard_step_seconds_count", step] >= 1, step
    assert page["memshard_first_token_seconds_count", "inject"] >= 1
    assert page["memshard_chats_total", "inject"] == 1
    assert page["memshard_resident_users", ""] == page["memshard_resident_facts", ""] == 1
    assert page["memshard_facts_added_total", ""] == 1
    assert page["memshard_tier_bytes", "device"] > 0


async def test_its_status_has_the_latencies_of_the_last_minutes(replica: ShardReplica) -> None:
    seen = (await replica.status()).latencies["inject"]
    assert seen["chats"] >= 1
    assert 0 <= seen["p50_s"] <= seen["p95_s"]


async def test_it_reports_its_load_to_the_autoscaler(replica: ShardReplica) -> None:
    stats = await replica.record_autoscaling_stats()
    assert stats.keys() == {ACTIVE_BYTES, ASKED_LATELY, ENCODE_BACKLOG, REQUESTS}
    assert stats[ACTIVE_BYTES] > 0
    assert stats[ASKED_LATELY] == 1
    assert stats[REQUESTS] == 0


async def test_a_shard_that_serve_stops_lets_its_users_go_and_stays_where_serve_goes_on_checking_it(
    replica: ShardReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement = await replica._directory.lookup(ADA)
    assert placement is not None
    call = ChatCall("d", placement, ({"role": "user", "content": "What does Ada like?"},), Sampling())
    assert [event async for event in replica.chat(call, None, leaving=True)], "it still answers"
    await asyncio.wait_for(asyncio.shield(replica._leaving), 10)  # type: ignore[arg-type]
    report = (await replica._directory.shards())[ME]
    assert (report.ready, report.leaving) == (False, True)
    assert [event async for event in replica.chat(call, None)], "nobody has claimed her yet"

    other = await replica._directory.claim(ADA, ShardId("another"), placement)
    (refused,) = [event async for event in replica.chat(call, None)]
    assert isinstance(refused, WrongShard), "however long its lease was to last"

    monkeypatch.setattr("deployments.replica.STILL_CHECKED_S", 0.0)
    await replica.check_health()
    await replica._beat()
    report = (await replica._directory.shards())[ME]
    assert (report.ready, report.leaving) == (True, False)
    back = await replica._directory.claim(ADA, ME, other)
    assert [event async for event in replica.chat(replace(call, placement=back), None)]
