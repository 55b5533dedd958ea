"""What goes on beside the load: the shards are asked for their status, and some of them killed."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from typing import Any

import gevent
import psutil

from benchmarks import server
from benchmarks.load_client import Failed, LoadClient

STATUS_EVERY_S = 2.0


def watch(client: LoadClient, statuses: list[tuple[float, dict[str, Any]]]) -> None:
    """Looks again and again."""
    while True:
        look(client, statuses)
        gevent.sleep(STATUS_EVERY_S)


def kill(every_s: float, rng: random.Random, kills: list[float]) -> None:
    """kill -9 of a shard's process, and again."""
    while True:
        gevent.sleep(every_s)
        if shards := server.shard_processes():
            with suppress(psutil.NoSuchProcess):
                rng.choice(shards).kill()
                kills.append(time.perf_counter())


def look(client: LoadClient, statuses: list[tuple[float, dict[str, Any]]]) -> None:
    """What the shards say of themselves now, with the time on `time.perf_counter`'s clock."""
    with suppress(Failed):  # a gap is seen in the report
        statuses.append((time.perf_counter(), client.status()))
