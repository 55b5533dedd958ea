"""Which of a machine's cores a shard's engine computes on. Imports nothing that reads what is set here."""

from __future__ import annotations

import hashlib
import os
import socket

from deployments.settings import ShardSettings


def take_slot(settings: ShardSettings) -> tuple[int, socket.socket | None]:
    """The first of this machine's slots, one a shard, that no living replica of this cluster holds, and what holds it.

    Serve's ranks would not do: they are reused and shift, and two living replicas may bind by the same one. An abstract
    Unix socket has one holder, and goes with its process however that ends.
    """
    cluster = hashlib.blake2b(f"{settings.namespace} {settings.redis_url}".encode(), digest_size=8).hexdigest()
    for slot in range(settings.shards):
        holder = socket.socket(socket.AF_UNIX)
        try:
            holder.bind(f"\0memshard-{cluster}-{slot}")
        except OSError:
            holder.close()
            continue
        return slot, holder
    return 0, None  # more replicas than shards, for a moment: cores are shared until one ends


def bind_cores(settings: ShardSettings, slot: int) -> None:
    """Gives this replica's engine cores of its own: two engines would bind to the same one. Only matters on CPUs."""
    cores = sorted(os.sched_getaffinity(0))
    threads = settings.threads or max(1, len(cores) // settings.shards)
    first = slot * threads % len(cores)
    mine = [cores[(first + i) % len(cores)] for i in range(min(threads, len(cores)))]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, mine))
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the replica's own torch: the embedder, beside the engine
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
