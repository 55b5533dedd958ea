"""A cluster to break without Ray: gateways and shards with the deterministic engine in this process, each shard behind
a proxy of its own to an embedded Redis that is killed and filled for real.

A shard that is killed stops in the middle of whatever it does; one that is paused goes on later, believing what it
believed. Requests go to either gateway, so that one may be behind the other.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import httpx

import tests.deployments.quiet_ray  # noqa: F401  # before anything that imports ray
from benchmarks.chaos_cluster import RedisToBreak
from benchmarks.chaos_proxy import RedisProxy
from deployments import deterministic
from deployments.gateway import Gateway, GatewayStores, create_app
from deployments.memory_calls import MemoryCall
from deployments.messages import ChatCall, ChatEvent, ShardStatus
from deployments.settings import GatewaySettings, ShardSettings
from deployments.shard_client import Shards
from sharding.api_keys import KeyStore
from sharding.client import RedisClient, connect
from sharding.directory import Directory
from sharding.errors import ShardGone, Unavailable
from sharding.facts import FactStore
from sharding.ids import ShardId, UserId
from sharding.keys import KeySpace
from sharding.lease import Lease
from sharding.limits import Minutes
from sharding.placement import PlacementPolicy, ShardReport
from sharding.registry import Registry
from tests.benchmarks.local_cluster import _settings

T = TypeVar("T")

SHARDS = 3
TTL_S = 1.0
KEYS = KeySpace("chaos", deterministic.NAME)
RESTART_S = 0.5  # until a killed shard is replaced


class Breakable:
    """One shard: its heart, its calls, and what was done to it."""

    def __init__(self, me: ShardId) -> None:
        self.me = me
        self.dead = False
        self.running = asyncio.Event()  # not set: paused
        self.running.set()
        self.lease = Lease(TTL_S, 60.0)
        self.calls: set[asyncio.Task[Any]] = set()

    async def start(self, redis: RedisToBreak) -> None:
        self.proxy = RedisProxy(redis.port)
        await self.proxy.start()
        self._redis = connect(f"redis://127.0.0.1:{self.proxy.port}/0", timeout_s=1.0, retries=1)
        self._directory = Directory(self._redis, KEYS)
        settings: ShardSettings = _settings("")
        store = FactStore(self._redis, KEYS)
        self.shard = await deterministic.open_shard(settings, self.me, self._directory, store, self.lease, step_s=0.002)
        await self._beat()
        self._beating = asyncio.create_task(self._keep_beating())

    async def stop(self) -> None:
        self.kill()
        self.shard.close()
        await asyncio.gather(self._beating, *self.calls, return_exceptions=True)
        await self.shard.users.background_done()
        await self.proxy.stop()
        await self._redis.aclose()

    def kill(self) -> None:
        self.dead = True
        self.running.set()
        self._beating.cancel()
        for call in self.calls:
            call.cancel()

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What a process does of a call: it stops when it is killed, and waits while it is paused."""
        await self.running.wait()
        if self.dead:
            raise ShardGone(f"{self.me} died.", certain=True)
        task = asyncio.create_task(work())
        self.calls.add(task)
        task.add_done_callback(self.calls.discard)
        try:
            return await task
        except asyncio.CancelledError:
            if self.dead and not asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise ShardGone(f"{self.me} died.", certain=True) from None
            raise
        finally:
            await self.running.wait()

    async def _beat(self) -> None:
        sizes = {"free_bytes": 1 << 20, "users": len(self.shard.table), "requests_in_flight": 0}
        report = ShardReport(shard=self.me, model=deterministic.NAME, ready=True, **sizes)
        sent_at = time.monotonic()
        await self._directory.heartbeat(report.model_dump_json(), self.me, TTL_S)
        self.lease.acknowledged(sent_at, await self._directory.histories())

    async def _keep_beating(self) -> None:
        while True:
            await asyncio.sleep(TTL_S / 5)
            await self.running.wait()
            with suppress(Unavailable):
                await self._beat()


