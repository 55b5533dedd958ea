"""One shard at a time moves users away, and who moved lately is known to all."""

from __future__ import annotations

import asyncio
import uuid

from redis.asyncio import Redis

from sharding.ids import ShardId, UserId
from sharding.keys import KeySpace
from sharding.move_turns import MoveTurns
from sharding.rebalance import HOUR_S, Moved

ONE, OTHER = ShardId("one"), ShardId("other")


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def turns(redis: Redis, clock: Clock | None = None) -> MoveTurns:
    return MoveTurns(redis, KeySpace(uuid.uuid4().hex, "m"), clock or Clock())


async def test_of_many_who_ask_at_once_one_has_the_turn_and_may_ask_again(redis: Redis) -> None:
    shared = turns(redis)
    names = [ShardId(f"s{n}") for n in range(16)]
    taken = await asyncio.gather(*(shared.take(name, 60.0) for name in names))
    assert sum(taken) == 1
    holder = names[taken.index(True)]
    assert await shared.take(holder, 60.0)
    assert not await shared.take(ONE, 60.0)


async def test_a_turn_that_is_not_renewed_runs_out(redis: Redis) -> None:
    shared = turns(redis)
    assert await shared.take(ONE, 60.0)
    assert await shared.take(ONE, 0.02)  # shorter than before, too
    async with asyncio.timeout(10):
        while not await shared.take(OTHER, 60.0):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_who_moved_within_the_hour_is_remembered_and_nobody_else(redis: Redis) -> None:
    clock = Clock()
    shared = turns(redis, clock)
    await shared.begun(UserId("ada"))
    clock.now += HOUR_S - 1
    await shared.begun(UserId("bob \ud800"))
    assert await shared.lately() == [Moved(UserId("ada"), 1_000_000.0), Moved(UserId("bob \ud800"), clock.now)]
    clock.now += 2
    assert [moved.user for moved in await shared.lately()] == ["bob \ud800"]
