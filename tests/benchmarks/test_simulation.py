"""A small world on a real directory: everybody has a living owner, who is the one that Redis names."""

from __future__ import annotations

from pathlib import Path

from benchmarks.simulation import Simulated, World, simulate
from sharding.client import connect
from sharding.directory import Directory
from sharding.ids import ShardId, UserId
from sharding.keys import KeySpace
from sharding.rebalance import Moved, RebalancingPolicy
from tests.sharding.real_valkey import running_valkey


async def test_after_arrivals_deaths_and_moves_redis_names_the_same_living_owners(tmp_path: Path) -> None:
    with running_valkey(tmp_path) as server:
        async with connect(server.url) as redis:
            directory = Directory(redis, keys := KeySpace("n", "m"))
            world = World(redis, keys, users=600, shards=6, zipf=1.0, seed=1)
            await world.claim(world.arrive(300), [])
            await world.fill(world.arrive(300))
            past: list[Moved] = []
            minutes = [await world.live(at, int(at == 2), past, RebalancingPolicy()) for at in range(6)]
            assert sum(minute.died for minute in minutes) == 1
            assert sum(minute.reclaimed for minute in minutes) > 0
            assert past, "the empty shard that replaced the dead one takes users"
            for user in range(world.count):
                placement = await directory.lookup(UserId(f"user-{user}"))
                assert placement is not None
                at = world.shards.index(ShardId(placement.shard))
                assert (at, placement.epoch) == (world.shard_of[user], world.epoch[user])
                assert world.alive[at] or user in world.lost


async def test_the_same_seed_places_and_moves_alike(tmp_path: Path) -> None:
    async def once(namespace: str) -> Simulated:
        async with connect(server.url) as redis:
            sizes = {"users": 300, "shards": 5, "minutes": 4, "zipf": 1.0, "deaths_per_hour": 0.0, "seed": 3}
            return await simulate(redis, KeySpace(namespace, "m"), **sizes, went_on=lambda _: None)

    with running_valkey(tmp_path) as server:
        one, other = await once("a"), await once("b")
    assert [minute.moves for minute in one.minutes] == [minute.moves for minute in other.minutes]
    assert one.claims_per_s > 0
    assert one.redis_bytes_per_user > 0
