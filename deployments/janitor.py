"""Files of users who are not this shard's any more, found and removed.

A user who leaves a living shard takes the chunks along, or they are dropped (`resident.py::Residents.left`). This is
about what a shard finds on the disk it took over: users whom another shard owns by now, and users who have no facts any
more, because those were deleted while nobody had this disk. They could not be served, their facts' ids are asked for by
nobody; they must not lie around either. Users without a living owner keep their files: this shard may be asked to take
them.
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

    async def run(self) -> None:
        """Sweeps now and every `SWEEP_S` seconds, until it is cancelled."""
        while True:
            try:
                await self.sweep()
            except MemshardError as error:
                log.warning("Files of users who left are removed later: %s", error)
            await asyncio.sleep(SWEEP_S)

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

    async def _has_facts(self, key: str, user: UserId) -> bool:
        if key not in self._with_facts and await self._store.load(user):
            self._with_facts.add(key)
        return key in self._with_facts