class LocalShards(Shards):
    """Calls go straight to the shard."""

    def __init__(self) -> None:
        self.by_id: dict[ShardId, Breakable] = {}

    async def chat(self, shard: ShardId, call: ChatCall, deadline_s: float) -> AsyncGenerator[ChatEvent, None]:
        here = self._named(shard)
        async with aclosing(here.shard.chat(call)) as events:
            while (event := await here.run(lambda: _next(events))) is not None:
                yield event

    async def ask(self, shard: ShardId, call: MemoryCall[T], deadline_s: float) -> T:
        here = self._named(shard)
        answer: T = await here.run(lambda: here.shard.ask(call))
        return answer

    async def leave(self, shard: ShardId, user: UserId, deadline_s: float) -> None:
        here = self._named(shard)
        await here.run(lambda: here.shard.users.leave(user))

    async def status(self, shard: ShardId, deadline_s: float) -> ShardStatus:
        raise NotImplementedError

    async def metrics(self, shard: ShardId, deadline_s: float) -> str:
        raise NotImplementedError

    def _named(self, shard: ShardId) -> Breakable:
        if shard not in self.by_id:
            raise ShardGone(f"{shard} is not known.", certain=True)
        return self.by_id[shard]


async def _next(events: AsyncGenerator[ChatEvent, None]) -> ChatEvent | None:
    return await anext(events, None)


class Either(httpx.AsyncBaseTransport):
    """One of the gateways, by chance."""

    def __init__(self, gateways: list[Gateway], random: Random) -> None:
        self._ways = [httpx.ASGITransport(create_app(gateway)) for gateway in gateways]
        self._random = random

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await self._random.choice(self._ways).handle_async_request(request)


class LocalChaos:
    """What faults are struck at."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.redis = RedisToBreak(folder)
        self.shards = LocalShards()
        self._random = Random(seed)
        self._started = 0
        self._ended: list[Breakable] = []
        self._work: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        await self.redis.start()
        for _ in range(SHARDS):
            await self.add_shard()
        settings = GatewaySettings(
            model=deterministic.NAME, expected_shards=SHARDS, deadline_s=20, reports_ttl_s=0.1, patience_s=4.0
        )
        self._clients = [connect(self.redis.url, timeout_s=1.0, retries=1) for _ in range(2)]
        gateways = [Gateway(self.shards, stores_of(one), PlacementPolicy(), settings) for one in self._clients]
        self.http = httpx.AsyncClient(transport=Either(gateways, self._random), base_url="http://gateway", timeout=30)

    async def stop(self) -> None:
        for task in self._work:
            task.cancel()
        for shard in (*self.shards.by_id.values(), *self._ended):
            await shard.stop()
        await self.http.aclose()
        for client in self._clients:
            await client.aclose()
        await self.redis.stop()

    async def add_shard(self) -> None:
        shard = Breakable(ShardId(f"shard-{self._started}"))
        self._started += 1
        await shard.start(self.redis)
        self.shards.by_id[shard.me] = shard

    async def whole(self) -> None:
        while len(self.living()) < SHARDS:  # noqa: ASYNC110  # a replacement starts
            await asyncio.sleep(0.05)

    def living(self) -> list[Breakable]:
        return [shard for shard in self.shards.by_id.values() if not shard.dead]

    # -- faults -----------------------------------------------------------------------------------------------------

    def kill(self, random: Random) -> None:
        random.choice(self.living()).kill()
        task = asyncio.create_task(self._replace())
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def pause(self, random: Random) -> None:
        paused = random.choice(self.living())
        paused.running.clear()
        await asyncio.sleep(3 * TTL_S)
        paused.running.set()

    async def partition(self, random: Random) -> None:
        cut_off = random.choice(self.living())
        cut_off.proxy.cut(os.getpid())
        await asyncio.sleep(3 * TTL_S)
        cut_off.proxy.heal()

    async def _replace(self) -> None:
        await asyncio.sleep(RESTART_S)
        while True:
            try:
                await self.add_shard()
                return
            except Unavailable:
                await asyncio.sleep(0.2)


def stores_of(redis: RedisClient) -> GatewayStores:
    """What a gateway asks through this client."""
    return GatewayStores(Directory(redis, KEYS), Registry(redis, KEYS), KeyStore(redis, KEYS), Minutes(redis, KEYS))


@asynccontextmanager
async def local_chaos(folder: Path, seed: int) -> AsyncIterator[LocalChaos]:
    cluster = LocalChaos(folder, seed)
    await cluster.start()
    try:
        yield cluster
    finally:
        await cluster.stop()
