"""What was deleted leaves Redis' append-only file only when that is rewritten; this asks for it.

At most once in `every_s`, at once where none was asked for lately: a rewrite is a fork and one write of everything. A
Redis without such a file is left alone; one that does not let us look or ask is its operator's matter, and said so in
the log. Snapshots and copies that an operator takes are beyond this.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Any

from redis.asyncio import RedisCluster
from redis.exceptions import RedisError

from sharding.client import RedisClient

EVERY_S = 300.0

log = logging.getLogger(__name__)


class AppendLog:
    """The append-only file of one Redis."""

    def __init__(self, redis: RedisClient, every_s: float = EVERY_S) -> None:
        self._redis = redis
        self._every_s = every_s
        clustered = isinstance(redis, RedisCluster)
        self._everywhere: dict[str, Any] = {"target_nodes": RedisCluster.PRIMARIES} if clustered else {}
        self._asked_at = -math.inf
        self._task: asyncio.Task[None] | None = None

    def deleted(self) -> None:
        """Something was deleted: have the file rewritten, soon."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._rewrite())

    async def settled(self) -> None:
        """Returns when no rewrite is still to be asked for."""
        if self._task is not None:
            await self._task

    async def _rewrite(self) -> None:
        now = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(max(0.0, self._asked_at + self._every_s - now()))
            self._asked_at = now()
            try:
                told = await self._redis.info("persistence", **self._everywhere)
                servers = list(told.values()) if self._everywhere else [told]
                if not any(server.get("aof_enabled") for server in servers):
                    return
                # One that runs began before the deletion.
                if not any(server.get("aof_rewrite_in_progress") for server in servers):
                    await self._redis.bgrewriteaof(**self._everywhere)
                    return
            except (RedisError, OSError) as error:
                log.warning("Redis was not asked to rewrite its append-only file: %s", error)
                return
