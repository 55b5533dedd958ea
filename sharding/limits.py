"""How much a minute, and a tenant, has room for; counted in Redis, so that it holds over all gateways and shards.

<ns>:{limit:<what>}:<minute>          int     what was counted in this minute since 1970
<ns>:{tenant:<tenant>}:sizes          hash    owner -> bytes of its facts
<ns>:{tenant:<tenant>}:bytes          int     their sum
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from sharding.client import RedisClient
from sharding.errors import TooLarge
from sharding.ids import UserId
from sharding.keys import KeySpace
from sharding.redis_errors import redis_errors
from sharding.scopes import tenant_of
from sharding.scripts import script

MINUTE_S = 60


class Taken(NamedTuple):
    """`allowed`: there was room. `left` of `limit` until the minute ends, in `reset_s`."""

    allowed: bool
    limit: int
    left: int
    reset_s: float


class CountsMinutes(Protocol):
    """What a gateway asks. Raises `Unavailable` where Redis is away."""

    async def take(self, what: str, cost: int, limit: int) -> Taken: ...


class Minutes(CountsMinutes):
    """Counts by the minute of the clock."""

    def __init__(self, redis: RedisClient, keys: KeySpace, clock: Callable[[], float] = time.time) -> None:
        self._keys = keys
        self._clock = clock
        self._take = script(redis, "take")

    async def take(self, what: str, cost: int, limit: int) -> Taken:
        """Counts `cost` of `what`, if there is room; a cost of 0 asks whether there is any."""
        now = self._clock()
        minute = int(now // MINUTE_S)
        with redis_errors("count requests"):
            allowed, used = await self._take([self._keys.limit(what, minute)], [cost, limit, 2 * MINUTE_S])
        return Taken(bool(allowed), limit, max(0, limit - int(used)), (minute + 1) * MINUTE_S - now)


class TenantBytes:
    """How many bytes each tenant's facts have. `limit`: how many it may have."""

    def __init__(self, redis: RedisClient, keys: KeySpace, limit: int) -> None:
        self._keys = keys
        self._limit = limit
        self._size = script(redis, "size")

    async def note(self, owner: UserId, size: int) -> None:
        """An owner's facts have `size` bytes. Raises `TooLarge` where its tenant has no room for what came; nothing is
        noted then."""
        base = self._keys.tenant(tenant_of(owner))
        with redis_errors("count bytes"):
            noted, total = await self._size([f"{base}:sizes", f"{base}:bytes"], [owner, size, self._limit])
        if not noted:
            raise TooLarge(
                f"Your memories take {total} of {self._limit} bytes; this does not fit. Delete some.",
                code="quota_exceeded",
                limit_bytes=self._limit,
                used_bytes=int(total),
            )
