"""The number of shards follows the load on a real Ray Serve, under the composition root's own policy and bounds."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray import cloudpickle, serve

from cluster.app import how_many
from cluster.settings import Settings
from deployments.autoscaling import REQUESTS
from sharding.errors import StartupError

# Not passing yet: at Serve's own report interval scaling takes longer than the test's deadlines.
pytestmark = pytest.mark.skipif(
    os.environ.get("MEMSHARD_TEST_SCALING") != "1", reason="MEMSHARD_TEST_SCALING=1 runs it"
)

WINDOW_S = 4.0
ROOM = 10  # chats in flight that a shard is meant to have: half of its limit
STREAM_S = 8.0


class Loaded:
    """A shard that says it has as many chats in flight as a file tells, and streams numbers for some seconds."""

    def __init__(self, load: Path) -> None:
        self._load = load

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return {REQUESTS: float(self._load.read_text())}

    async def stream(self) -> AsyncGenerator[int, None]:
        for number in range(round(STREAM_S * 10)):
            yield number
            await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("scaling") / "load"
    file.write_text("0")
    return file


@pytest.fixture(scope="module")
def handle(load: Path) -> Iterator[Any]:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not have the tests on their path
    settings = Settings(shards=1, max_shards=3, scale_window_s=WINDOW_S, max_requests_in_flight=2 * ROOM)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    try:
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)
        serve.start(proxy_location="Disabled")
        shards = serve.deployment(Loaded).options(
            name="Shard", ray_actor_options={"num_cpus": 0}, graceful_shutdown_timeout_s=20, **how_many(settings)
        )
        yield serve.run(shards.bind(load), name="scaling", route_prefix=None)
    finally:
        started = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
        serve.shutdown()
        ray.shutdown()
    _, left = psutil.wait_procs(started, timeout=10)
    assert not left


def tell(load: Path, chats: int) -> None:
    load.write_text(str(chats))


def shards() -> int:
    return int(serve.status().applications["scaling"].deployments["Shard"].replica_states.get("RUNNING", 0))


async def until(count: int, deadline_s: float) -> float:
    """Seconds until that many shards run."""
    began = time.monotonic()
    while await asyncio.to_thread(shards) != count:
        assert time.monotonic() - began < deadline_s, f"{shards()} shards"
        await asyncio.sleep(0.1)
    return time.monotonic() - began


async def test_shards_start_under_load_and_end_without_it_and_no_stream_is_cut(handle: Any, load: Path) -> None:
    tell(load, 3 * ROOM)  # each of them says so: as much as there can be shards for
    await until(3, 60)

    async def read() -> list[int]:
        return [number async for number in handle.options(method_name="stream", stream=True).remote()]

    streams = [asyncio.create_task(read()) for _ in range(9)]
    await asyncio.sleep(0.5)
    tell(load, 0)
    await until(1, 60)
    for stream in streams:
        assert await stream == list(range(round(STREAM_S * 10)))


async def test_a_load_that_comes_and_goes_keeps_its_shards(handle: Any, load: Path) -> None:
    tell(load, 2 * ROOM)
    await until(3, 60)
    seen = set()
    for turn in range(30):
        tell(load, 2 * ROOM if turn % 6 < 3 else 0)  # 1.5 s of each: less than the window
        await asyncio.sleep(0.5)
        seen.add(await asyncio.to_thread(shards))
    assert seen == {3}


def test_no_more_shards_may_be_allowed_than_there_are_to_begin_with() -> None:
    with pytest.raises(StartupError, match="MEMSHARD_MAX_SHARDS is below MEMSHARD_SHARDS"):
        Settings.from_environment(shards=3, max_shards=2)
    assert how_many(Settings(shards=3)) == {"num_replicas": 3}
