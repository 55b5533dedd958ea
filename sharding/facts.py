"""A user's facts as Redis keeps them: durable, deduplicated, in order, and writable by the owner only.

Every write carries the caller's placement and is fenced inside its Lua script: a shard that lost the user gets
`WrongShard` and has changed nothing. What a process holds of these facts is `user_memory.py`'s.

Repeating a call whose answer was lost gives the same result, except `delete`, which then finds nothing. An `append` of
the same `turn_id` is the same call, whichever shard repeats it.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from redis.asyncio import Redis
from redis.commands.core import AsyncScript

from sharding.directory import not_owner
from sharding.errors import InvalidRequest
from sharding.ids import FactId, Placement, UserId
from sharding.keys import KeySpace
from sharding.redis_errors import redis_errors
from sharding.scripts import script

AddEvent = Literal["ADD", "NONE"]

EMBEDDINGS_A_SCRIPT = 512  # bounds how long one script keeps Redis from others: about 1 MB of vectors


@dataclass(frozen=True, slots=True)
class Fact:
    """One remembered text. Times are ISO 8601 in UTC."""

    id: FactId
    user: UserId
    text: str  # as it was told, not normalised
    text_hash: str  # `text_hash(text)`, in hex
    turn_id: str  # facts told together share it
    seq: int  # grows with every fact of the user; never given out twice
    version: int  # 1 for a fact never changed
    created_at: str
    updated_at: str
    embedding: bytes | None = None  # float32, little endian; None until it was computed


def text_hash(text: str) -> str:
    """SHA-256 in hex of `text` in NFC, stripped, each run of whitespace as one space: what makes two facts the same.

    Raises `InvalidRequest` for text that UTF-8 cannot hold (lone surrogates).
    """
    try:
        normalised = " ".join(unicodedata.normalize("NFC", text).split())
        return hashlib.sha256(normalised.encode()).hexdigest()
    except UnicodeEncodeError as error:
        raise InvalidRequest("A fact's text holds characters that are not valid Unicode.", field="text") from error


class FactStore:
    """Reads and fenced writes of facts. Every method raises `Unavailable` where Redis is away."""

    def __init__(self, redis: Redis, keys: KeySpace) -> None:
        self._redis = redis
        self._keys = keys
        self._append = script(redis, "fence", "append")
        self._embed = script(redis, "fence", "embed")
        self._delete = script(redis, "fence", "delete")
        self._delete_all = script(redis, "fence", "delete_all")

    async def append(
        self, placement: Placement, texts: Sequence[str], turn_id: str, now: datetime
    ) -> list[tuple[Fact, AddEvent]]:
        """Store the texts of one turn, all or none; for each, in order, the fact that stands and whether it is new.

        A text that the user has already, or that came earlier in `texts`, gives "NONE" and the older fact.
        `turn_id` names this call and no other.
        `now` is timezone-aware. When this returns, the facts are as durable as Redis makes them.
        """
        user = placement.user
        at = now.astimezone(UTC).isoformat(timespec="milliseconds")
        arguments: list[str | bytes] = []
        for text in texts:
            id, digest = str(uuid.uuid4()), text_hash(text)
            arguments += [digest, id, _record(FactId(id), text, digest, turn_id, at)]
        keys = [self._keys.facts(user), self._keys.order(user), self._keys.hashes(user), self._keys.seq(user)]
        outcomes = await self._fenced("store facts", self._append, placement, keys, arguments)
        return [(_fact(user, record, int(seq)), "ADD" if added else "NONE") for added, seq, record in outcomes]

    async def load(self, user: UserId) -> list[Fact]:
        """All facts of a user in seq order, with embeddings where there are any. One round trip."""
        with redis_errors("load a user's facts"):
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.hgetall(self._keys.facts(user))
                pipe.zrange(self._keys.order(user), 0, -1, withscores=True)
                pipe.hgetall(self._keys.embeddings(user))
                records, order, embeddings = await pipe.execute()
        return [_fact(user, records[id], int(seq), embeddings.get(id)) for id, seq in order]

    async def put_embeddings(self, placement: Placement, embeddings: Mapping[FactId, bytes]) -> None:
        """Keep embeddings (float32 bytes, little endian) by fact id; ids that no longer exist are passed over."""
        keys = [self._keys.facts(placement.user), self._keys.embeddings(placement.user)]
        flat = [part for pair in embeddings.items() for part in pair]
        for start in range(0, len(flat), 2 * EMBEDDINGS_A_SCRIPT):
            some = flat[start : start + 2 * EMBEDDINGS_A_SCRIPT]
            await self._fenced("store embeddings", self._embed, placement, keys, some)

    async def delete(self, placement: Placement, fact_id: FactId) -> bool:
        """Remove a fact with its embedding and its dedupe entry. False if the user has no such fact."""
        user = placement.user
        keys = [self._keys.facts(user), self._keys.order(user), self._keys.hashes(user), self._keys.embeddings(user)]
        return bool(await self._fenced("delete a fact", self._delete, placement, keys, [fact_id]))

    async def delete_all(self, placement: Placement) -> int:
        """Remove every fact of the user; how many there were. The placement stays, so fencing goes on."""
        user = placement.user
        keys = [self._keys.facts(user), self._keys.order(user), self._keys.hashes(user), self._keys.embeddings(user)]
        return int(await self._fenced("delete a user's facts", self._delete_all, placement, keys, []))

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


def _record(id: FactId, text: str, digest: str, turn_id: str, at: str) -> bytes:
    # `delete.lua` reads text_hash; seq and embedding live beside the record, under keys of their own.
    record = {
        "id": id,
        "text": text,
        "text_hash": digest,
        "turn_id": turn_id,
        "version": 1,
        "created_at": at,
        "updated_at": at,
    }
    return json.dumps(record, ensure_ascii=False).encode()


def _fact(user: UserId, record: bytes, seq: int, embedding: bytes | None = None) -> Fact:
    return Fact(user=user, seq=seq, embedding=embedding, **json.loads(record))
