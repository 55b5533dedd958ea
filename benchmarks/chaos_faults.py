"""What a chaos run breaks, and what may fail then.

kind          what happens                                        what may fail, and how long
shard         kill -9 of a shard's process                        a stream that has begun
pause         SIGSTOP of a shard, longer than its heartbeat       a stream that has begun
              lasts; then it goes on and believes that it owns
partition     a shard cannot reach Redis, or hear from it         a stream that has begun
node          kill -9 of all processes of a node                  a stream that has begun
controller    kill -9 of Serve's controller                       nothing
gateway       kill -9 of a gateway                                whatever it was answering
redis         kill -9 of Redis, which restarts from its file      writes, and users not placed, while it is away
disk          Redis' disk is full for a while                     the same
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

import psutil

from benchmarks.chaos_cluster import CONTROLLER, GATEWAY, HEARTBEAT_TTL_S, SHARD, ChaosCluster

Allowed = Literal["begun streams", "requests in flight", "anything while it lasts"]

PAUSE_S = 3 * HEARTBEAT_TTL_S
DISK_FULL_S = 4.0


@dataclass(frozen=True, slots=True)
class Fault:
    """`strike` returns when the fault is over and nothing is left to heal but what the cluster heals itself."""

    kind: str
    strike: Callable[[ChaosCluster, Random], Coroutine[Any, Any, None]]
    allows: Allowed
    outage: bool = False  # nothing can be served during it: the time to be back counts from its end


async def _shard(cluster: ChaosCluster, random: Random) -> None:
    random.choice(cluster.processes(SHARD)).kill()


async def _pause(cluster: ChaosCluster, random: Random) -> None:
    paused = random.choice(cluster.processes(SHARD))
    paused.send_signal(signal.SIGSTOP)
    await asyncio.sleep(PAUSE_S)
    with suppress(psutil.NoSuchProcess):
        paused.send_signal(signal.SIGCONT)


async def _partition(cluster: ChaosCluster, random: Random) -> None:
    cluster.proxy.cut(random.choice(cluster.processes(SHARD)).pid)
    await asyncio.sleep(PAUSE_S)
    cluster.proxy.heal()


async def _node(cluster: ChaosCluster, random: Random) -> None:
    await asyncio.to_thread(cluster.crash_node, random)
    await asyncio.to_thread(cluster.add_node)


async def _controller(cluster: ChaosCluster, random: Random) -> None:
    random.choice(cluster.processes(CONTROLLER)).kill()


async def _gateway(cluster: ChaosCluster, random: Random) -> None:
    random.choice(cluster.processes(GATEWAY)).kill()


async def _redis(cluster: ChaosCluster, random: Random) -> None:
    await cluster.redis.kill()


async def _disk(cluster: ChaosCluster, random: Random) -> None:
    await cluster.redis.fill_disk(DISK_FULL_S)


FAULTS = {
    fault.kind: fault
    for fault in (
        Fault("shard", _shard, "begun streams"),
        Fault("pause", _pause, "begun streams"),
        Fault("partition", _partition, "begun streams"),
        Fault("node", _node, "begun streams"),
        Fault("controller", _controller, "begun streams"),
        Fault("gateway", _gateway, "requests in flight"),
        Fault("redis", _redis, "anything while it lasts", outage=True),
        Fault("disk", _disk, "anything while it lasts", outage=True),
    )
}
