"""The turns that facts were distilled from, and the events that clients poll meanwhile.

A turn is durable before its event is given out, so whichever shard owns the user can finish what another began. It is
kept with its facts, for windows and rebuilds, and deleted with the first of them that is deleted: it says the same.
An event holds ids and outcomes, no text, and is forgotten a day after its last change.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from redis.commands.core import AsyncScript

from sharding.client import RedisClient
from sharding.directory import not_owner
from sharding.ids import FactId, Placement, UserId
from sharding.keys import KeySpace
from sharding.redis_errors import redis_errors
from sharding.scripts import script
from sharding.sealing import Seal

EVENT_TTL_S = 86_400

Status = Literal["PENDING", "SUCCEEDED", "FAILED"]


@dataclass(frozen=True, slots=True)
class Turn:
    """Messages (role, text) as they were told, and what their facts are told under."""

    messages: tuple[tuple[str, str], ...]
    scopes: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    expires_on: str | None = None
    told_at: float | None = None  # seconds since 1970
    instructions: str | None = None  # the client's own, for whoever distils


@dataclass(frozen=True, slots=True)
class Event:
    """How far an add is. `results`: (fact id, "ADD", "UPDATE" or "NONE"), once it is done; `reason`: why it failed."""

    status: Status
    created_at: str
    updated_at: str
    results: Sequence[tuple[FactId, str]] = ()
    reason: str | None = None


class TurnStore:
    """Reads and fenced writes of turns. Every method raises `Unavailable` where Redis is away."""

    def __init__(self, redis: RedisClient, keys: KeySpace, seal: Seal) -> None:
        self._redis = redis
        self._keys = keys
        self._seal = seal
        self._begin = script(redis, "fence", "turn")
        self._settle = script(redis, "fence", "settle")
        self._forget = script(redis, "fence", "forget_turns")

    async def begin(self, placement: Placement, turn_id: str, turn: Turn, event: Event) -> None:
        """Keep a turn and its event. Raises `WrongShard`."""
        user = placement.user
        keys = [self._keys.turns(user), self._keys.pending(user), self._keys.event(user, turn_id)]
        sealed = self._seal.seal_text(_dumped(turn), _about(user, turn_id))
        arguments = [turn_id, sealed, _dumped(event), str(EVENT_TTL_S)]
        await self._fenced("keep a turn", self._begin, placement, keys, arguments)

    async def settle(self, placement: Placement, turn_id: str, event: Event) -> None:
        """The turn is done with; it goes with the first of its facts that is deleted. Raises `WrongShard`."""
        user = placement.user
        keys = [self._keys.pending(user), self._keys.event(user, turn_id), self._keys.mentions(user)]
        arguments = [turn_id, _dumped(event), str(EVENT_TTL_S), *(id for id, _ in event.results)]
        await self._fenced("note what became of a turn", self._settle, placement, keys, arguments)

    async def forget(self, placement: Placement, turn_ids: Sequence[str]) -> None:
        """Turns are gone, with what was still to be distilled from them. Raises `WrongShard`."""
        keys = [self._keys.turns(placement.user), self._keys.pending(placement.user)]
        await self._fenced("delete turns", self._forget, placement, keys, list(turn_ids))

    async def turn(self, user: UserId, turn_id: str) -> Turn | None:
        """The turn, or None where it was deleted."""
        with redis_errors("read a turn"):
            kept: Any = await self._redis.hget(self._keys.turns(user), turn_id)
        return None if kept is None else self._opened(user, turn_id, kept)

    async def turns(self, user: UserId) -> dict[str, Turn]:
        """All turns of a user by id."""
        with redis_errors("read a user's turns"):
            kept: dict[Any, Any] = await self._redis.hgetall(self._keys.turns(user))
        return {id.decode(): self._opened(user, id.decode(), turn) for id, turn in kept.items()}

    async def pending(self, user: UserId) -> list[str]:
        """Ids of turns that are not distilled yet."""
        with redis_errors("list a user's turns"):
            members: set[Any] = await self._redis.smembers(self._keys.pending(user))
        return sorted(member.decode() for member in members)

    async def event(self, user: UserId, turn_id: str) -> Event | None:
        """The event, or None where there is none (any more)."""
        with redis_errors("read an event"):
            kept: Any = await self._redis.get(self._keys.event(user, turn_id))
        if kept is None:
            return None
        fields = json.loads(kept)
        return Event(**{**fields, "results": tuple((FactId(id), what) for id, what in fields["results"])})

    def _opened(self, user: UserId, turn_id: str, kept: bytes) -> Turn:
        fields = json.loads(self._seal.open_text(kept.decode(), _about(user, turn_id)))
        return Turn(**{**fields, "messages": tuple((role, text) for role, text in fields["messages"])})

    async def _fenced(
        self, intent: str, body: AsyncScript, placement: Placement, keys: list[str], arguments: list[str]
    ) -> None:
        with redis_errors(intent):
            result = await body(
                [self._keys.placement(placement.user), *keys], [placement.shard, placement.epoch, *arguments]
            )
        if result is None:
            raise not_owner(placement)


def _dumped(value: Turn | Event) -> str:
    return json.dumps(asdict(value), ensure_ascii=False)


def _about(user: UserId, turn_id: str) -> str:
    return f"{user}{turn_id}:turn"
