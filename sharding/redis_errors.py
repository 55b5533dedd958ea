"""The one place where errors of the Redis client become Memshard's.

Whatever goes wrong with Redis is `Unavailable`: nothing was acknowledged, and the same call may succeed later.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from redis.exceptions import ConnectionError, RedisClusterException, RedisError, TimeoutError

from sharding.errors import Unavailable

RETRY_AFTER_S = 1.0


@contextmanager
def redis_errors(intent: str) -> Iterator[None]:
    """Run Redis calls; raise `Unavailable` with a sentence built from `intent` ("look up a user") if they fail."""
    try:
        yield
    except (ConnectionError, TimeoutError, RedisClusterException, OSError) as error:
        message = f"Redis could not be reached to {intent}; retry shortly."
        raise Unavailable(message, retry_after_s=RETRY_AFTER_S, cause=str(error)) from error
    except RedisError as error:
        message = f"Redis refused to {intent}: {error}"
        raise Unavailable(message, retry_after_s=RETRY_AFTER_S, cause=str(error)) from error
