"""What each gateway last said of itself, so that any one of them can answer for all. Written by its owner only.

A page is text of some kilobytes. One that was not renewed for a while is passed over, and dropped by who finds it so.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from sharding.client import RedisClient
from sharding.keys import KeySpace
from sharding.redis_errors import redis_errors

KEEP_S = 30.0
"""Age at which a page is no longer believed: some times the interval in which it is renewed."""


class Pages:
    """Every method raises `Unavailable` where Redis is away. `clock`: seconds since the epoch, the same everywhere."""

    def __init__(self, redis: RedisClient, keys: KeySpace, clock: Callable[[], float] = time.time) -> None:
        self._redis = redis
        self._key = keys.pages()
        self._clock = clock

    async def publish(self, name: str, page: str) -> None:
        """Replace what `name` said before."""
        with redis_errors("publish a gateway's metrics"):
            await self._redis.hset(self._key, name, json.dumps([self._clock(), page]))
            await self._redis.expire(self._key, round(10 * KEEP_S))

    async def read(self) -> dict[str, str]:
        """The pages that are fresh, by name."""
        with redis_errors("read the gateways' metrics"):
            held = await self._redis.hgetall(self._key)
            pages, old = {}, []
            for name, value in held.items():
                written_at, page = json.loads(value)
                if abs(self._clock() - written_at) <= KEEP_S:
                    pages[name if isinstance(name, str) else name.decode()] = str(page)
                else:
                    old.append(name)
            if old:
                await self._redis.hdel(self._key, *old)
        return pages
