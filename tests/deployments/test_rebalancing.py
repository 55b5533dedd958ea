"""A shard that carries too much moves users of its own away, whatever the others believe; and cold ones when full."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from moving_pair import QUESTION, Pair, two_shards
from redis.asyncio import Redis
from tiered_shard import KEYS, TieredShard

from deployments.deterministic import mark
from deployments.rebalancer import Rebalancer, load_of, memory_of
from deployments.usage import HALF_LIFE_S, Rates
from sharding.cooling import CoolingPolicy
from sharding.ids import Placement, ShardId, UserId
from sharding.move_turns import MoveTurns
from sharding.placement import ShardReport
from sharding.rebalance import RebalancingPolicy

PEOPLE = [UserId(f"person-{n}") for n in range(6)]
TEXT = "boat {} is called Anna"


class Town:
    """Two shards, all users on the first, and who moves them."""

    def __init__(self, pair: Pair, redis: Redis) -> None:
        self.pair = pair
        self.turns = MoveTurns(redis, KEYS)
        self.clock = Clock()
        self.placements: dict[UserId, Placement] = {}
        for shard in (pair.one, pair.other):
            rates = shard.shard.usage.rates
            rates._clock = self.clock

    def rebalancer(self, shard: TieredShard, cooling: CoolingPolicy | None = None) -> Rebalancer:
        return Rebalancer(
            shard.me,
            shard.shard.mover,
            shard.shard.usage.rates,
            self.turns,
            settle_s=60.0,
            active_s=600.0,
            balancing=RebalancingPolicy(max_moves_at_once=99, rest_s=600.0),
            cooling=cooling,
        )

    async def beat(self) -> None:
        for shard in (self.pair.one, self.pair.other):
            status = {
                "tiers": shard.shard.tiers.usage(),
                "active_bytes": shard.shard.ledger.bytes_used_within(600.0),
                "load_per_s": shard.shard.usage.rates.all(),
            }
            report = ShardReport(
                shard=shard.me, model="m", ready=True, free_bytes=0, users=0, requests_in_flight=0, status=status
            )
            await shard.directory.heartbeat(report.model_dump_json(), shard.me, 60.0)

    async def fill(self) -> None:
        for n, user in enumerate(PEOPLE):
            self.placements[user] = await self.pair.one.owns(user)
            await self.pair.one.told(self.placements[user], TEXT.format(n))

    async def owners(self) -> list[ShardId]:
        found = [await self.pair.one.directory.lookup(user) for user in PEOPLE]
        return [placement.shard for placement in found if placement is not None]

    async def everybody_is_served(self) -> None:
        for n, user in enumerate(PEOPLE):
            placement = await self.pair.one.directory.lookup(user)
            assert placement is not None
            read, _ = await self.pair.shards[placement.shard].asked(placement, QUESTION)
            assert read == [mark(TEXT.format(n))]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def town(own_valkey: tuple[Redis, str], tmp_path: Path) -> AsyncIterator[Town]:
    async with AsyncExitStack() as opened:
        pair = await two_shards(opened, own_valkey, tmp_path)
        pair.meet()
        town = Town(pair, own_valkey[0])
        await town.fill()
        await town.beat()
        yield town


async def test_an_overloaded_shard_shares_its_users_with_an_idle_one(town: Town) -> None:
    rebalancer = town.rebalancer(town.pair.one)
    assert await rebalancer.once() == 3
    assert sorted(await town.owners()) == [town.pair.one.me] * 3 + [town.pair.other.me] * 3
    assert rebalancer.counters == {"rebalanced_users": 3, "cold_users_moved": 0, "planned_moves_failed": 0}
    assert town.pair.one.shard.courier.counters["sent_chunks"] == 3
    await town.beat()
    rebalancer._settled_at = 0.0
    assert await rebalancer.once() == 0, "what is balanced stays"
    await town.everybody_is_served()


async def test_a_shard_that_is_not_overloaded_does_nothing(town: Town) -> None:
    assert await town.rebalancer(town.pair.other).once() == 0
    assert await town.turns.take(ShardId("anybody"), 1.0), "it took a turn that it had no use for"


async def test_views_that_are_too_old_move_nobody_twice(town: Town) -> None:
    """Heartbeats tell of none of the moves."""
    rebalancer = town.rebalancer(town.pair.one)
    assert await rebalancer.once() == 3
    assert await rebalancer.once() == 0
    assert len(set(await town.owners())) == 2
    await town.everybody_is_served()


async def test_only_one_moves_users_at_a_time_and_the_next_when_heartbeats_tell_of_it(town: Town) -> None:
    assert await town.turns.take(ShardId("another"), 60.0)
    assert await town.rebalancer(town.pair.one).once() == 0
    assert await town.turns.take(ShardId("another"), 0.01)
    async with asyncio.timeout(10):
        while not await town.rebalancer(town.pair.one).once():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not await town.turns.take(ShardId("another"), 1.0)


async def test_users_who_are_elsewhere_by_now_are_passed_over(town: Town) -> None:
    stale = town.placements[PEOPLE[0]]
    await town.pair.one.directory.switch(stale, town.pair.other.me)
    rebalancer = town.rebalancer(town.pair.one)
    assert await rebalancer.once() <= 3
    assert rebalancer.counters["planned_moves_failed"] == 0
    await town.everybody_is_served()


async def test_cold_users_leave_a_full_shard_before_they_go_to_its_disk(town: Town) -> None:
    device = town.pair.one.shard.tiers.device
    device.budget_bytes = device.bytes + 1
    await town.pair.other.owns("busy")
    town.pair.other.shard.usage.rates.served(UserId("busy"))  # as much load there as here: nothing to balance
    await town.beat()
    cooling = CoolingPolicy(begin=0.9, settle=0.5, room=0.9, cold_s=0.0)
    rebalancer = town.rebalancer(town.pair.one, cooling)
    rebalancer._balancing = RebalancingPolicy(begin=99.0)
    moved = await rebalancer.once()
    assert 0 < moved < len(PEOPLE)
    assert rebalancer.counters["cold_users_moved"] == moved
    assert town.pair.one.shard.courier.counters["sent_chunks"] == moved
    first = [user for user, shard in zip(PEOPLE, await town.owners(), strict=True) if shard == town.pair.other.me]
    assert first == PEOPLE[:moved], "the coldest first"
    device.budget_bytes = 1 << 20
    await town.everybody_is_served()


def test_a_heartbeat_that_does_not_tell_of_load_is_passed_over() -> None:
    report = ShardReport(shard=ShardId("old"), model="m", ready=True, free_bytes=0, users=0, requests_in_flight=0)
    assert load_of(report) is None
    assert memory_of(report) is None


def test_a_rate_halves_when_nobody_asks_and_is_forgotten_with_the_user() -> None:
    clock = Clock()
    rates = Rates(clock)
    ada = UserId("ada")
    for _ in range(8):
        rates.served(ada)
    before = rates.of(ada)
    assert before > 0
    clock.now += HALF_LIFE_S
    assert rates.of(ada) == pytest.approx(before / 2)
    assert rates.all() == rates.of(ada)
    rates.forget(ada)
    assert (rates.all(), rates.users()) == (0.0, [])


def test_a_steady_rate_is_found() -> None:
    clock = Clock()
    rates = Rates(clock)
    for _ in range(int(20 * HALF_LIFE_S)):
        clock.now += 0.5
        rates.served(UserId("ada"))
    assert rates.of(UserId("ada")) == pytest.approx(2.0, rel=0.02)
