"""API keys: who may call, for which tenant, and what.

    <ns>:{keys:}    hash    SHA-256 of a key, in hex -> {id, tenant, role, label, created_at}

A key is 256 random bits, so its plain hash cannot be turned back; the key itself is shown once, when it is made.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Literal, Protocol

from sharding.client import RedisClient
from sharding.fact_records import instant
from sharding.keys import KeySpace
from sharding.redis_errors import redis_errors

Role = Literal["read", "write", "admin"]

PREFIX = "msk-"
MAX_KEY_CHARS = 200


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What is known of a key. `id` names it in lists and logs, and opens nothing."""

    id: str
    tenant: str
    role: Role
    label: str
    created_at: str


class KnowsKeys(Protocol):
    """What a gateway asks. Raises `Unavailable` where Redis is away."""

    async def find(self, key: str) -> ApiKey | None: ...

    async def revoke_all(self, tenant: str, but: str | None = None) -> int: ...


class KeyStore(KnowsKeys):
    """The keys of one installation."""

    def __init__(self, redis: RedisClient, keys: KeySpace) -> None:
        self._redis = redis
        self._name = keys.api_keys()

    async def create(self, tenant: str, role: Role, label: str = "") -> tuple[str, ApiKey]:
        """A new key, and what is known of it."""
        key = PREFIX + secrets.token_urlsafe(32)
        known = ApiKey(secrets.token_hex(4), tenant, role, label, instant(datetime.now(UTC)))
        with redis_errors("keep a key"):
            await self._redis.hset(self._name, _digest(key), json.dumps(asdict(known)))
        return key, known

    async def find(self, key: str) -> ApiKey | None:
        """What is known of a key; None for one that was never made, or was revoked."""
        with redis_errors("check a key"):
            kept: Any = await self._redis.hget(self._name, _digest(key))
        return None if kept is None else ApiKey(**json.loads(kept))

    async def list(self) -> list[ApiKey]:
        """All keys, oldest first."""
        with redis_errors("list the keys"):
            kept: dict[Any, Any] = await self._redis.hgetall(self._name)
        return sorted((ApiKey(**json.loads(one)) for one in kept.values()), key=lambda key: key.created_at)

    async def revoke(self, id: str) -> bool:
        """Forget the key with this id; False where there is none."""
        with redis_errors("revoke a key"):
            kept: dict[Any, Any] = await self._redis.hgetall(self._name)
            gone = [digest for digest, one in kept.items() if json.loads(one)["id"] == id]
            return bool(gone) and bool(await self._redis.hdel(self._name, *gone))

    async def revoke_all(self, tenant: str, but: str | None = None) -> int:
        """Forget a tenant's keys, but the one of that id; how many there were."""
        with redis_errors("revoke keys"):
            kept: dict[Any, Any] = await self._redis.hgetall(self._name)
            known = {digest: json.loads(one) for digest, one in kept.items()}
            gone = [digest for digest, one in known.items() if one["tenant"] == tenant and one["id"] != but]
            return int(await self._redis.hdel(self._name, *gone)) if gone else 0


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogatepass")).hexdigest()
