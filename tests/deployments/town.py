"""A whole Memshard in one process, but for the model and Ray: the gateway behind a socket, two shards with the engine
that needs no model, and a real Valkey."""

from __future__ import annotations

import asyncio
import pickle
import socket
import threading
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import redis
import uvicorn
from fastapi import FastAPI

from deployments import exposition
from deployments.deterministic import open_shard, open_template
from deployments.distiller import Decision
from deployments.gateway import Gateway, GatewayStores, create_app
from deployments.memory_calls import MemoryCall
from deployments.messages import ChatCall, ChatEvent, ShardStatus
from deployments.quotas import quotas_of
from deployments.settings import GatewaySettings, ShardSettings
from deployments.shard import Shard
from deployments.shard_client import Shards
from deployments.unattended import Unattended
from sharding.api_keys import KeyStore
from sharding.client import connect
from sharding.directory import Directory
from sharding.facts import FactStore
from sharding.ids import ShardId, UserId
from sharding.keys import KeySpace
from sharding.lease import Lease
from sharding.limits import Minutes
from sharding.placement import PlacementPolicy, ShardReport
from sharding.registry import Registry
from sharding.sealing import Seal
from tests.sharding.real_valkey import Valkey

MODEL = "tiny"
TTL_S = 3600.0


class SentenceReader:
    """A fact for each sentence of the user's; one that begins with the same two words as a known one corrects it."""

    def __init__(self) -> None:
        self.read: list[Sequence[tuple[str, str]]] = []
        self.fails_with: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def extract(self, user: UserId, messages: Sequence[tuple[str, str]], instructions: str | None) -> list[str]:
        self.read.append(messages)
        await self.gate.wait()
        if self.fails_with is not None:
            raise self.fails_with
        told = " ".join(text for role, text in messages if role == "user")
        return [f"{sentence.strip()}." for sentence in told.split(".") if sentence.strip()][:5]

    async def decide(self, user: UserId, fact: str, known: Sequence[str]) -> Decision:
        for place, text in enumerate(known):
            if text.split()[:2] == fact.split()[:2]:
                return Decision("UPDATE", place)
        return Decision("ADD")


class LocalShards(Shards):
    """Shards in this process; what goes there and back is pickled, as on the way to another."""

    def __init__(self) -> None:
        self.by_id: dict[ShardId, Shard] = {}
        self.start: Callable[[], Awaitable[None]] | None = None  # what a wake does; None: nothing, it waits

    async def chat(self, shard: ShardId, call: ChatCall, deadline_s: float) -> AsyncGenerator[ChatEvent, None]:
        async for event in self.by_id[shard].chat(_sent(call)):
            yield _sent(event)

    async def ask(self, shard: ShardId, call: MemoryCall[Any], deadline_s: float) -> Any:
        return _sent(await self.by_id[shard].ask(_sent(call)))

    async def leave(self, shard: ShardId, user: UserId, deadline_s: float) -> None:
        await self.by_id[shard].users.leave(_sent(user))

    async def status(self, shard: ShardId, deadline_s: float) -> ShardStatus:
        here = self.by_id[shard]
        users, facts = len(here.table), sum(map(len, here.table.memories()))
        return ShardStatus(
            shard,
            MODEL,
            True,
            "",
            users,
            facts,
            len(here.ledger),
            0,
            0,
            (),
            dict(here.counters),
            canary=here.canary.verdict,
        )

    async def prove(self, shard: ShardId, deadline_s: float) -> ShardStatus:
        await self.by_id[shard].canary.prove()
        return await self.status(shard, deadline_s)

    async def wake(self, deadline_s: float) -> None:
        if self.start is None:
            await asyncio.sleep(deadline_s)
        else:
            await self.start()

    async def metrics(self, shard: ShardId, deadline_s: float) -> str:
        return exposition.of_status(asdict(await self.status(shard, deadline_s)))


