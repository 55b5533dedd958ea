"""`memshard simulate`: a million users on a thousand shards, without tensors: the real directory and the real policies.

    arrive     everybody is claimed, the first of them as gateways do, the others in pipelines; Redis is measured
    live       a virtual minute after the other: traffic by popularity, memories that grow, newcomers, shards that die;
               every claim and every switch goes through the directory, the rebalancing policy says who moves

Time is virtual but for the first claims, which are timed. Popularity is Zipf's, but nobody asks more than `BUSIEST` of
what a mean shard is asked: a user cannot be split, so one who asked more would be beyond any placement.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sharding.directory import Directory
from sharding.ids import Placement, ShardId, UserId
from sharding.keys import KeySpace
from sharding.placement import PlacementPolicy, ShardReport
from sharding.rebalance import Move, Moved, RebalancingPolicy, ShardLoad, UserLoad
from sharding.scripts import script

FACT_BYTES = 25 * 131_072  # 25 tokens of Llama 3 8B's KV in bf16
BUDGET_BYTES = 160 << 30  # device and host memory of a shard
FACTS = 20.0  # a user's, when they arrive: mean, geometric
ASKS_PER_MINUTE = 0.2  # of a mean user
TOLD_PER_ASK = 0.1  # facts
NEWCOMERS = 0.0005  # of all users, a minute
BUSIEST = 0.05
CLAIMS_AT_ONCE = 64
TIMED_CLAIMS = 200_000
A_PIPELINE = 500  # claims
CLAIMS_A_REPORT = 64  # a shard's heartbeat is as old as so many claims of it, at most
MEMORY = 0.8  # of the last minutes' load, in the average that is balanced by
ASKED_USERS = 300  # of an overloaded shard, that the policy is shown

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Minute:
    """Largest over mean of all shards; users who moved; users who were claimed anew because their shard had died."""

    at: int
    bytes_ratio: float
    load_ratio: float
    moves: int
    reclaimed: int
    died: int


@dataclass(slots=True)
class Simulated:
    users: int
    shards: int
    claims_per_s: float  # of those that were timed
    claim_s: tuple[float, float]  # median, p99
    redis_bytes_per_user: float
    choose_s: float  # of the gateway's core, for one new user
    minute_s: float  # of this machine, for a virtual one: median
    minutes: list[Minute] = field(default_factory=list)


class World:
    """Users as rows of arrays; `shard_of` is an index into `shards`, -1 for nobody."""

    def __init__(self, redis: Any, keys: KeySpace, users: int, shards: int, zipf: float, seed: int) -> None:
        self.directory = Directory(redis, keys)
        self._redis, self._keys = redis, keys
        self.random = np.random.default_rng(seed)
        most = int(users * 1.2)
        weights = (np.arange(1, most + 1, dtype=np.float64)) ** -zipf
        rate = weights / weights[:users].sum() * users * ASKS_PER_MINUTE
        self.rate = np.minimum(rate, BUSIEST * users * ASKS_PER_MINUTE / shards)
        self.random.shuffle(self.rate)
        self.bytes = np.zeros(most)
        self.shard_of = np.full(most, -1, np.int64)
        self.epoch = np.zeros(most, np.int64)
        self.count = 0
        self.shards = [ShardId(f"shard-{n:05d}") for n in range(shards)]
        self.alive = np.ones(shards, bool)
        self.load = np.zeros(shards)
        self.lost: set[int] = set()  # whose shard has died, and who have asked nothing since
        self.policy = PlacementPolicy()

    def shard_bytes(self) -> Floats:
        return self._per_shard(self.bytes)

    def _per_shard(self, of_user: Floats) -> Floats:
        placed = self.shard_of[: self.count] >= 0
        where = self.shard_of[: self.count][placed]
        sums: Floats = np.bincount(where, of_user[: self.count][placed], minlength=len(self.shards)).astype(np.float64)
        return sums

    def reports(self) -> list[ShardReport]:
        held = self.shard_bytes()
        counts = np.bincount(self.shard_of[: self.count][self.shard_of[: self.count] >= 0], minlength=len(self.shards))
        return [
            ShardReport(
                shard=shard,
                model="simulated",
                ready=True,
                free_bytes=int(BUDGET_BYTES - held[at]),
                users=int(counts[at]),
                requests_in_flight=0,
            )
            for at, shard in enumerate(self.shards)
            if self.alive[at]
        ]

    async def claim(self, users: Iterable[int], times: list[float]) -> None:
        """Claims users, a burst at a time, each burst by heartbeats of its beginning."""
        todo = list(users)
        index = {shard: at for at, shard in enumerate(self.shards)}
        burst = CLAIMS_A_REPORT * max(1, int(self.alive.sum()))
        for start in range(0, len(todo), burst):
            choices = self.policy.choices(self.reports())
            some = todo[start : start + burst]
            queue = iter(some)

            async def work(queue: Any = queue, choices: Any = choices) -> None:
                for user in queue:
                    expected = self._placement(user)
                    began = time.perf_counter()
                    placement = await self.directory.claim(UserId(f"user-{user}"), choices.take(), expected)
                    times.append(time.perf_counter() - began)
                    self.shard_of[user] = index[placement.shard]
                    self.epoch[user] = placement.epoch

            await asyncio.gather(*(work() for _ in range(CLAIMS_AT_ONCE)))

    async def fill(self, users: range) -> None:
        """Claims newcomers by the same script and policy, many in one round trip: nobody times it."""
        claim = script(self._redis, "claim")
        index = {shard: at for at, shard in enumerate(self.shards)}
        choices = self.policy.choices(self.reports())
        for start in range(users.start, users.stop, A_PIPELINE):
            some = range(start, min(start + A_PIPELINE, users.stop))
            async with self._redis.pipeline(transaction=False) as pipe:
                for user in some:
                    await claim([self._keys.placement(UserId(f"user-{user}"))], [choices.take(), "", 0], client=pipe)
                told = await pipe.execute()
            self.shard_of[some.start : some.stop] = [index[ShardId(shard.decode())] for shard, _ in told]
            self.epoch[some.start : some.stop] = [epoch for _, epoch in told]

    def _placement(self, user: int) -> Placement | None:
        at = int(self.shard_of[user])
        if at < 0:
            return None
        return Placement(UserId(f"user-{user}"), self.shards[at], int(self.epoch[user]))

    def arrive(self, count: int) -> range:
        """The next so many users come, with the facts that they bring along."""
        first, last = self.count, min(self.count + count, len(self.bytes))
        self.bytes[first:last] = FACT_BYTES * self.random.geometric(1 / FACTS, last - first)
        self.count = last
        return range(first, last)

    def die(self, count: int) -> NDArray[np.int64]:
        """Shards end, and empty ones take their places; the users whose shard is gone."""
        dead = self.random.choice(np.flatnonzero(self.alive), count, replace=False)
        for at in dead:
            self.alive[at] = False
            self.shards.append(ShardId(f"shard-{len(self.shards):05d}"))
        self.alive = np.append(self.alive, np.ones(count, bool))
        self.load = np.append(self.load, np.full(count, np.nan))
        return np.flatnonzero(np.isin(self.shard_of[: self.count], dead))

    async def live(self, minute: int, dying: int, past: list[Moved], rebalancing: RebalancingPolicy) -> Minute:
        """One virtual minute."""
        newcomers = self.arrive(int(self.count * NEWCOMERS))
        orphans = self.die(dying)
        asks = self.random.poisson(self.rate[: self.count])
        # Who asks is claimed anew; orphans who ask nothing stay with the dead, as in Redis.
        self.lost |= set(orphans.tolist())
        lost = [user for user in self.lost if asks[user]]
        self.lost.difference_update(lost)
        await self.claim([*newcomers, *lost], [])
        self.bytes[: self.count] += FACT_BYTES * self.random.poisson(TOLD_PER_ASK * asks)
        now = self._per_shard(asks.astype(np.float64))
        self.load = np.where(np.isnan(self.load), now, MEMORY * self.load + (1 - MEMORY) * now)
        moves = await self._rebalance(minute, past, rebalancing)
        held, load = self.shard_bytes()[self.alive], self._per_shard(self.rate)[self.alive]
        return Minute(minute, float(held.max() / held.mean()), float(load.max() / load.mean()), moves, len(lost), dying)

    async def _rebalance(self, minute: int, past: list[Moved], rebalancing: RebalancingPolicy) -> int:
        held, load = self.shard_bytes(), self._per_shard(self.rate)
        shards = [
            ShardLoad(shard, int(held[at]), BUDGET_BYTES, float(load[at]))
            for at, shard in enumerate(self.shards)
            if self.alive[at]
        ]
        index = {shard: at for at, shard in enumerate(self.shards)}
        over = rebalancing.overloaded(shards)[: rebalancing.max_moves_at_once]
        users = {shard: self._users_of(index[shard]) for shard in over}
        moves = rebalancing.plan(shards, users, past, 60.0 * minute)
        await asyncio.gather(*(self._move(move, index) for move in moves))
        past.extend(Moved(move.user, 60.0 * minute) for move in moves)
        return len(moves)

    def _users_of(self, at: int) -> list[UserLoad]:
        mine = np.flatnonzero(self.shard_of[: self.count] == at)
        order = np.argsort(-(self.bytes[mine] / self.bytes[mine].mean() + self.rate[mine] / self.rate[mine].mean()))
        shown = mine[order[:ASKED_USERS]]
        return [UserLoad(UserId(f"user-{n}"), int(self.bytes[n]), float(self.rate[n])) for n in shown.tolist()]

    async def _move(self, move: Move, index: dict[ShardId, int]) -> None:
        user = int(move.user.partition("-")[2])
        placement = self._placement(user)
        assert placement is not None
        moved = await self.directory.switch(placement, move.target)
        self.shard_of[user], self.epoch[user] = index[moved.shard], moved.epoch


async def simulate(
    redis: Any,
    keys: KeySpace,
    *,
    users: int,
    shards: int,
    minutes: int,
    zipf: float,
    deaths_per_hour: float,
    seed: int,
    went_on: Callable[[str], None],
) -> Simulated:
    """Raises `Unavailable` where Redis is away."""
    world = World(redis, keys, users, shards, zipf, seed)
    empty = (await redis.info("memory"))["used_memory"]
    times: list[float] = []
    began = time.perf_counter()
    timed, step = min(users, TIMED_CLAIMS), max(1, users // 50)
    while world.count < timed:
        await world.claim(world.arrive(min(step, timed - world.count)), times)
        went_on(f"{world.count} users have arrived")
    passed = time.perf_counter() - began
    while world.count < users:
        await world.fill(world.arrive(min(step, users - world.count)))
        went_on(f"{world.count} users have arrived")
    used = (await redis.info("memory"))["used_memory"] - empty
    median, p99 = (float(value) for value in np.percentile(times, (50, 99)))
    result = Simulated(users, shards, timed / passed, (median, p99), used / users, _choose_s(world), 0.0)
    rebalancing = RebalancingPolicy(max_moves_per_hour=20 * shards, max_moves_at_once=max(16, shards // 2))
    past: list[Moved] = []
    world.load[:] = np.nan
    plans: list[float] = []
    for minute in range(minutes):
        dying = int(world.random.poisson(deaths_per_hour / 60))
        began = time.perf_counter()
        result.minutes.append(await world.live(minute, dying, past, rebalancing))
        plans.append(time.perf_counter() - began)
        past = [moved for moved in past if 60.0 * minute - moved.at_s < 3600]
        went_on(f"minute {minute + 1} of {minutes}")
    result.minute_s = float(np.median(plans)) if plans else 0.0
    return result


def _choose_s(world: World) -> float:
    choices, count = world.policy.choices(world.reports()), 1_000
    began = time.perf_counter()
    for _ in range(count):
        choices.take()
    return (time.perf_counter() - began) / count
