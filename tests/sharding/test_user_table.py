"""A shard serves its own users only, from memory while its lease stands, and loads each once."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from people import ALICE, BOB, ELSEWHERE, HERE
from real_valkey import Valkey
from redis.asyncio import Redis

from sharding.client import connect
from sharding.directory import Directory
from sharding.errors import Busy, Unavailable, WrongShard
from sharding.facts import Fact, FactStore
from sharding.ids import Placement, ShardId, UserId
from sharding.keys import KeySpace
from sharding.lease import Lease
from sharding.user_memory import UserTable

CAROL = UserId("carol")
TTL_S, GRACE_S = 10.0, 30.0


class Shard:
    """A table with a clock that stands still unless told, and counts of what it asked Redis."""

    def __init__(self, client: Redis, keys: KeySpace, capacity: int = 2) -> None:
        self.now = 1000.0
        self.lookups: list[UserId] = []
        self.loads: list[UserId] = []
        shard = self

        class CountingDirectory(Directory):
            async def lookup(self, user: UserId) -> Placement | None:
                shard.lookups.append(user)
                return await super().lookup(user)

        class CountingStore(FactStore):
            async def load(self, user: UserId) -> list[Fact]:
                shard.loads.append(user)
                return await super().load(user)

        self.directory = CountingDirectory(client, keys)
        self.store = CountingStore(client, keys)
        lease = Lease(TTL_S, GRACE_S, clock=lambda: self.now)
        self.table = UserTable(HERE, self.directory, self.store, lease, dim=2, capacity=capacity)
        self.beat()

    def beat(self) -> None:
        self.table.lease.acknowledged(self.now)

    async def owns(self, user: UserId, *texts: str) -> Placement:
        placement = await self.directory.claim(user, HERE, None)
        await self.store.append(placement, texts, "turn", datetime.now(UTC))
        return placement


@pytest.fixture
async def shard(redis: Redis, keys: KeySpace) -> AsyncIterator[Shard]:
    shard = Shard(redis, keys)
    yield shard
    shard.table.check_integrity()


async def test_the_first_touch_loads_the_facts_and_later_ones_ask_nobody(shard: Shard) -> None:
    placement = await shard.owns(ALICE, "a", "b")
    for _ in range(3):
        async with shard.table.use(placement) as memory:
            assert [fact.text for fact in memory.facts] == ["a", "b"]
    assert (shard.lookups, shard.loads) == ([ALICE], [ALICE])


async def test_concurrent_first_touches_load_once_and_share_the_memory(shard: Shard) -> None:
    placement = await shard.owns(ALICE, "a")
    memories = await asyncio.gather(*(shard.table.get(placement) for _ in range(32)))
    assert len({id(memory) for memory in memories}) == 1
    assert shard.loads == [ALICE]


async def test_one_who_gives_up_does_not_stop_the_load_for_the_others(shard: Shard) -> None:
    placement = await shard.owns(ALICE, "a")
    first, second = (asyncio.create_task(shard.table.get(placement)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert len(await second) == 1
    assert shard.loads == [ALICE]


async def test_a_placement_of_another_shard_is_refused(shard: Shard) -> None:
    await shard.owns(ALICE)
    with pytest.raises(WrongShard):
        await shard.table.get(Placement(ALICE, ELSEWHERE, 1))
    assert shard.lookups == []


async def test_a_placement_that_the_directory_does_not_know_is_refused(shard: Shard) -> None:
    await shard.owns(ALICE)
    for placement in (Placement(BOB, HERE, 1), Placement(ALICE, HERE, 7)):
        with pytest.raises(WrongShard):
            await shard.table.get(placement)
    assert len(shard.table) == 0


async def test_an_epoch_older_than_the_one_held_is_refused_without_asking(shard: Shard) -> None:
    old = await shard.owns(ALICE)
    new = await shard.directory.claim(ALICE, HERE, old)
    await shard.table.get(new)
    asked = list(shard.lookups)
    with pytest.raises(WrongShard):
        await shard.table.get(old)
    assert shard.lookups == asked


async def test_a_user_who_came_back_is_loaded_again(shard: Shard) -> None:
    old = await shard.owns(ALICE, "a")
    await shard.table.get(old)
    away = await shard.directory.switch(old, ELSEWHERE)
    await shard.store.append(away, ["told elsewhere"], "t", datetime.now(UTC))
    back = await shard.directory.switch(away, HERE)
    memory = await shard.table.get(back)
    assert [fact.text for fact in memory.facts] == ["a", "told elsewhere"]


async def test_an_invented_epoch_does_not_displace_what_is_held(shard: Shard) -> None:
    placement = await shard.owns(ALICE)
    memory = await shard.table.get(placement)
    with pytest.raises(WrongShard):
        await shard.table.get(Placement(ALICE, HERE, 99))
    assert await shard.table.get(placement) is memory


async def test_when_the_lease_ran_out_the_directory_is_asked_before_serving(shard: Shard) -> None:
    placement = await shard.owns(ALICE)
    memory = await shard.table.get(placement)
    shard.now += TTL_S
    assert not shard.table.lease.valid()
    assert await shard.table.get(placement) is memory
    assert await shard.table.get(placement) is memory
    assert shard.lookups == [ALICE] * 3
    assert shard.loads == [ALICE]


async def test_a_process_that_was_paused_does_not_serve_a_user_it_lost(shard: Shard) -> None:
    placement = await shard.owns(ALICE)
    await shard.table.get(placement)
    shard.now += TTL_S
    await shard.directory.claim(ALICE, ELSEWHERE, placement)
    shard.beat()  # the heartbeat may be the first to run again: a valid lease proves nothing about the gap
    assert shard.table.lease.valid()
    with pytest.raises(WrongShard):
        await shard.table.get(placement)
    assert len(shard.table) == 0


async def test_once_verified_in_a_new_lease_a_user_is_served_without_asking(shard: Shard) -> None:
    placement = await shard.owns(ALICE)
    await shard.table.get(placement)
    shard.now += TTL_S
    shard.beat()
    await shard.table.get(placement)
    asked = list(shard.lookups)
    await shard.table.get(placement)
    assert shard.lookups == asked


async def test_many_who_ask_after_a_lapse_verify_once(shard: Shard) -> None:
    placement = await shard.owns(ALICE)
    await shard.table.get(placement)
    shard.now += TTL_S
    await asyncio.gather(*(shard.table.get(placement) for _ in range(32)))
    assert shard.lookups == [ALICE, ALICE]


async def test_without_redis_a_held_user_is_served_until_the_grace_ends(own_valkey: Valkey, keys: KeySpace) -> None:
    async with connect(own_valkey.url, retries=0) as client:
        shard = Shard(client, keys)
        placement, unseen = await shard.owns(ALICE), await shard.owns(BOB)
        memory = await shard.table.get(placement)
        own_valkey.stop()
        assert await shard.table.get(placement) is memory
        with pytest.raises(Unavailable):
            await shard.table.get(unseen)
        shard.now += TTL_S + GRACE_S - 0.5
        away = replace(placement, redis_away=True)
        for _ in range(3):
            assert await shard.table.get(away) is memory
        assert shard.lookups == [ALICE, BOB, ALICE]  # not every request waits for Redis to fail again
        shard.now += 0.5
        with pytest.raises(Unavailable):
            await shard.table.get(away)
        shard.table.check_integrity()


async def test_a_shard_that_is_alone_in_not_reaching_redis_serves_nobody_whose_lease_ran_out(
    own_valkey: Valkey, keys: KeySpace
) -> None:
    async with connect(own_valkey.url, retries=0) as client:
        shard = Shard(client, keys)
        placement = await shard.owns(ALICE)
        memory = await shard.table.get(placement)
        own_valkey.stop()
        shard.now += TTL_S
        with pytest.raises(Unavailable) as refused:
            await shard.table.get(placement)
        assert "unconfirmed" in refused.value.details
        assert await shard.table.get(replace(placement, redis_away=True)) is memory


async def test_without_redis_a_user_not_verified_since_a_gap_is_refused(own_valkey: Valkey, keys: KeySpace) -> None:
    async with connect(own_valkey.url, retries=0) as client:
        shard = Shard(client, keys)
        placement = await shard.owns(ALICE)
        await shard.table.get(placement)
        shard.now += TTL_S
        shard.beat()
        own_valkey.stop()
        with pytest.raises(Unavailable):
            await shard.table.get(placement)


async def test_beyond_its_capacity_the_least_recently_used_user_is_evicted(shard: Shard) -> None:
    alice, bob, carol = await shard.owns(ALICE), await shard.owns(BOB), await shard.owns(CAROL)
    for placement in (alice, bob, alice, carol, alice):
        await shard.table.get(placement)
    assert [memory.placement for memory in shard.table.memories()] == [carol, alice]
    assert shard.loads == [ALICE, BOB, CAROL]


async def test_a_user_in_use_is_not_evicted_and_a_full_table_is_busy(shard: Shard) -> None:
    alice, bob, carol = await shard.owns(ALICE), await shard.owns(BOB), await shard.owns(CAROL)
    async with shard.table.use(alice) as memory:
        async with shard.table.use(alice):
            pass
        await shard.table.get(bob)
        async with shard.table.use(carol):
            with pytest.raises(Busy):
                await shard.table.get(bob)
        await shard.table.get(bob)
        assert await shard.table.get(alice) is memory
    await shard.table.get(carol)
    await shard.table.get(bob)
    assert len(shard.table) == 2


async def test_users_loading_at_once_never_exceed_the_capacity(redis: Redis, keys: KeySpace) -> None:
    shard = Shard(redis, keys, capacity=3)
    placements = [await shard.owns(UserId(f"u{i}")) for i in range(8)]

    async def touch(placement: Placement) -> None:
        async with shard.table.use(placement):
            shard.table.check_integrity()

    outcomes = await asyncio.gather(*map(touch, placements), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None)] * 3 + [Busy] * 5
    shard.table.check_integrity()


async def test_an_error_in_use_gives_the_place_back(shard: Shard) -> None:
    alice = await shard.owns(ALICE)
    with pytest.raises(ZeroDivisionError):
        async with shard.table.use(alice):
            raise ZeroDivisionError
    for user in (BOB, CAROL):
        await shard.table.get(await shard.owns(user))
    assert len(shard.table) == 2


async def test_a_dropped_user_is_asked_for_again(shard: Shard) -> None:
    placement = await shard.owns(ALICE)
    await shard.table.get(placement)
    shard.table.drop(placement)
    await shard.directory.switch(placement, ELSEWHERE)
    with pytest.raises(WrongShard):
        await shard.table.get(placement)


async def test_a_user_dropped_while_loading_does_not_become_resident(shard: Shard) -> None:
    placement = await shard.owns(ALICE)
    loading = asyncio.create_task(shard.table.get(placement))
    await asyncio.sleep(0)
    shard.table.drop(placement)
    with pytest.raises(WrongShard):
        await loading
    assert len(shard.table) == 0


async def test_a_stale_placement_that_was_refused_does_not_take_the_user_from_those_who_write_under_the_newer_one(
    shard: Shard,
) -> None:
    old = await shard.owns(ALICE)
    new = await shard.directory.claim(ALICE, HERE, old)
    async with shard.table.use(new) as memory:
        with pytest.raises(WrongShard):
            await shard.table.get(old)
        shard.table.drop(old)
        assert await shard.table.get(new) is memory


async def test_an_older_epoch_still_loading_does_not_displace_a_newer_one(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = await shard.owns(ALICE)
    loaded, may_finish = asyncio.Event(), asyncio.Event()
    load = shard.store.load

    async def slow_load(user: UserId) -> list[Fact]:
        facts = await load(user)
        loaded.set()
        await may_finish.wait()
        return facts

    monkeypatch.setattr(shard.store, "load", slow_load)
    overtaken = asyncio.create_task(shard.table.get(old))
    await loaded.wait()
    monkeypatch.setattr(shard.store, "load", load)
    new = await shard.directory.claim(ALICE, HERE, await shard.directory.claim(ALICE, ShardId("x"), old))
    await shard.table.get(new)
    may_finish.set()
    with pytest.raises(WrongShard):
        await overtaken
    assert (await shard.table.get(new)).placement == new
