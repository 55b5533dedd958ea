"""A user's facts as Redis keeps them: durable, deduplicated, in order, versioned, and writable by the owner only.

Every write carries the caller's placement and is fenced inside its Lua script: a shard that lost the user gets
`WrongShard` and has changed nothing. What a process holds of these facts is `user_memory.py`'s.

Repeating a call whose answer was lost gives the same result, except `delete`, which then finds nothing. An `append` of
the same `turn_id` is the same call, whichever shard repeats it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Literal

from redis.commands.core import AsyncScript

from sharding.append_log import AppendLog
from sharding.client import RedisClient
from sharding.directory import not_owner
from sharding.errors import Conflict, NotFound
from sharding.fact_records import Fact, Told, dump_fact, instant, load_fact, text_hash
from sharding.ids import FactId, Placement, UserId
from sharding.keys import KeySpace
from sharding.limits import TenantBytes
from sharding.redis_errors import redis_errors
from sharding.registry import Registry
from sharding.scopes import new_id
from sharding.scripts import script
from sharding.sealing import Seal
from sharding.turns import TurnStore

__all__ = ["AddEvent", "Fact", "FactStore", "Told", "text_hash"]

AddEvent = Literal["ADD", "NONE"]

EMBEDDINGS_A_SCRIPT = 512  # bounds how long one script keeps Redis from others: about 1 MB of vectors
DELETIONS_A_SCRIPT = 512
VERSIONS_KEPT = 100  # of one fact, beside the one that stands


class FactStore:
    """Reads and fenced writes of facts. Every method raises `Unavailable` where Redis is away."""

    def __init__(self, redis: RedisClient, keys: KeySpace, seal: Seal | None = None) -> None:
        """`seal`: how what people said is encrypted; None keeps it as it is."""
        self.registry = Registry(redis, keys)
        self.log = AppendLog(redis)
        self._seal = seal or Seal(None)
        self.turns = TurnStore(redis, keys, self._seal)
        self._redis = redis
        self._keys = keys
        self._append = script(redis, "fence", "append")
        self._embed = script(redis, "fence", "embed")
        self._update = script(redis, "fence", "update")
        self._delete = script(redis, "fence", "delete")
        self._delete_all = script(redis, "fence", "delete_all")
        self._feedback = script(redis, "fence", "feedback")

    def tenant_bytes(self, limit: int) -> TenantBytes:
        """The bytes of each tenant's facts, of which it may have `limit`."""
        return TenantBytes(self._redis, self._keys, limit)

    async def append(
        self, placement: Placement, texts: Sequence[str | Told], turn_id: str, now: datetime
    ) -> list[tuple[Fact, AddEvent]]:
        """Store the texts of one turn, all or none; for each, in order, the fact that stands and whether it is new.

        A text that the user has already, or that came earlier in `texts`, gives "NONE" and the older fact.
        `turn_id` names this call and no other.
        `now` is timezone-aware. When this returns, the facts are as durable as Redis makes them.
        """
        user = placement.user
        at = instant(now)
        arguments: list[str | bytes] = []
        for one in texts:
            told = Told(one) if isinstance(one, str) else one
            id, digest = new_id(user), text_hash(told.text)
            fact = Fact(
                id=id,
                user=user,
                text=told.text,
                text_hash=digest,
                turn_id=turn_id,
                seq=0,
                version=1,
                created_at=at,
                updated_at=at,
                role=told.role,
                scopes=told.scopes,
                metadata=told.metadata,
                expires_on=told.expires_on,
            )
            arguments += [self._seal.hash(digest), id, dump_fact(fact, self._seal)]
        keys = [self._keys.facts(user), self._keys.order(user), self._keys.hashes(user), self._keys.seq(user)]
        outcomes = await self._fenced("store facts", self._append, placement, keys, arguments)
        return [
            (load_fact(user, record, int(seq), self._seal), "ADD" if added else "NONE")
            for added, seq, record in outcomes
        ]

    async def load(self, user: UserId) -> list[Fact]:
        """All facts of a user in seq order, with embeddings where there are any. One round trip."""
        with redis_errors("load a user's facts"):
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.hgetall(self._keys.facts(user))
                pipe.zrange(self._keys.order(user), 0, -1, withscores=True)
                pipe.hgetall(self._keys.embeddings(user))
                records, order, embeddings = await pipe.execute()
        facts = [load_fact(user, records[id], int(seq), self._seal) for id, seq in order]
        return [replace(fact, embedding=self._opened(fact, embeddings.get(fact.id.encode()))) for fact in facts]

    async def put_embeddings(self, placement: Placement, embeddings: Mapping[FactId, bytes]) -> None:
        """Keep embeddings (as `UserMemory` reads them) by fact id; ids that no longer exist are passed over."""
        keys = [self._keys.facts(placement.user), self._keys.embeddings(placement.user)]
        user = placement.user
        flat = [part for id, vector in embeddings.items() for part in (id, self._seal.seal(vector, _vector(user, id)))]
        for start in range(0, len(flat), 2 * EMBEDDINGS_A_SCRIPT):
            some = flat[start : start + 2 * EMBEDDINGS_A_SCRIPT]
            await self._fenced("store embeddings", self._embed, placement, keys, some)

    async def update(
        self, placement: Placement, fact: Fact, *, now: datetime, embedding: bytes | None = None, **changes: Any
    ) -> Fact:
        """A new version of `fact` with `changes` (`text`, `metadata`, `expires_on`); text and embedding in one step.

        `embedding` belongs to a changed text. The version that was replaced stays in the history, the last
        `VERSIONS_KEPT` of them. Raises `Conflict` where the user has another fact with this text, `NotFound` where
        `fact` does not stand any more.
        """
        digest = text_hash(changes.get("text", fact.text))
        new = replace(fact, text_hash=digest, version=fact.version + 1, updated_at=instant(now), **changes)
        user = placement.user
        keys = [self._keys.facts(user), self._keys.hashes(user), self._keys.embeddings(user), self._keys.history(user)]
        arguments: list[str | bytes] = [
            fact.id,
            str(fact.version),
            dump_fact(new, self._seal),
            self._seal.hash(digest),
            self._seal.seal(embedding, _vector(user, fact.id)) if embedding else b"",
            str(VERSIONS_KEPT),
        ]
        outcome = int(await self._fenced("change a fact", self._update, placement, keys, arguments))
        if outcome < 0:
            raise Conflict("Another memory of this user has this text already; delete one of them.", field="text")
        if outcome == 0:
            raise NotFound("This memory was changed or deleted meanwhile.", field="memory_id")
        return new

    async def history(self, fact: Fact) -> list[Fact]:
        """The versions of `fact` that were replaced, oldest first."""
        first = max(1, fact.version - VERSIONS_KEPT)
        names = [f"{fact.id}:{version}" for version in range(first, fact.version)]
        if not names:
            return []
        with redis_errors("read a fact's history"):
            records: list[Any] = await self._redis.hmget(self._keys.history(fact.user), names)
        return [load_fact(fact.user, record, fact.seq, self._seal) for record in records if record is not None]

    async def put_feedback(self, placement: Placement, fact_id: FactId, said: Mapping[str, Any] | None) -> None:
        """Keep what a reader said of a fact, in the place of what was said before; None takes it back."""
        keys = [self._keys.facts(placement.user), self._keys.feedback(placement.user)]
        about = placement.user + fact_id + ":feedback"
        dumped = "" if said is None else self._seal.seal_text(json.dumps(said, ensure_ascii=False), about)
        await self._fenced("keep feedback", self._feedback, placement, keys, [fact_id, dumped])

    async def feedback(self, user: UserId) -> dict[FactId, dict[str, Any]]:
        """What was said of each of the user's facts."""
        with redis_errors("read feedback"):
            kept: dict[Any, Any] = await self._redis.hgetall(self._keys.feedback(user))
        said = {FactId(id.decode()): text.decode() for id, text in kept.items()}
        return {id: json.loads(self._seal.open_text(text, f"{user}{id}:feedback")) for id, text in said.items()}

    async def delete(self, placement: Placement, fact_ids: Iterable[FactId]) -> int:
        """Remove facts with their embeddings, dedupe entries, history and feedback, and the turns they were taken from.
        How many there were."""
        ids, keys, count = list(fact_ids), self._everything(placement.user), 0
        for start in range(0, len(ids), DELETIONS_A_SCRIPT):
            arguments = [str(VERSIONS_KEPT), *ids[start : start + DELETIONS_A_SCRIPT]]
            count += int(await self._fenced("delete facts", self._delete, placement, keys, arguments))
        self.log.deleted()
        return count

    async def delete_all(self, placement: Placement) -> int:
        """Remove every fact of the user; how many there were. The placement stays, so fencing goes on."""
        keys = self._everything(placement.user)
        count = int(await self._fenced("delete a user's facts", self._delete_all, placement, keys, []))
        self.log.deleted()
        return count

    def _everything(self, user: UserId) -> list[str]:
        """The keys that hold what a user said, the facts first; `delete.lua` knows their order."""
        keys = self._keys
        of_facts = [keys.facts, keys.order, keys.hashes, keys.embeddings, keys.history]
        names = [*of_facts, keys.turns, keys.feedback, keys.pending, keys.mentions]
        return [name(user) for name in names]

    def _opened(self, fact: Fact, vector: bytes | None) -> bytes | None:
        return None if vector is None else self._seal.open(vector, _vector(fact.user, fact.id))

    async def _fenced(
        self,
        intent: str,
        body: AsyncScript,
        placement: Placement,
        keys: Sequence[str],
        arguments: Sequence[str | bytes],
    ) -> Any:
        with redis_errors(intent):
            result = await body(
                [self._keys.placement(placement.user), *keys], [placement.shard, placement.epoch, *arguments]
            )
        if result is None:
            raise not_owner(placement)
        return result


def _vector(user: UserId, fact_id: FactId) -> str:
    """What the embedding of a fact is about."""
    return f"{user}{fact_id}:embedding"
