"""Everything that can break without Ray does, and the history that users remember stays true."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest

from benchmarks.chaos_run import BACK_S, Strike, all_served, strike
from benchmarks.chaos_talker import Talker
from tests.benchmarks.local_chaos import LocalChaos, local_chaos

DISK_FULL_S = 1.5


async def _kill(cluster: LocalChaos, rng: random.Random) -> None:
    cluster.kill(rng)


async def _redis(cluster: LocalChaos, rng: random.Random) -> None:
    await cluster.redis.kill()


async def _disk(cluster: LocalChaos, rng: random.Random) -> None:
    await cluster.redis.fill_disk(DISK_FULL_S)


FAULTS = {
    "kill": _kill,
    "pause": LocalChaos.pause,
    "partition": LocalChaos.partition,
    "redis": _redis,
    "disk": _disk,
}
OUTAGES = ("redis", "disk")


@pytest.mark.parametrize("seed", [1])
async def test_no_fact_is_lost_or_served_by_two_and_only_begun_streams_fail(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    kinds = [*FAULTS, *rng.choices(list(FAULTS), k=2)]
    async with local_chaos(tmp_path, seed) as cluster:
        crowd = [Talker(f"user-{n}", cluster.http, random.Random(f"{seed}-{n}")) for n in range(8)]
        talking = [asyncio.create_task(talker.talk()) for talker in crowd]
        strikes: list[Strike] = []
        try:
            await all_served(crowd, time.monotonic(), 20.0)
            for kind in kinds:
                allows = "anything while it lasts" if kind in OUTAGES else "begun streams"
                struck = FAULTS[kind](cluster, rng)
                strikes.append(await strike(kind, struck, cluster.whole, allows, kind in OUTAGES, crowd))
        finally:
            for talker in crowd:
                talker.stopping = True
            await asyncio.gather(*talking)
        for talker in crowd:
            await talker.list_facts()
    assert [sentence for talker in crowd for sentence in talker.wrong] == []
    assert {one.kind: dict(one.forbidden) for one in strikes if one.forbidden} == {}
    assert [one.kind for one in strikes if one.back_s > BACK_S] == []
    assert sum(len(talker.history.must) for talker in crowd) > 0
