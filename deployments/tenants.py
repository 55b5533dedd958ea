"""One call that deletes all of a tenant: its users' memories on every shard and in every file, its keys, its counts.

    other keys revoked ─► each user, as `Memories.forget_owner` ─► the caller's key ─► a pause, in which every gateway
    comes to know ─► whoever wrote meanwhile once more ─► registry and counts ─► the answer

A failure on the way leaves the rest of it to be done by the same call again; only where the caller's own key is gone by
then does that need another one. Refused: a name that is none, and another tenant than the key's.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from deployments import access
from deployments.audit import audit_tenant
from deployments.callers import Caller
from deployments.memories import Memories
from sharding.api_keys import KnowsKeys
from sharding.errors import InvalidRequest, NotFound, Unavailable
from sharding.ids import UserId
from sharding.registry import OwnerNames
from sharding.scopes import TENANT

OWNERS_AT_ONCE = 8
MOST_TIMES = 5
"""How often users are looked for again who were written to meanwhile."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What there was of a tenant."""

    users: int
    memories: int
    keys: int


class Tenants:
    """One a gateway."""

    def __init__(self, memories: Memories, names: OwnerNames, keys: KnowsKeys) -> None:
        self._memories = memories
        self._names = names
        self._keys = keys

    async def forget(self, caller: Caller, tenant: str) -> Forgotten:
        """Everything of a tenant is gone when this returns. Raises `InvalidRequest`, `NotFound`, `Unavailable`."""
        if not TENANT.fullmatch(tenant):
            raise InvalidRequest(
                "A deletion must name one tenant: 1 to 64 of the characters a-z, A-Z, 0-9, '.', '_' and '-'.",
                field="tenant",
            )
        if caller.key_id is not None and caller.tenant != tenant:
            raise NotFound("This key is of no such tenant.", field="tenant")
        keys = await self._keys.revoke_all(tenant, but=caller.key_id)
        owners = await self._names.everybody(tenant, with_memories=False)
        users = set(await self._names.everybody(tenant, with_memories=True))
        memories = await self._forget_all(caller, owners)
        keys += await self._keys.revoke_all(tenant)
        if keys:
            await asyncio.sleep(access.CACHE_S)  # until then another gateway may take one of them
        for _ in range(MOST_TIMES):
            if not (late := await self._names.everybody(tenant, with_memories=True)):
                break
            users.update(late)
            memories += await self._forget_all(caller, late)
        else:
            raise Unavailable("This tenant is still written to; delete it again.", retry_after_s=access.CACHE_S)
        await self._names.forget(tenant)
        gone = Forgotten(len(users), memories, keys)
        audit_tenant(caller, "forget_tenant", tenant)
        return gone

    async def _forget_all(self, caller: Caller, owners: list[UserId]) -> int:
        gate = asyncio.Semaphore(OWNERS_AT_ONCE)

        async def one(owner: UserId) -> int:
            async with gate:
                return await self._memories.forget_known_owner(caller, owner)

        return sum(await asyncio.gather(*(one(owner) for owner in owners)))