def _sent(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


class Town:
    """`url` to talk to it, `app` to look at it, `redis` and `shards` to look into it. `of_shards` are more settings of
    its shards."""

    def __init__(self, valkey: Valkey, of_shards: dict[str, Any], **settings: Any) -> None:
        self.keys = KeySpace(uuid.uuid4().hex, MODEL)
        self.redis = redis.Redis.from_url(valkey.url)
        self.shards = LocalShards()
        self._valkey = valkey
        self._of_shards = of_shards
        self._settings = GatewaySettings(model=MODEL, **settings)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._ready = threading.Event()
        self._server: uvicorn.Server | None = None

    async def serve(self) -> None:
        """Runs until `stop`."""
        async with AsyncExitStack() as undo:
            self.app = await self._build(undo)
            self._loop = asyncio.get_running_loop()
            self._server = uvicorn.Server(uvicorn.Config(self.app, log_level="warning", ws="none", lifespan="off"))
            self._ready.set()
            server = self._server
            await server.serve([self._listening])

    async def _build(self, undo: AsyncExitStack) -> FastAPI:
        client = connect(self._valkey.url)
        undo.push_async_callback(client.aclose)
        self.directory = directory = Directory(client, self.keys)
        nowhere = Path("/nonexistent")
        sizes: dict[str, Any] = {"kv_cache_bytes": 1, "chunk_device_bytes": 1 << 22, "window_facts": 2}
        more: dict[str, Any] = {
            "threads": 1,
            "max_model_len": None,
            "max_fact_tokens": 4096,
            "max_requests_in_flight": 9,
        }
        times = {"heartbeat_interval_s": 1.0, "heartbeat_ttl_s": TTL_S, "redis_grace_s": 1.0}
        shard_settings = ShardSettings(
            MODEL,
            nowhere,
            nowhere,
            self._valkey.url,
            "test",
            1,
            **{**sizes, **more, **times, **self._of_shards},
        )
        store = FactStore(client, self.keys, Seal(shard_settings.encryption_key))
        for name in ("shard-a", "shard-b"):
            id, lease = ShardId(name), Lease(TTL_S, TTL_S)
            lease.acknowledged(time.monotonic())
            shard = await open_shard(shard_settings, id, directory, store, lease)
            shard.distillation.distiller = SentenceReader()  # its engine cannot write what one asks for
            undo.callback(shard.close)
            self.shards.by_id[id] = shard
            await self.beat(directory, id)
        self.api_keys = KeyStore(client, self.keys)
        minutes = Minutes(client, self.keys)
        quotas = quotas_of(shard_settings, store)
        self.unattended = Unattended(store, open_template, quotas, max_fact_tokens=more["max_fact_tokens"])
        registry = Registry(client, self.keys)
        stores = GatewayStores(directory, registry, self.api_keys, minutes, unattended=self.unattended)
        self.gateway = Gateway(self.shards, stores, PlacementPolicy(), self._settings)
        return create_app(self.gateway)

    @staticmethod
    async def beat(directory: Directory, id: ShardId) -> None:
        report = ShardReport(shard=id, model=MODEL, ready=True, free_bytes=1, users=0, requests_in_flight=0)
        await directory.heartbeat(report.model_dump_json(), id, TTL_S)

    def stop(self) -> None:
        if self._server is not None:
            self._server.should_exit = True

    def run(self, work: Any, timeout_s: float = 10.0) -> Any:
        """Awaits `work` on the town's own loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def kept(self) -> dict[bytes, bytes]:
        """Every key of this town in Redis, with all that is under it."""
        dumped = {}
        for key in self.redis.scan_iter(f"{self.keys.namespace}:*"):
            kind = self.redis.type(key)
            read = {
                b"string": self.redis.get,
                b"hash": self.redis.hgetall,
                b"set": self.redis.smembers,
                b"zset": lambda k: self.redis.zrange(k, 0, -1),
            }[kind]
            dumped[key] = repr(read(key)).encode()
        return dumped


@contextmanager
def a_town(valkey: Valkey, of_shards: dict[str, Any] | None = None, **settings: Any) -> Iterator[Town]:
    """One that runs in a thread of its own."""
    town = Town(valkey, of_shards or {}, **settings)
    thread = threading.Thread(target=lambda: asyncio.run(town.serve()))
    thread.start()
    try:
        assert town._ready.wait(20)
        yield town
    finally:
        town.stop()
        thread.join(timeout=10)
        town.redis.close()
        town._listening.close()
    assert not thread.is_alive()
    for shard in town.shards.by_id.values():
        shard.ledger.check_integrity()
