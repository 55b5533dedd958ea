"""What a tenant has: its entities, the owners whose memories were told under each, and whose a fact's id is.

    <ns>:{tenant:<tenant>}:seen               zset   <kind> US <name> -> when its first memory was told, in ms
    <ns>:{tenant:<tenant>}:touched            zset   … its last one
    <ns>:{tenant:<tenant>}:tags               hash   owner tag -> JSON list of owners (more than one: a collision)
    <ns>:{tenant:<tenant>}:of:<kind> US <name>  set  owners

Derived from the facts: an owner's shard registers before it stores, and unregisters after it deleted, so that at worst
an owner is named here who has nothing. Nothing of a tenant can be reached through another's keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from redis.commands.core import AsyncScript

from sharding.client import RedisClient, as_text
from sharding.fact_records import instant
from sharding.ids import UserId
from sharding.keys import KeySpace
from sharding.redis_errors import redis_errors
from sharding.scopes import SEPARATOR, Entity, owner_tag, tag_in, tenant_of
from sharding.scripts import script

SCANNED_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class EntitySeen:
    """An entity of a tenant, and when memories were told under it (ISO 8601, UTC)."""

    entity: Entity
    created_at: str
    updated_at: str


class OwnerNames(Protocol):
    """What a gateway asks: whose memories a request concerns. Each raises `Unavailable` where Redis is away."""

    async def owners_of(self, tenant: str, entity: Entity) -> list[UserId]: ...

    async def owners_by_id(self, tenant: str, id: str) -> list[UserId]: ...

    async def entities(self, tenant: str, kind: str | None = None) -> list[EntitySeen]: ...

    async def everybody(self, tenant: str, *, with_memories: bool) -> list[UserId]: ...

    async def forget(self, tenant: str) -> None: ...


class Registry(OwnerNames):
    """The registries of all tenants of one installation."""

    def __init__(self, redis: RedisClient, keys: KeySpace) -> None:
        self._redis = redis
        self._keys = keys
        self._register = script(redis, "register")
        self._unregister = script(redis, "unregister")

    async def register(self, owner: UserId, entities: Iterable[Entity], now: datetime) -> None:
        """`owner` is about to have memories told under `entities`."""
        at_ms = str(round(now.timestamp() * 1000))
        await self._change("note whose memories these are", self._register, at_ms, owner, entities)

    async def unregister(self, owner: UserId, entities: Iterable[Entity], *, empty: bool) -> None:
        """`owner` has no memory told under `entities` any more; `empty`: none at all."""
        await self._change("forget whose memories these were", self._unregister, str(int(empty)), owner, entities)

    async def owners_of(self, tenant: str, entity: Entity) -> list[UserId]:
        """The owners that have memories told under `entity`."""
        with redis_errors("find whose memories these are"):
            members = await self._redis.smembers(self._of(tenant, entity))
        return sorted(UserId(as_text(member)) for member in members)

    async def owners_by_id(self, tenant: str, id: str) -> list[UserId]:
        """The owners that may have given out this id; mostly one, none for an id that is another tenant's."""
        if (tag := tag_in(id)) is None:
            return []
        with redis_errors("find whose memory this is"):
            owners = await self._redis.hget(f"{self._keys.tenant(tenant)}:tags", tag)
        return [UserId(owner) for owner in json.loads(owners)] if owners else []

    async def entities(self, tenant: str, kind: str | None = None) -> list[EntitySeen]:
        """The tenant's entities, of one kind or all, first seen first."""
        with redis_errors("list the entities"):
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.zrange(f"{self._keys.tenant(tenant)}:seen", 0, -1, withscores=True)
                pipe.zrange(f"{self._keys.tenant(tenant)}:touched", 0, -1, withscores=True)
                seen, touched = await pipe.execute()
        last = dict(touched)
        found = [
            EntitySeen(Entity(*as_text(name).split(SEPARATOR, 1)), _instant(at_ms), _instant(last.get(name, at_ms)))
            for name, at_ms in seen
        ]
        return [one for one in found if kind in (None, one.entity.kind)]

    async def everybody(self, tenant: str, *, with_memories: bool) -> list[UserId]:
        """Every owner of a tenant that Redis knows of, found by their keys and so none is missed; or those of whom
        anything is kept that they said. Reads the names of all keys there are."""
        found: set[UserId] = set()
        with redis_errors("find a tenant's users"):
            async for key in self._redis.scan_iter(self._keys.of_tenant(tenant)[0], count=SCANNED_AT_ONCE):
                name = as_text(key)
                if not with_memories or name.endswith((":facts", ":turns", ":history", ":embeddings")):
                    found.add(self._keys.user_in(name))
        return sorted(found)

    async def forget(self, tenant: str) -> None:
        """What a tenant has beside its users' memories: this registry, sizes, limits' counts, events. The placements
        and numbers given out of its users stay: they keep old shards from writing."""
        users, *others = self._keys.of_tenant(tenant)
        with redis_errors("forget a tenant"):
            async for key in self._redis.scan_iter(users, count=SCANNED_AT_ONCE):
                if ":event:" in as_text(key):
                    await self._redis.unlink(key)
            for pattern in others:
                async for key in self._redis.scan_iter(pattern, count=SCANNED_AT_ONCE):
                    await self._redis.unlink(key)

    async def _change(
        self, intent: str, body: AsyncScript, first: str, owner: UserId, entities: Iterable[Entity]
    ) -> None:
        tenant, entities = tenant_of(owner), list(entities)
        base = self._keys.tenant(tenant)
        keys = [f"{base}:seen", f"{base}:touched", f"{base}:tags", *(self._of(tenant, entity) for entity in entities)]
        names = [SEPARATOR.join(entity) for entity in entities]
        with redis_errors(intent):
            await body(keys, [first, owner, owner_tag(owner), *names])

    def _of(self, tenant: str, entity: Entity) -> str:
        return f"{self._keys.tenant(tenant)}:of:{SEPARATOR.join(entity)}"


def _instant(at_ms: float) -> str:
    return instant(datetime.fromtimestamp(at_ms / 1000, UTC))
