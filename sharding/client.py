"""The Redis client that Memshard's processes use: bounded in time, retries and connections, bytes in and out.

    redis://host:6379/0  rediss://…  unix://…                  one server
    redis+cluster://host:6379,host:6379                        Redis Cluster, found through any of these nodes
    redis+sentinel://host:26379,host:26379/name/0              the primary that Sentinel knows as `name`

`rediss+cluster` and `rediss+sentinel` are the same over TLS. A user and a password stand before the hosts
(`redis+cluster://user:password@host,host`) and are the data servers'; Sentinel's own are `?sentinel_username=…` and
`?sentinel_password=…`. Redis Cluster and Sentinel copy writes to replicas after acknowledging them: what a fail-over
loses is bounded by the servers' `min-replicas-to-write` and `min-replicas-max-lag`, and `Lease` makes shards ask again
after one.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError

from sharding.errors import StartupError

RedisClient = Redis | RedisCluster

MAX_CONNECTIONS = 64
"""Of one client to one server; who finds all in use waits, at most for the client's timeout."""

MAX_CLUSTER_CONNECTIONS = 1024
"""The same for each node of a cluster, whose client does not wait: as many as a gateway takes requests."""


LAYOUT_RETRIES = 3


def connect(url: str, *, timeout_s: float = 2.0, retries: int = 2) -> RedisClient:
    """A client for one of the URLs above; it connects on first use and is closed by `aclose()`.

    Each try of a command may take `timeout_s` to connect and `timeout_s` to answer, and is repeated at most
    `retries` times after a lost connection or a timeout. Every script in this package gives the same result
    when it is repeated, with the one exception that `FactStore` states. Raises `StartupError` for a URL that
    is not one of Redis.
    """
    options: dict[str, Any] = {
        "decode_responses": False,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(ExponentialBackoff(cap=0.5, base=0.05), retries),
    }
    try:
        parts = urlsplit(url)
        tls, _, kind = parts.scheme.partition("+")
        if kind == "cluster":
            nodes = [ClusterNode(host, port) for host, port in _hosts(parts, 6379)]
            options |= {"startup_nodes": nodes, "max_connections": MAX_CLUSTER_CONNECTIONS}
            options["reinitialize_steps"] = 0  # else every fifth redirection closes connections that are in use
            return _Cluster(ssl=tls == "rediss", **options, **_credentials(parts))
        options |= {"max_connections": MAX_CONNECTIONS, "timeout": timeout_s}
        if kind == "sentinel":
            return _through_sentinel(parts, tls == "rediss", options)
        return Redis.from_pool(BlockingConnectionPool.from_url(url, **options))
    except ValueError as error:
        raise StartupError(f"The Redis URL cannot be used: {error}") from error


def as_text(reply: bytes | str) -> str:
    """A reply of a client, which are bytes; of one that decodes them, as tests may use, they are text already."""
    return reply if isinstance(reply, str) else reply.decode()


class _Cluster(RedisCluster):
    """Guards against two faults of redis-py 8.1 under concurrent commands: those that come before it has read the
    cluster's layout go to a wrong node, and those running while it closes its connections (a cluster that is down) fail
    with an AttributeError (redis-py#3835)."""

    async def execute_command(self, *args: Any, **kwargs: Any) -> Any:
        for _ in range(1 + LAYOUT_RETRIES):
            await self.initialize()
            try:
                return await super().execute_command(*args, **kwargs)
            except AttributeError as error:
                lost = error
        raise ConnectionError("The cluster's layout changes.") from lost


class _SentinelPool(SentinelConnectionPool, BlockingConnectionPool):
    """Follows the primary, and waits for a connection instead of failing when all are in use."""


class _SentinelRedis(Redis):
    """A client of the primary; closing it closes the connections to Sentinel, too."""

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(close_connection_pool)
        await self.connection_pool.sentinel_manager.aclose()  # type: ignore[attr-defined]  # a _SentinelPool


def _through_sentinel(parts: SplitResult, tls: bool, options: dict[str, Any]) -> Redis:
    name, _, db = parts.path.strip("/").partition("/")
    if not name:
        raise ValueError("a redis+sentinel URL names the primary after the hosts: redis+sentinel://host,host/name")
    query = parse_qs(parts.query)
    own = {key: query[f"sentinel_{key}"][0] for key in ("username", "password") if f"sentinel_{key}" in query}
    bounds = {key: options[key] for key in ("socket_timeout", "socket_connect_timeout")}
    over_tls = {"ssl": True} if tls else {}
    sentinel: Any = Sentinel(_hosts(parts, 26379), sentinel_kwargs={**bounds, **own, **over_tls})  # type: ignore[no-untyped-call]
    client: Redis = sentinel.master_for(
        name, _SentinelRedis, _SentinelPool, ssl=tls, db=int(db or 0), **options, **_credentials(parts)
    )
    return client


def _hosts(parts: SplitResult, default_port: int) -> list[tuple[str, int]]:
    """Of `user:password@host:port,host,[::1]:port`. Raises ValueError where there is none."""
    hosts = []
    for host in parts.netloc.rpartition("@")[2].split(","):
        one = urlsplit(f"//{host}")
        if not one.hostname:
            raise ValueError(f"{host!r} is not the address of a server")
        hosts.append((one.hostname, one.port or default_port))
    return hosts


def _credentials(parts: SplitResult) -> dict[str, Any]:
    userinfo, at, _ = parts.netloc.rpartition("@")
    username, _, password = userinfo.partition(":")
    given = {"username": unquote(username), "password": unquote(password)} if at else {}
    return {name: value for name, value in given.items() if value}
