"""How many bytes of facts a user and a tenant may have; checked under the owner's write lock, before it is stored."""

from __future__ import annotations

import json
from collections.abc import Iterable

from deployments.settings import ShardSettings
from sharding.errors import TooLarge
from sharding.fact_records import Fact, Told
from sharding.facts import FactStore
from sharding.limits import TenantBytes
from sharding.memory import UserMemory


class Quotas:
    """`user_bytes` and `tenant` are None where there is no limit."""

    def __init__(self, user_bytes: int | None, tenant: TenantBytes | None) -> None:
        self._user_bytes = user_bytes
        self._tenant = tenant

    async def admit(self, memory: UserMemory, coming: Iterable[Fact | Told], going: Iterable[Fact] = ()) -> None:
        """What is `coming` is about to be stored, in the place of what is `going`. Raises `TooLarge`."""
        if self._user_bytes is None and self._tenant is None:
            return
        grows = size_of(coming) - size_of(going)
        size = size_of(memory.facts) + grows
        if grows > 0 and self._user_bytes is not None and size > self._user_bytes:
            raise TooLarge(
                f"This user's memories would take {size} of {self._user_bytes} bytes. Delete some.",
                code="quota_exceeded",
                limit_bytes=self._user_bytes,
                used_bytes=size - grows,
            )
        if self._tenant is not None:
            await self._tenant.note(memory.placement.user, size)

    async def deleted(self, memory: UserMemory) -> None:
        """Facts are gone from `memory`."""
        if self._tenant is not None:
            await self._tenant.note(memory.placement.user, size_of(memory.facts))


def quotas_of(settings: ShardSettings, store: FactStore) -> Quotas:
    """As the settings say."""
    limit = settings.tenant_bytes
    return Quotas(settings.user_bytes, None if limit is None else store.tenant_bytes(limit))


def size_of(facts: Iterable[Fact | Told]) -> int:
    """Bytes of texts and metadata."""
    return sum(len(fact.text.encode()) + len(json.dumps(dict(fact.metadata))) for fact in facts)
