"""A shard's memories become again what a full build would make of them, some time after their facts were corrected.

    every second   for each resident user: stale tokens, and for how long ─► `sharding.rebuilding.RebuildPolicy`
                   due ─► `Residents.rebuild`, one user at a time, each prefill behind waiting chats as any encode

On demand at once. What does not succeed is tried again after `AGAIN_S`; until then the memory is served as it was.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from weakref import WeakKeyDictionary

from deployments.memory_calls import RebuildCall, Rebuilt
from deployments.resident import Residents
from deployments.resident_use import ResidentUse
from sharding.errors import MemshardError
from sharding.rebuilding import RebuildPolicy
from sharding.user_memory import UserMemory, UserTable

TICK_S = 1.0
AGAIN_S = 30.0

log = logging.getLogger(__name__)


class Rebuilds:
    """Rebuilds of one shard's users, and what they cost: `counters`."""

    def __init__(
        self,
        table: UserTable,
        users: ResidentUse,
        residents: Residents,
        policy: RebuildPolicy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._table = table
        self._users = users
        self._residents = residents
        self._policy = policy
        self._clock = clock
        self._stale_since: WeakKeyDictionary[UserMemory, float] = WeakKeyDictionary()
        self._again_at: WeakKeyDictionary[UserMemory, float] = WeakKeyDictionary()
        self._one = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self.counters: Counter[str] = Counter(dict.fromkeys(("rebuilds", "rebuilt_facts"), 0))
        self.counters.update({"rebuild_tokens": 0, "rebuild_full_tokens": 0})

    def begin(self) -> None:
        """Keeps watch in the background."""
        self._task = asyncio.create_task(self._watch())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            await self.look()

    async def look(self) -> None:
        """Rebuilds those whose time has come."""
        for memory in self._table.memories():
            if not self._due(memory):
                continue
            try:
                async with self._table.use(memory.placement) as resident:
                    await self._rebuild(resident)
            except MemshardError as error:  # another shard's user by now, or the workers did not confirm
                log.warning("A memory is rebuilt later: %s", error)
            self._again_at[memory] = self._clock() + AGAIN_S

    async def on_demand(self, call: RebuildCall) -> Rebuilt:
        """Raises what `Residents.rebuild` raises."""
        async with self._users.use(call.placement) as memory:
            await self._residents.ready(memory)
            return await self._rebuild(memory)

    def stale(self) -> tuple[int, int]:
        """Stale chunks of all users, and the tokens of the facts that rebuilds would encode."""
        known = [chunks for memory in self._table.memories() if (chunks := self._residents.chunks_of(memory))]
        return sum(len(chunks.stale_ids()) for chunks in known), sum(chunks.stale_tokens for chunks in known)

    def _due(self, memory: UserMemory) -> bool:
        chunks = self._residents.chunks_of(memory)
        if chunks is None or not chunks.stale_facts:
            self._stale_since.pop(memory, None)
            self._again_at.pop(memory, None)
            return False
        now = self._clock()
        since = self._stale_since.setdefault(memory, now)
        if now < self._again_at.get(memory, now):
            return False
        return self._policy.due(chunks.stale_tokens, chunks.tokens, now - since)

    async def _rebuild(self, memory: UserMemory) -> Rebuilt:
        async with self._one:
            done = await self._residents.rebuild(memory)
        if done.facts:
            self.counters["rebuilds"] += 1
            self.counters["rebuilt_facts"] += done.facts
            self.counters["rebuild_tokens"] += done.tokens
            self.counters["rebuild_full_tokens"] += done.full_tokens
            log.info("%d facts were rebuilt, at %.0f %% of a full build", done.facts, 100 * done.share)
        return done
