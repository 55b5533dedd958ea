"""Which shard may move users away now, and who was moved lately. In Redis, so that it outlives whoever does it.

    <ns>:{shards:<model>}::turn      string, expires   the shard that moves users away
    <ns>:{shards:<model>}::moves     zset              user -> when their last move was begun, of the last hour

One at a time, because each plans by what the others said of themselves a heartbeat ago: two that unload at once would
send their users to the same shard. Nothing rests on it but that: a move itself is fenced (`directory.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sharding.client import RedisClient
from sharding.ids import ShardId, UserId
from sharding.keys import KeySpace
from sharding.rebalance import HOUR_S, Moved
from sharding.redis_errors import redis_errors
from sharding.scripts import script


class MoveTurns:
    """Every method raises `Unavailable` where Redis is away. `clock`: Unix time in seconds."""

    def __init__(self, redis: RedisClient, keys: KeySpace, clock: Callable[[], float] = time.time) -> None:
        self._redis = redis
        self._keys = keys
        self._lead = script(redis, "lead")
        self.clock = clock

    async def take(self, shard: ShardId, lasts_s: float) -> bool:
        """Whether it is this shard's turn; then it is for `lasts_s` from now on, however long it was to last."""
        with redis_errors("take a turn at moving users"):
            return bool(await self._lead([self._keys.turn()], [shard, max(1, round(lasts_s * 1000))]))

    async def begun(self, user: UserId) -> None:
        """The user begins to move."""
        now = self.clock()
        with redis_errors("note a move"):
            await self._redis.zadd(self._keys.moves(), {user.encode(errors="surrogatepass"): now})
            await self._redis.zremrangebyscore(self._keys.moves(), "-inf", now - HOUR_S)
            await self._redis.expire(self._keys.moves(), round(HOUR_S))

    async def lately(self) -> list[Moved]:
        """Who began to move within the last hour."""
        with redis_errors("look up who moved"):
            since = self.clock() - HOUR_S
            found: Any = await self._redis.zrangebyscore(self._keys.moves(), since, "+inf", withscores=True)
        return [Moved(UserId(user.decode(errors="surrogatepass")), at) for user, at in found]
