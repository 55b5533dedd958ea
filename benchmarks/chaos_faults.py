"""What a chaos run breaks, and what may fail then.

kind          what happens                                        what may fail, and how long
shard         kill -9 of a shard's process                        a stream that has begun
engine        kill -9 of a shard's engine process                 a stream that has begun
worker        kill -9 of an engine's worker (with a model only)   a stream that has begun
pause         SIGSTOP of a shard, longer than its heartbeat       a stream that has begun
              lasts; then it goes on and believes that it owns
partition     a shard cannot reach Redis, or hear from it         a stream that has begun
node          kill -9 of all processes of a node                  a stream that has begun
controller    kill -9 of Serve's controller                       a stream that has begun
files         a shard can write to no file for a while            nothing
move-<step>   a user moves, and at that step, before or after     a stream that has begun
              it, kill -9 of the source or of the target
gateway       kill -9 of a gateway                                whatever it was answering
redis         kill -9 of Redis, which restarts from its file      writes, and users not placed, while it is away
disk          Redis' disk is full for a while                     the same
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Literal

import httpx
import psutil

from benchmarks.chaos_cluster import (
    CONTROLLER,
    ENGINE,
    GATEWAY,
    HEARTBEAT_TTL_S,
    SHARD,
    WORKER,
    ChaosCluster,
    user_name,
)
from sharding.errors import StartupError
from sharding.move import Do

Allowed = Literal["nothing", "begun streams", "requests in flight", "anything while it lasts"]

PAUSE_S = 3 * HEARTBEAT_TTL_S
DISK_FULL_S = 4.0
MOVE_S = 10.0
STEPS = (Do.COPY, Do.PAUSE, Do.COPY_TAIL, Do.CLOSE, Do.SWITCH, Do.GO, Do.DROP)
"""The others only come where one of these fails; `tests/deployments/test_moving_users.py` cuts a move off there."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`strike` returns when the fault is over and nothing is left to heal but what the cluster heals itself."""

    kind: str
    strike: Callable[[ChaosCluster, Random], Coroutine[Any, Any, None]]
    allows: Allowed
    with_model: bool = False  # the deterministic engine has no such thing
    outage: bool = False  # nothing can be served during it: the time to be back counts from its end


async def _shard(cluster: ChaosCluster, random: Random) -> None:
    random.choice(cluster.processes(SHARD)).kill()


async def _one_of(kind: Sequence[str], cluster: ChaosCluster, random: Random) -> None:
    random.choice(cluster.processes(*kind)).kill()


async def _files(cluster: ChaosCluster, random: Random) -> None:
    shard = random.choice(cluster.processes(SHARD))
    written = [shard, *shard.children(recursive=True)]
    for process in written:
        cluster.fill_disk(process, True)
    await asyncio.sleep(DISK_FULL_S)
    for process in written:
        cluster.fill_disk(process, False)


async def _move(step: Do, cluster: ChaosCluster, random: Random) -> None:
    """Asks for moves of a user until one comes to the step: who is there already does not move."""
    user, struck = user_name(random.randrange(4)), random.randrange(2)  # the source or the target
    hold, held = cluster.directory / "hold", cluster.directory / "held"
    held.unlink(missing_ok=True)
    hold.write_text(f"{step} {random.choice(['before', 'after'])}")
    async with httpx.AsyncClient(base_url=cluster.url, timeout=MOVE_S, trust_env=False) as http:
        for shard in [shard["shard"] for shard in (await http.get("/status")).json()["shards"]][:2]:
            asked = asyncio.create_task(http.post("/v1/admin/moves", json={"user_id": user, "shard": shard}))
            while not asked.done() and not held.exists():  # noqa: ASYNC110  # another process writes it
                await asyncio.sleep(0.02)
            if held.exists():
                psutil.Process(cluster.shard_pids()[held.read_text().split()[struck]]).kill()
                with suppress(httpx.HTTPError):
                    await asked
                return
    hold.unlink(missing_ok=True)
    raise StartupError(f"No move came to {step}")


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
        Fault("engine", partial(_one_of, ENGINE), "begun streams"),
        Fault("worker", partial(_one_of, WORKER), "begun streams", with_model=True),
        Fault("pause", _pause, "begun streams"),
        Fault("partition", _partition, "begun streams"),
        Fault("node", _node, "begun streams"),
        Fault("controller", _controller, "begun streams"),
        Fault("files", _files, "nothing"),
        *(Fault(f"move-{step.replace('_', '-')}", partial(_move, step), "begun streams") for step in STEPS),
        Fault("gateway", _gateway, "requests in flight"),
        Fault("redis", _redis, "anything while it lasts", outage=True),
        Fault("disk", _disk, "anything while it lasts", outage=True),
    )
}
