"""A gateway over some shards with the deterministic engine, all in this process, behind a socket: to test the load on.

Only Ray is missing: the shards are called directly. Redis is a real one.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import uvicorn

import tests.deployments.quiet_ray  # noqa: F401  # before anything that imports ray
from deployments import deterministic
from deployments.gateway import Gateway, GatewayStores, create_app
from deployments.memory_calls import MemoryCall
from deployments.messages import ChatCall, ChatEvent, ShardStatus
from deployments.settings import GatewaySettings, ShardSettings
from deployments.shard import Shard
from deployments.shard_client import Shards
from sharding.api_keys import KeyStore
from sharding.client import connect
from sharding.directory import Directory
from sharding.facts import FactStore
from sharding.ids import ShardId
from sharding.keys import KeySpace
from sharding.lease import Lease
from sharding.limits import Minutes
from sharding.placement import PlacementPolicy, ShardReport
from sharding.registry import Registry
from tests.sharding.real_valkey import running_valkey

T = TypeVar("T")

FOR_EVER_S = 1e6
NOWHERE = Path("/nonexistent")


class LocalShards(Shards):
    """Calls go straight to the shard."""

    def __init__(self) -> None:
        self.by_id: dict[ShardId, Shard] = {}

    async def chat(self, shard: ShardId, call: ChatCall, deadline_s: float) -> AsyncGenerator[ChatEvent, None]:
        async for event in self.by_id[shard].chat(call):
            yield event

    async def ask(self, shard: ShardId, call: MemoryCall[T], deadline_s: float) -> T:
        return await self.by_id[shard].ask(call)

    async def status(self, shard: ShardId, deadline_s: float) -> ShardStatus:
        here = self.by_id[shard]
        counters = {"wrong_shard": here.users.wrong_shard}
        facts = sum(len(memory) for memory in here.table.memories())
        sizes = (len(here.table), facts, len(here.ledger), here.requests_in_flight, here.encoder.backlog())
        tiers = (("device", 1, 2),)
        return ShardStatus(shard, deterministic.NAME, True, "now", *sizes, tiers, counters, here.canary.verdict)

    async def prove(self, shard: ShardId, deadline_s: float) -> ShardStatus:
        await self.by_id[shard].canary.prove()
        return await self.status(shard, deadline_s)


class LocalCluster:
    """`url` once it serves; `shards` may be tampered with."""

    def __init__(self) -> None:
        self.url = ""
        self.shards = LocalShards()
        self._up = threading.Event()
        self._end: Any = None

    async def serve(self, redis_url: str, count: int) -> None:
        keys = KeySpace("test", deterministic.NAME)
        async with AsyncExitStack() as ends:
            redis = await ends.enter_async_context(connect(redis_url))
            directory, store = Directory(redis, keys), FactStore(redis, keys)
            for n in range(count):
                me, lease = ShardId(f"shard-{n}"), Lease(FOR_EVER_S, FOR_EVER_S)
                lease.acknowledged(time.monotonic())
                shard = await deterministic.open_shard(_settings(redis_url), me, directory, store, lease)
                ends.callback(shard.close)
                self.shards.by_id[me] = shard
                sizes = {"free_bytes": 1 << 20, "users": 0, "requests_in_flight": 0}
                report = ShardReport(shard=me, model=deterministic.NAME, ready=True, **sizes)
                await directory.heartbeat(report.model_dump_json(), me, FOR_EVER_S)
            settings = GatewaySettings(model=deterministic.NAME, expected_shards=count)
            stores = GatewayStores(directory, Registry(redis, keys), KeyStore(redis, keys), Minutes(redis, keys))
            app = create_app(Gateway(self.shards, stores, PlacementPolicy(), settings))
            listening = socket.create_server(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none", lifespan="off"))
            self._end = lambda: setattr(server, "should_exit", True)
            self._up.set()
            await server.serve([listening])
            listening.close()


@contextmanager
def local_cluster(folder: Path, shards: int) -> Iterator[LocalCluster]:
    with running_valkey(folder) as valkey:
        cluster = LocalCluster()
        thread = threading.Thread(target=lambda: asyncio.run(cluster.serve(valkey.url, shards)))
        thread.start()
        assert cluster._up.wait(30)
        try:
            yield cluster
        finally:
            cluster._end()
            thread.join(30)
    assert not thread.is_alive()


def _settings(redis_url: str) -> ShardSettings:
    sizes: dict[str, Any] = {"kv_cache_bytes": 1, "chunk_device_bytes": 1 << 22, "window_facts": 3}
    more: dict[str, Any] = {"threads": 1, "max_model_len": None, "max_fact_tokens": 99, "max_requests_in_flight": 99}
    times = {"heartbeat_interval_s": 1.0, "heartbeat_ttl_s": FOR_EVER_S, "redis_grace_s": 1.0}
    return ShardSettings(deterministic.NAME, NOWHERE, NOWHERE, redis_url, "test", 1, **sizes, **more, **times)
