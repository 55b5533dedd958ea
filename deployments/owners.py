"""Which shard a request goes to: the user's owner, or any shard for a caller without memory.

    a placement in the cache, owner alive    -> that; no round trip, also while Redis is away
    a placement in the directory, owner alive -> that, and into the cache
    a placement whose owner is gone or leaves -> the policy picks a live shard, the directory decides who wins
    none                                     -> the same, but only to store something: whoever asks for ids that do not
                                                exist must not fill Redis
    no shard lives                           -> to store something, `NOBODY`, see `unattended.py`

Whether a cached owner is alive is known from the heartbeats, read once a second beside the requests. While Redis is
away placements say so (`Placement.redis_away`): only then may an owner serve that cannot ask Redis itself.

A cached placement may be stale; the shard finds that out (`WrongShard`) and `owner_calls.py` asks again here. What
"gone" means: no heartbeat in Redis, or Ray said for certain that the replica ended (`ShardGone`, `certain=True`),
which is known seconds before the heartbeat runs out. A shard that merely cannot be reached keeps its users.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Protocol
from zlib import crc32

from sharding.directory import PlacementCache
from sharding.errors import RetryableError, ShardGone, Unavailable
from sharding.ids import NOBODY, Placement, ShardId, UserId
from sharding.placement import Choices, ShardReport


class PlacementDirectory(Protocol):
    """What the gateway needs of `sharding.directory.Directory`; each raises Unavailable where Redis is away."""

    async def lookup(self, user: UserId) -> Placement | None: ...

    async def remembers(self, user: UserId) -> bool: ...

    async def claim(self, user: UserId, shard: ShardId, expected: Placement | None) -> Placement: ...

    async def shards(self) -> dict[ShardId, ShardReport]: ...


class Policy(Protocol):
    """Picks shards for users without a live owner."""

    def choices(self, reports: Iterable[ShardReport]) -> Choices: ...


class Owners:
    """Resolves users to placements. One per gateway process, on one event loop."""

    def __init__(
        self,
        directory: PlacementDirectory,
        policy: Policy,
        cache: PlacementCache,
        reports_ttl_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`reports_ttl_s`: how long heartbeats read from Redis are believed (and a failure to read them)."""
        self._directory = directory
        self._policy = policy
        self._cache = cache
        self._reports_ttl_s = reports_ttl_s
        self._clock = clock
        self._reports: dict[ShardId, ShardReport] = {}
        self._choices: Choices | None = None  # made of the reports when somebody is placed
        self._read_at = -math.inf
        self._failure = Unavailable("The shards are not known yet.")
        self._failed_at = -math.inf
        self._reading = asyncio.Lock()
        self._gone: set[ShardId] = set()  # certainly ended; replica ids are never reused
        self._turn = itertools.count()
        self._reader: asyncio.Task[bool] | None = None
        self._waiting: dict[ShardId, set[asyncio.Timeout]] = {}
        self._watching: asyncio.Task[None] | None = None

    async def owner(self, user: UserId, or_nobody: bool = False) -> Placement:
        """The placement to send this user's request to; one who has none gets one. `or_nobody`: where no shard lives,
        the owner may be `NOBODY`. Raises Unavailable."""
        return await self.placed(user, or_nobody) or await self._claim(user, None, or_nobody)

    async def placed(self, user: UserId, or_nobody: bool = False) -> Placement | None:
        """As `owner`, but None for a user for whom nothing was ever stored. Raises Unavailable."""
        cached = self._cache.get(user)
        if cached is not None and cached.shard not in self._gone:
            if self._redis_is_away():
                self._read_soon()
                return replace(cached, redis_away=True)
            if not self._has_left(cached.shard):
                self._read_soon()
                return cached
        placement = await self._directory.lookup(user)
        if placement is None:  # of this model: what was told while another was served is the user's all the same
            return await self._claim(user, None, or_nobody) if await self._directory.remembers(user) else None
        if not await self._is_alive(placement.shard) or self._reports[placement.shard].leaving:
            return await self._claim(user, placement, or_nobody)
        self._cache.put(placement)
        return placement

    async def _claim(self, user: UserId, expected: Placement | None, or_nobody: bool) -> Placement:
        reports = await self.live()
        if or_nobody and all(report.leaving for report in reports.values()):
            self._cache.forget(user)
            if expected is not None and expected.shard == NOBODY:
                return expected
            return await self._directory.claim(user, NOBODY, expected)
        if self._choices is None:
            self._choices = self._policy.choices(reports.values())
        try:
            target = self._choices.take(self._gone)
        except Unavailable:
            self._choices = None  # all that were open are gone; others may be a little busier
            target = self._policy.choices(reports.values()).take(self._gone)
        placement = await self._directory.claim(user, target, expected)
        self._cache.put(placement)
        return placement

    async def any_shard(self, user: UserId | None) -> ShardId:
        """A ready shard for a caller without memory: in turns, or the same one for the same user, whose conversation
        vLLM's prefix cache may hold there. Raises Unavailable.

        While Redis is away, the shards that it named last are used.
        """
        try:
            reports = await self.live()
        except Unavailable:
            reports = self._without_gone()
        ready = sorted(shard for shard, report in reports.items() if report.ready)
        if not ready:
            raise Unavailable("No shard is ready to answer; retry when one has started.", retry_after_s=2.0)
        turn = next(self._turn) if user is None else crc32(user.encode(errors="surrogatepass"))
        return ready[turn % len(ready)]

    async def asleep(self) -> bool:
        """Whether no shard is ready. Raises Unavailable."""
        return not any(report.ready for report in (await self.live()).values())

    async def live(self, newest: bool = False) -> dict[ShardId, ShardReport]:
        """The live shards' last reports, at most `reports_ttl_s` old; `newest` asks Redis now. Raises Unavailable."""
        since = self._clock() - (0.0 if newest else self._reports_ttl_s)
        async with self._reading:  # those who waited share what the first one got, or its failure
            if self._read_at < since:
                if self._failed_at >= since:
                    raise Unavailable(self._failure.message, **self._failure.details)
                await self._read_reports()
        return self._without_gone()

    def known(self) -> dict[ShardId, ShardReport]:
        """The shards that were live when Redis last answered; asks nobody."""
        return self._without_gone()

    async def _read_reports(self) -> None:
        try:
            self._reports = await self._directory.shards()
            self._choices = None
        except Unavailable as error:
            self._failure, self._failed_at = error, self._clock()
            raise
        self._read_at = self._clock()

    def moved(self, placement: Placement) -> None:
        """The user is there now."""
        self._cache.put(placement)

    def distrust(self, shard: ShardId, user: UserId | None, error: RetryableError) -> None:
        """A call that went to `shard` because of what is cached here failed with WrongShard or ShardGone."""
        if user is not None:
            self._cache.forget(user)
        if isinstance(error, ShardGone):
            self._cache.forget_shard(shard)
            if error.details.get("certain"):
                self._gone.add(shard)

    async def reaches_redis(self) -> bool:
        """Whether Redis answers now."""
        try:
            await self.live(newest=True)
        except Unavailable:
            return False
        return True

    @asynccontextmanager
    async def watched(self, shard: ShardId) -> AsyncIterator[None]:
        """Wait for a shard, but not when its heartbeat has run out (it hangs, or cannot be reached): then ShardGone."""
        if shard == NOBODY:
            yield
            return
        try:
            async with asyncio.timeout(None) as wait:
                waiting = self._waiting.setdefault(shard, set())
                waiting.add(wait)
                if self._watching is None or self._watching.done():
                    self._watching = asyncio.create_task(self._watch())
                try:
                    yield
                finally:
                    waiting.discard(wait)
        except TimeoutError:
            if not wait.expired():
                raise
            raise ShardGone(f"Shard {shard} has stopped its heartbeat.", shard=shard, certain=False) from None

    async def _watch(self) -> None:
        """Runs while anybody waits for a shard."""
        while self._waiting:
            await asyncio.sleep(self._reports_ttl_s)
            for shard in [shard for shard, waiting in self._waiting.items() if not waiting]:
                del self._waiting[shard]
            with suppress(Unavailable):
                for shard in list(self._waiting):
                    if not await self._is_alive(shard):
                        for wait in self._waiting.pop(shard, ()):
                            wait.reschedule(0.0)

    def _redis_is_away(self) -> bool:
        return self._failed_at > self._read_at

    def _has_left(self, shard: ShardId) -> bool:
        """Whether the shard has no heartbeat or leaves, as of reports that are new enough to know."""
        report = self._reports.get(shard)
        return (report is None or report.leaving) and self._clock() - self._read_at <= 2 * self._reports_ttl_s

    def _read_soon(self) -> None:
        """Read the heartbeats beside the requests, where that was not done lately."""
        lately = self._clock() - max(self._read_at, self._failed_at) < self._reports_ttl_s
        if not lately and (self._reader is None or self._reader.done()):
            self._reader = asyncio.create_task(self.reaches_redis())

    async def _is_alive(self, shard: ShardId) -> bool:
        """Whether the shard has a heartbeat; a shard missing from old reports may be newer than they are."""
        return shard in await self.live() or shard in await self.live(newest=True)

    def _without_gone(self) -> dict[ShardId, ShardReport]:
        return {shard: report for shard, report in self._reports.items() if shard not in self._gone}
