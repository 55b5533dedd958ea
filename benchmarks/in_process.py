"""A shard with the real engine in this process: for benchmarks of what lies below HTTP.

Opened as a replica opens its own (`deployments/shard_start.py::open_shard`), on an embedded Redis in a temporary
directory and with a lease that does not end. The engine computes on one core, this process on the others.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster import models, processes
from cluster.embedded_redis import EmbeddedRedis
from cluster.settings import GIB, Settings
from deployments.settings import ShardSettings
from sharding.client import connect
from sharding.directory import Directory
from sharding.facts import FactStore
from sharding.ids import Placement, ShardId, UserId
from sharding.keys import KeySpace
from sharding.lease import Lease

if TYPE_CHECKING:
    from deployments.shard import Shard

ME = ShardId("bench")
FOR_EVER_S = 1e9


class OpenShard:
    """The shard, the name of its model and its window, and a way to make users."""

    def __init__(self, me: ShardId, shard: Shard, model: str, window_facts: int, directory: Directory) -> None:
        self.me = me
        self.shard = shard
        self.model = model
        self.window_facts = window_facts
        self._directory = directory

    async def owner_of(self, user: str) -> Placement:
        """A user of this shard."""
        return await self._directory.claim(UserId(user), self.me, None)


@asynccontextmanager
async def shard_in_process(model: Path | None, **sizes: Any) -> AsyncIterator[OpenShard]:
    """`sizes` are fields of `ShardSettings`. Raises `StartupError`."""
    async with shards_in_process(model, {ME: max(os.sched_getaffinity(0))}, **sizes) as (home,):
        yield home


@asynccontextmanager
async def shards_in_process(
    model: Path | None, cores: Mapping[ShardId, int], **sizes: Any
) -> AsyncIterator[Sequence[OpenShard]]:
    """As many shards as there are names, each with its engine on the core that is given, where the environment does not
    say otherwise."""
    settings = Settings.from_environment(model=model)
    model_path = models.prepare_language_model(settings)
    os.environ.update(models.OFFLINE)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    processes.adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="memshard-bench-") as scratch, EmbeddedRedis(Path(scratch)) as server:
        server.wait_ready()
        name = models.model_name(settings)
        async with connect(server.url) as redis:
            keys = KeySpace("bench", name)
            directory, store = Directory(redis, keys), FactStore(redis, keys)
            shard_settings = ShardSettings(
                model=name,
                model_path=model_path,
                embedding_path=models.embedding_model(settings),
                redis_url=server.url,
                namespace=keys.namespace,
                shards=1,
                threads=1,
                max_model_len=settings.max_model_len,
                kv_cache_bytes=settings.kv_cache_bytes,
                chunk_device_bytes=GIB,
                window_facts=settings.window_facts,
                max_fact_tokens=settings.max_fact_tokens,
                max_requests_in_flight=settings.max_requests_in_flight,
                heartbeat_interval_s=settings.heartbeat_interval_s,
                heartbeat_ttl_s=settings.heartbeat_ttl_s,
                redis_grace_s=settings.redis_grace_s,
                **sizes,
            )
            homes: list[OpenShard] = []
            try:
                for me, core in cores.items():
                    shard = await _opened(shard_settings, me, core, directory, store)
                    homes.append(OpenShard(me, shard, name, settings.window_facts, directory))
                yield homes
            finally:
                for home in homes:
                    home.shard.close()
                processes.end_descendants()


async def _opened(settings: ShardSettings, me: ShardId, core: int, directory: Directory, store: FactStore) -> Shard:
    given = os.environ.get("VLLM_CPU_OMP_THREADS_BIND")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", str(core))
    from deployments.shard_start import open_shard  # imports vLLM, which reads its environment then

    lease = Lease(FOR_EVER_S, FOR_EVER_S)
    lease.acknowledged(time.monotonic())
    try:
        return await _quietly(open_shard, settings, me, directory, store, lease)
    finally:
        if given is None:
            del os.environ["VLLM_CPU_OMP_THREADS_BIND"]


async def _quietly(start: Callable[..., Awaitable[Shard]], *arguments: Any) -> Shard:
    """Starts it with its warnings, and those of the processes that it starts, for their whole life, going nowhere: the
    table is what a benchmark prints. What an error says is in the exception."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        return await start(*arguments)
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
