"""Who owns whom, and which shards are alive. The truth is in Redis; every change is one Lua script.

Works on one server, on Redis Cluster and through Sentinel (`client.py`): a script's keys lie in one slot. Refuses to
change a placement that is not the caller's any more, so an epoch only grows and a user has at most one owner. What an
owner writes is fenced by the same epoch in `facts.py`. `PlacementCache` beside it is what a gateway asks first: it may
be stale, the shard's epoch check (`user_memory.py`) finds that out.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from redis.asyncio import RedisCluster

from sharding.client import RedisClient, as_text
from sharding.errors import WrongShard
from sharding.ids import Placement, ShardId, UserId
from sharding.keys import KeySpace
from sharding.placement import ShardReport
from sharding.redis_errors import redis_errors
from sharding.scripts import script

__all__ = ["Directory", "Entry", "PlacementCache", "ShardReport", "Usage"]

VERDICT_TTL_S = 90 * 24 * 3600

log = logging.getLogger(__name__)

NOTES_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Usage:
    """What an owner says of a user from time to time; seconds to minutes old, and for decisions that may be late."""

    tier: str  # the fastest tier that holds KV of the user, "text" where none does
    bytes: int  # of KV
    used_at_s: float  # last served, in Unix time


@dataclass(frozen=True, slots=True)
class Entry:
    """All that the directory keeps of a user. `placement` is None while nobody owns them."""

    placement: Placement | None
    usage: Usage | None


class Directory:
    """Placements and heartbeats of one `KeySpace`. Every method raises `Unavailable` where Redis is away."""

    def __init__(self, redis: RedisClient, keys: KeySpace) -> None:
        self._redis = redis
        self._keys = keys
        self._claim = script(redis, "claim")
        self._switch = script(redis, "switch")
        self._release = script(redis, "release")
        self._beat = script(redis, "beat")
        self._prune = script(redis, "prune")
        self._note = script(redis, "fence", "note")

    async def lookup(self, user: UserId) -> Placement | None:
        """The placement that stands, or None for a user without an owner. One round trip."""
        with redis_errors("look up a user's shard"):
            shard, epoch = await self._redis.hmget(self._keys.placement(user), ["shard", "epoch"])
        if shard is None or epoch is None:
            return None
        return Placement(user, ShardId(as_text(shard)), int(epoch))

    async def remembers(self, user: UserId) -> bool:
        """Whether anything that the user said is kept, also where nobody owns it: another model was served then."""
        with redis_errors("look for a user's memories"):
            return bool(await self._redis.exists(self._keys.facts(user), self._keys.turns(user)))

    async def entry(self, user: UserId) -> Entry | None:
        """Placement and usage, or None for a user who never had an owner. One round trip."""
        with redis_errors("look up a user"):
            fields: list[Any] = await self._redis.hmget(
                self._keys.placement(user), ["shard", "epoch", "tier", "bytes", "used"]
            )
        shard, epoch, tier, size, used = fields
        if epoch is None:
            return None
        placement = None if shard is None else Placement(user, ShardId(as_text(shard)), int(epoch))
        return Entry(placement, Usage(as_text(tier), int(size), float(used)) if tier is not None else None)

    async def note(self, usages: Iterable[tuple[Placement, Usage]]) -> None:
        """Keep what an owner says of its users; of those it owns no longer, nothing is changed."""
        with redis_errors("note what users take"):
            told = list(usages)
            for first in range(0, len(told), NOTES_AT_ONCE):
                await asyncio.gather(*(self._note_one(*one) for one in told[first : first + NOTES_AT_ONCE]))

    async def _note_one(self, placement: Placement, usage: Usage) -> None:
        arguments: list[str | int | float] = [placement.shard, placement.epoch]
        arguments += [usage.tier, usage.bytes, round(usage.used_at_s)]
        await self._note([self._keys.placement(placement.user)], arguments)

    async def claim(self, user: UserId, shard: ShardId, expected: Placement | None) -> Placement:
        """Make `shard` the owner, under the next epoch, if the user has none or the owner is `expected` (a dead one).

        Returns the placement that stands afterwards: compare its shard to see who won.
        """
        arguments: list[str | int] = [shard, expected.shard, expected.epoch] if expected else [shard, "", 0]
        with redis_errors("claim a user"):
            owner, epoch = await self._claim([self._keys.placement(user)], arguments)
        return Placement(user, ShardId(as_text(owner)), int(epoch))

    async def switch(self, placement: Placement, target: ShardId) -> Placement:
        """Hand the user to `target` under the next epoch. Raises `WrongShard` if `placement` no longer stands."""
        epoch = placement.epoch + 1
        arguments: list[str | int] = [placement.shard, placement.epoch, target, epoch]
        with redis_errors("move a user"):
            switched = await self._switch([self._keys.placement(placement.user)], arguments)
        if switched is None:
            raise not_owner(placement)
        return Placement(placement.user, target, epoch)

    async def release(self, placement: Placement) -> None:
        """Leave the user without an owner; the epoch is kept. Does nothing if `placement` no longer stands."""
        with redis_errors("release a user"):
            await self._release([self._keys.placement(placement.user)], [placement.shard, placement.epoch])

    async def heartbeat(self, report: str | bytes, shard: ShardId, ttl_s: float) -> None:
        """Publish `report` (a `ShardReport` as JSON); the shard counts as alive for `ttl_s` from now."""
        keys = [self._keys.shards(), self._keys.shard(shard), self._keys.beating(), self._keys.settling()]
        arguments: list[str | bytes | int] = [shard, report, max(1, round(ttl_s * 1000))]
        with redis_errors("publish a heartbeat"):
            await self._beat(keys, arguments)

    async def histories(self) -> frozenset[str]:
        """Names of the histories of writes that Redis continues, one a primary. Another value than before means a
        fail-over, a restart or a restored backup: what was acknowledged before may be lost, placements included."""
        with redis_errors("ask for its history"):
            if isinstance(self._redis, RedisCluster):
                told: Any = await self._redis.info("replication", target_nodes=RedisCluster.PRIMARIES)
                primaries = told.values() if "master_replid" not in told else [told]
            else:
                primaries = [await self._redis.info("replication")]
        return frozenset(str(primary.get("master_replid", "")) for primary in primaries)

    async def shards(self) -> dict[ShardId, ShardReport]:
        """The live shards by id. Those whose heartbeat ran out are forgotten on the way.

        After Redis was away for longer than heartbeats last, all of them have run out, and tell nothing: until they are
        whole again, a shard without one is still named, as not `ready`.
        """
        with redis_errors("list the shards"):
            ids = [ShardId(as_text(member)) for member in sorted(await self._redis.smembers(self._keys.shards()))]
            if not ids:
                return {}
            keys = [self._keys.beating(), self._keys.settling(), *map(self._keys.shard, ids)]
            beating, settling, *raw = await self._redis.mget(keys)
            whole = beating is not None and settling is None
            expired = [id for id, report in zip(ids, raw, strict=True) if report is None]
            if expired and whole:
                await self._prune([self._keys.shards(), *map(self._keys.shard, expired)], expired)
        found = {id: _parse_report(id, json) for id, json in zip(ids, raw, strict=True) if json}
        if not whole:
            found |= {id: _silent(id, self._keys.model) for id in expired}
        return {id: report for id, report in found.items() if report is not None}

    async def retire(self, shard: ShardId) -> None:
        """Remove a shard that shuts down cleanly, without waiting for its heartbeat to run out."""
        with redis_errors("retire a shard"):
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.srem(self._keys.shards(), shard)
                pipe.delete(self._keys.shard(shard))
                await pipe.execute()

    async def verdict(self, name: str) -> str | None:
        """What `keep_verdict` kept under `name`, if that was not too long ago."""
        with redis_errors("look up what is known of the model"):
            found = await self._redis.get(self._keys.verdict(name))
        return None if found is None else as_text(found)

    async def keep_verdict(self, name: str, told: str) -> None:
        """Keep what a shard found out about the model, for those that start later: derived, and kept 90 days."""
        with redis_errors("keep what is known of the model"):
            await self._redis.set(self._keys.verdict(name), told, ex=VERDICT_TTL_S)


class PlacementCache:
    """The last known placements, least recently used dropped beyond `capacity` users."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._placements: OrderedDict[UserId, Placement] = OrderedDict()

    def __len__(self) -> int:
        return len(self._placements)

    def get(self, user: UserId) -> Placement | None:
        placement = self._placements.get(user)
        if placement is not None:
            self._placements.move_to_end(user)
        return placement

    def put(self, placement: Placement) -> None:
        """Remember `placement`, unless a newer epoch is known: answers may arrive out of order."""
        held = self._placements.get(placement.user)
        if held is None or held.epoch <= placement.epoch:
            self._placements[placement.user] = placement
        self._placements.move_to_end(placement.user)
        if len(self._placements) > self._capacity:
            self._placements.popitem(last=False)

    def forget(self, user: UserId) -> None:
        self._placements.pop(user, None)

    def forget_shard(self, shard: ShardId) -> None:
        """Forget every user of a shard that is gone."""
        for user in [user for user, placement in self._placements.items() if placement.shard == shard]:
            del self._placements[user]


def not_owner(placement: Placement) -> WrongShard:
    """The error for a placement that does not stand (any more)."""
    return WrongShard(
        f"Shard {placement.shard} does not own this user under epoch {placement.epoch}; ask the directory again.",
        shard=placement.shard,
        epoch=placement.epoch,
    )


def _silent(shard: ShardId, model: str) -> ShardReport:
    """Of a shard that may live."""
    return ShardReport(shard=shard, model=model, ready=False, free_bytes=0, users=0, requests_in_flight=0)


def _parse_report(shard: ShardId, json: bytes | str) -> ShardReport | None:
    try:
        return ShardReport.model_validate_json(json)
    except ValidationError as error:
        # One shard of another version must not hide all the others.
        log.warning("The report of shard %s is not readable and is left out: %s", shard, error)
        return None
