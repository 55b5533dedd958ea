"""The Redis client that Memshard's processes use: bounded in time and in retries, bytes in and out."""

from __future__ import annotations

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

from sharding.errors import StartupError


def connect(url: str, *, timeout_s: float = 2.0, retries: int = 2) -> Redis:
    """A client for `redis://`, `rediss://` or `unix://`; it connects on first use and is closed by `aclose()`.

    Each try of a command may take `timeout_s` to connect and `timeout_s` to answer, and is repeated at most
    `retries` times after a lost connection or a timeout. Every script in this package gives the same result
    when it is repeated, with the one exception that `FactStore` states. Raises `StartupError` for a URL that
    is not one of Redis.
    """
    try:
        return Redis.from_url(
            url,
            decode_responses=False,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), retries),
        )
    except ValueError as error:
        raise StartupError(f"The Redis URL cannot be used: {error}") from error
