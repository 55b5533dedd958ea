"""`memshard bench route`: what the pinned router costs over a plain Ray handle, and that a full shard delays no other.

On a real Serve, with shards that do nothing; three ways to the same replica are interleaved:

    plain    a Serve handle with Ray's own router
    pinned   `ShardClient`, whose handle obeys the name of the shard
    owner    `OwnerCalls` on top, as the gateway calls: cached placement, retry, watch over the heartbeat
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.results import Row, Spread
from deployments.memory_calls import ForgetCall
from deployments.owner_calls import OwnerCalls
from deployments.owners import Owners
from deployments.router import PinnedRouter
from deployments.shard_client import ShardClient
from sharding.directory import PlacementCache
from sharding.errors import Busy
from sharding.ids import Placement, ShardId, UserId
from sharding.placement import PlacementPolicy, ShardReport

CALLS = 1_000  # of each way
QUICK_CALLS = 200
BLOCKS = 10  # of calls with the other shard full, and as many with it idle
MAX_ONGOING = 8
QUEUED = 50  # calls that press the full shard all the time
DEADLINE_S = 30.0
GOAL_S = 0.001
HEAD_OF_LINE_GOAL_S = 0.005
USER = UserId("ada")


class StandIn:
    """A shard that answers at once, or never."""

    async def ask(self, call: ForgetCall, along: object = None) -> int:
        if call.request_id == "never":
            await asyncio.Event().wait()
        return 0

    async def status(self) -> str:
        from ray import serve

        return str(serve.get_replica_context().replica_id.unique_id)


class Placed:
    """A directory in which one user is placed."""

    def __init__(self, placement: Placement, shards: tuple[ShardId, ...]) -> None:
        self._placement = placement
        sizes: dict[str, Any] = {"free_bytes": 1, "users": 0, "requests_in_flight": 0}
        self._reports = {shard: ShardReport(shard=shard, model="m", ready=True, **sizes) for shard in shards}

    async def lookup(self, user: UserId) -> Placement | None:
        return self._placement

    async def remembers(self, user: UserId) -> bool:
        return True

    async def claim(self, user: UserId, shard: ShardId, expected: Placement | None) -> Placement:
        return self._placement

    async def shards(self) -> dict[ShardId, ShardReport]:
        return self._reports


@dataclass(frozen=True, slots=True)
class Routed:
    """Seconds of a call, each way; and pinned, while the other shard is idle and full."""

    ways: dict[str, Spread]
    other_idle: Spread
    other_full: Spread
    refused: int  # calls that the full shard refused meanwhile

    def rows(self) -> Iterator[Row]:
        for way, spread in self.ways.items():
            yield {"way": way, **spread.row("call")}
        yield {"way": "pinned, other shard idle", **self.other_idle.row("call")}
        yield {"way": "pinned, other shard full", **self.other_full.row("call")}


def measure(console: Console, quick: bool) -> Routed:
    """Starts Ray and Serve, and stops them."""
    with _serving(console) as (plain, pinned):
        return asyncio.run(_measure(plain, pinned, QUICK_CALLS if quick else CALLS))


def table(routed: Routed) -> Table:
    drawn = Table(title="One call to a shard, milliseconds, median (quartiles)")
    for heading in ("way", "call", "over plain"):
        drawn.add_column(heading, justify="left" if heading == "way" else "right")
    plain = routed.ways["plain"].median
    for way, spread in routed.ways.items():
        drawn.add_row(way, spread.text(1e3), f"{1e3 * (spread.median - plain):+.2f} (goal: at most {1e3 * GOAL_S:.0f})")
    idle, full = routed.other_idle, routed.other_full
    drawn.add_row("pinned, other shard idle", idle.text(1e3), "")
    goal = f"{1e3 * (full.median - idle.median):+.2f} over idle (goal: at most {1e3 * HEAD_OF_LINE_GOAL_S:.0f})"
    drawn.add_row("pinned, other shard full", full.text(1e3), goal)
    drawn.caption = f"{routed.refused} calls were refused by the full shard meanwhile"
    return drawn


async def _measure(plain: Any, pinned: Any, calls: int) -> Routed:
    client = ShardClient(pinned)
    names = await pinned.broadcast("status").results_async(timeout_s=DEADLINE_S)
    one, other = sorted(map(ShardId, names))
    placement = Placement(USER, one, 1)
    owners = Owners(Placed(placement, (one, other)), PlacementPolicy(), PlacementCache(10))
    owner_calls = OwnerCalls(client, owners, DEADLINE_S)
    call = ForgetCall("r", placement)
    ways: dict[str, Callable[[], Awaitable[object]]] = {
        "plain": lambda: plain.ask.remote(call),
        "pinned": lambda: client.ask(one, call, DEADLINE_S),
        "owner": lambda: owner_calls.call(USER, lambda p, left_s: client.ask(p.shard, call, left_s)),
    }
    for way in ways.values():
        await _timed(way, 50)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(calls):
        for name, way in ways.items():
            times[name] += await _timed(way, 1)
    idle, full, refused = [], [], 0
    for _ in range(BLOCKS):
        idle += await _timed(ways["pinned"], calls // BLOCKS)
        async with _Full(client, ForgetCall("never", placement), other) as pressing:
            full += await _timed(ways["pinned"], calls // BLOCKS)
        refused += pressing.refused
    return Routed({name: Spread.of(some) for name, some in times.items()}, Spread.of(idle), Spread.of(full), refused)


class _Full:
    """Keeps a shard full, and presses it with more calls than it takes."""

    def __init__(self, client: ShardClient, call: ForgetCall, shard: ShardId) -> None:
        self._client = client
        self._call = call
        self._shard = shard
        self._tasks: list[asyncio.Task[None]] = []
        self._is_full = asyncio.Event()
        self.refused = 0

    async def __aenter__(self) -> _Full:
        self._tasks = [asyncio.create_task(self._press()) for _ in range(MAX_ONGOING + QUEUED)]
        async with asyncio.timeout(DEADLINE_S):
            await self._is_full.wait()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0.3)  # until the shard has seen that nobody waits

    async def _press(self) -> None:
        while True:
            try:
                await self._client.ask(self._shard, self._call, DEADLINE_S)
            except Busy:
                self.refused += 1
                self._is_full.set()
                await asyncio.sleep(0.5)


async def _timed(way: Callable[[], Awaitable[object]], count: int) -> list[float]:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        await way()
        times.append(time.perf_counter() - began)
    return times


@contextmanager
def _serving(console: Console) -> Iterator[tuple[Any, Any]]:
    import logging

    import ray
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from cluster import processes
    from cluster.ray_node import hush

    processes.adopt_orphans()
    hush()
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "include_dashboard": False}
    try:
        with console.status("Starting Ray and Serve"):
            ray.init(address="local", num_cpus=2, object_store_memory=80 << 20, **quiet)
            processes.listen_again()
            logging.getLogger("ray.serve").setLevel(logging.ERROR)
            serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
            limits: dict[str, Any] = {"max_ongoing_requests": MAX_ONGOING, "ray_actor_options": {"num_cpus": 0}}
            router = RequestRouterConfig(request_router_class=PinnedRouter)
            shard: Any = serve.deployment(StandIn, name="Shard", num_replicas=2, request_router_config=router, **limits)
            plain: Any = serve.deployment(StandIn, name="Plain", num_replicas=1, **limits)
            serve.run(plain.bind(), name="plain", route_prefix=None)
            serve.run(shard.bind(), name="pinned", route_prefix=None)
        yield serve.get_deployment_handle("Plain", "plain"), serve.get_deployment_handle("Shard", "pinned")
    finally:
        with suppress(Exception):
            serve.shutdown()
        ray.shutdown()
        processes.end_descendants()
