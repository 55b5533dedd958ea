"""What is here of users who are not this shard's any more, found and removed.

A user who leaves a living shard takes the chunks along, or they are dropped (`resident.py::Residents.left`). This is
about what a shard finds on the disk it took over: users whom another shard owns by now, and users who have no facts any
more, because those were deleted while nobody had this disk. They could not be served, their facts' ids are asked for by
nobody; they must not lie around either. Users without a living owner keep their files: this shard may be asked to take
them.

And it is about who is in a shard's memory when its lease has run out: others may own them since, and delete what they
said. A shard that Redis and a gateway can reach is asked before a deletion is answered (`owner_calls.py::OwnerCalls.
forgetting`); one that nobody could reach does it here, as soon as it reaches Redis again.
"""

from __future__ import annotations

import asyncio
import logging

from connector.files import owner_key
from connector.tiers import Tiers
from deployments.resident import Residents
from sharding.directory import Directory
from sharding.errors import MemshardError
from sharding.facts import FactStore
from sharding.ids import ShardId, UserId
from sharding.user_memory import UserTable

SWEEP_S = 300.0
SHARED_SWEEP_S = 6 * 3600.0
"""A look through all that shards share may be long, and dear where it is an object store."""
LOOK_S = 2.0
"""How often it is looked whether the lease ran out."""

log = logging.getLogger(__name__)


class Janitor:
    """Sweeps the tiers that are one shard's alone; `run` it in a task."""

    def __init__(
        self, me: ShardId, tiers: Tiers, residents: Residents, table: UserTable, directory: Directory, store: FactStore
    ) -> None:
        self._me = me
        self._tiers = tiers
        self._residents = residents
        self._table = table
        self._directory = directory
        self._store = store
        self._with_facts: set[str] = set()  # owner keys; asked once
        self._term = table.lease.term

    async def run(self) -> None:
        """Sweeps now, every `SWEEP_S` seconds, and after each lapse of the lease, until it is cancelled."""
        now = asyncio.get_running_loop().time
        due, shared_due = 0.0, now() + SWEEP_S
        while True:
            try:
                if self._table.lease.valid():
                    await self.leave_strangers()
                if now() >= due:
                    due = now() + SWEEP_S
                    await self.sweep()
                if now() >= shared_due:
                    shared_due = now() + SHARED_SWEEP_S
                    await self.sweep_shared()
            except (MemshardError, OSError) as error:
                log.warning("What is here of users who left is removed later: %s", error)
            await asyncio.sleep(LOOK_S)

    async def leave_strangers(self) -> None:
        """Where the lease ran out meanwhile: forgets whoever became another shard's. Raises `Unavailable`,
        `EngineFailed`."""
        term = self._table.lease.term
        if term == self._term:
            return
        for memory in self._table.memories():
            user = memory.placement.user
            if await self._directory.lookup(user) != memory.placement:
                self._table.drop(memory.placement)
                await self._residents.left(user)
        self._term = term

    async def sweep(self) -> None:
        """Removes the files of users who are another living shard's, or have no facts. Raises `Unavailable`,
        `EngineFailed`."""
        for tier in self._tiers.files:
            if not tier.exclusive:
                continue
            here = {owner_key(memory.placement.user) for memory in self._table.memories()}
            owners = {key: UserId(owner) for key, owner in (await tier.owners()).items() if key not in here}
            alive = await self._directory.shards() if owners else {}
            for key, user in owners.items():
                placement = await self._directory.lookup(user)
                elsewhere = placement is not None and placement.shard != self._me and placement.shard in alive
                if user not in self._table and (elsewhere or not await self._has_facts(key, user)):
                    await self._residents.left(user)

    async def sweep_shared(self) -> None:
        """Removes the files that shards share of users of whom nothing is kept: a deletion that nobody sent again after
        it had failed half-way left them. One of the living shards does it for all. Raises `Unavailable`, OSError."""
        if min(await self._directory.shards(), default=self._me) != self._me:
            return
        for tier in self._tiers.files:
            if not tier.exclusive:
                for owner in (await tier.everybody()).values():
                    if not await self._directory.remembers(UserId(owner)):
                        await tier.purge(owner)

    async def _has_facts(self, key: str, user: UserId) -> bool:
        if key not in self._with_facts and await self._store.load(user):
            self._with_facts.add(key)
        return key in self._with_facts
