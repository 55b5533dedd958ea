"""A whole shard with the engine that has no model, on a real Redis, with tiers: answers tell which facts were read."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from deployments.deterministic import MAX_MODEL_LEN, NAME, TOKEN_BYTES, open_shard
from deployments.memory_calls import AddCall, DeleteCall
from deployments.messages import ChatCall, ChatDelta, ChatFinished, Sampling
from deployments.settings import ShardSettings
from deployments.shard import Shard
from sharding.directory import Directory
from sharding.facts import FactStore
from sharding.ids import FactId, Placement, ShardId, UserId
from sharding.keys import KeySpace
from sharding.lease import Lease
from sharding.sealing import Seal

KEYS = KeySpace("test", NAME)
DEVICE_TOKENS = 120  # of them, a fact takes about ten


class TieredShard:
    """A shard under a name, and how to talk to it."""

    def __init__(self, me: str, shard: Shard, directory: Directory) -> None:
        self.me, self.shard, self.directory = ShardId(me), shard, directory

    async def owns(self, user: str, after: Placement | None = None) -> Placement:
        return await self.directory.claim(UserId(user), self.me, after)

    async def told(self, placement: Placement, *texts: str) -> list[FactId]:
        """Stored, encoded and written to every tier of files."""
        added = await self.shard.ask(AddCall(uuid.uuid4().hex, placement, texts))
        await self.shard.encoder.settled(placement.user)
        await self.shard.tiers.writer.written()
        return [fact.fact.id for fact in added]

    async def asked(self, placement: Placement, question: str, top_k: int = 10) -> tuple[list[str], ChatFinished]:
        """The marks of the facts that were read, and what the shard says of it."""
        call = ChatCall("r", placement, ({"role": "user", "content": question},), Sampling(), "inject", top_k)
        events = [event async for event in self.shard.chat(call)]
        finished = events[-1]
        assert isinstance(finished, ChatFinished)
        return "".join(event.text for event in events if isinstance(event, ChatDelta)).split(" ")[2:], finished

    async def deleted(self, placement: Placement, fact: FactId) -> None:
        await self.shard.ask(DeleteCall("r", placement, fact))


@asynccontextmanager
async def tiered_shard(me: str, redis: Redis, url: str, folder: Path, **more: Any) -> AsyncIterator[TieredShard]:
    """Shards with the same `folder` share a path, and find its local directories one after the other."""
    nowhere = Path("/nonexistent")
    settings = ShardSettings(
        "m",
        nowhere,
        nowhere,
        url,
        "test",
        1,
        threads=1,
        max_model_len=MAX_MODEL_LEN,
        kv_cache_bytes=1,
        window_facts=2,
        max_fact_tokens=99,
        max_requests_in_flight=9,
        heartbeat_interval_s=1.0,
        heartbeat_ttl_s=60.0,
        redis_grace_s=1.0,
        **{
            "chunk_device_bytes": DEVICE_TOKENS * TOKEN_BYTES,
            "chunk_host_bytes": 0,
            "chunk_disk_dir": folder / "disk",
            "chunk_disk_bytes": 1 << 30,
            "chunk_load_deadline_s": 20.0,
            **more,
        },
    )
    lease = Lease(60.0, 60.0)
    lease.acknowledged(time.monotonic())
    directory = Directory(redis, KEYS)
    shard = await open_shard(
        settings, ShardId(me), directory, FactStore(redis, KEYS, Seal(settings.encryption_key)), lease
    )
    try:
        yield TieredShard(me, shard, directory)
        shard.tiers.check_integrity()
    finally:
        shard.close()


def chunk_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*.0") if path.is_file()]
