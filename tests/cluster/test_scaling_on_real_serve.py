"""The number of shards follows the load on a real Ray Serve over several nodes: from none to the most and back, and no
request is lost by it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from cluster.app import how_many
from cluster.settings import Settings
from deployments import deterministic
from sharding.errors import StartupError
from tests.cluster.scaling_cluster import MOST, ROOM, Person, ScalingCluster

# See `how_many`: the field is on its way out, and nothing has taken its place.
pytestmark = pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field:DeprecationWarning")

FACTS = 12  # an answer takes 3 s


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScalingCluster]:
    cluster = ScalingCluster(tmp_path_factory.mktemp("scaling"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
async def http(cluster: ScalingCluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60.0) as client:
        yield client


async def test_nobody_asks_and_no_shard_runs_until_somebody_does(
    cluster: ScalingCluster, http: httpx.AsyncClient
) -> None:
    await cluster.until(0)
    ada = Person(http, "ada", FACTS)
    await ada.tell()
    models = (await http.get("/v1/models")).json()["data"]
    assert [model["id"] for model in models] == [deterministic.NAME]
    assert cluster.shards() == 0, "neither needs a shard"
    await asyncio.gather(ada.chat(), ada.chat())
    assert cluster.shards() == 1


async def test_shards_come_with_the_load_stay_with_its_waves_and_go_with_it_and_no_stream_is_cut(
    cluster: ScalingCluster, http: httpx.AsyncClient
) -> None:
    async with asyncio.TaskGroup() as talking:
        early = [await begun(talking, Person(http, f"early-{n}", 3)) for n in range(ROOM + 2)]  # an answer takes 1 s
        await cluster.until(MOST)
        await everybody_has_users(http)  # those who talk are moved to the shard that came
        for person in early:
            person.over.set()
    seen = set()
    for _ in range(3):
        await asyncio.sleep(1.0)  # less than the window
        seen.add(await asyncio.to_thread(cluster.shards))
        await asyncio.gather(*(person.chat() for person in early))
    assert seen == {MOST}

    async with asyncio.TaskGroup() as talking:
        late = [await begun(talking, Person(http, f"late-{n}", FACTS)) for n in range(ROOM - 1)]  # on either shard
        await cluster.until(1)
        answered = [person.answers for person in late]
        await asyncio.sleep(4.0)  # whoever was on the other goes on here, with the next question
        for person in late:
            person.over.set()
    assert all(person.answers > before for person, before in zip(late, answered, strict=True))
    await asyncio.gather(*(person.chat() for person in early))
    await cluster.until(0)


async def everybody_has_users(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(30):
        while True:
            shards = (await http.get("/status")).json()["shards"]
            if len(shards) == MOST and all(shard["users"] for shard in shards):
                return
            await asyncio.sleep(0.2)


async def begun(talking: asyncio.TaskGroup, person: Person) -> Person:
    """Who has told everything, and asks one question after the other until it is over."""
    await person.tell()
    talking.create_task(person.chat_until_over())
    return person


def test_no_more_shards_may_be_allowed_than_there_are_to_begin_with() -> None:
    with pytest.raises(StartupError, match="MEMSHARD_MAX_SHARDS is below MEMSHARD_SHARDS"):
        Settings.from_environment(shards=3, max_shards=2)
    with pytest.raises(StartupError, match="MEMSHARD_MAX_SHARDS must say how many"):
        Settings.from_environment(shards=0)
    assert how_many(Settings(shards=3))["num_replicas"] == 3
