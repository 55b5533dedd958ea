"""What gateways leave for each other in Redis."""

from __future__ import annotations

from redis.asyncio import Redis

from sharding.keys import KeySpace
from sharding.pages import KEEP_S, Pages


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


async def test_each_gateways_last_page_is_read_by_all(redis: Redis, keys: KeySpace) -> None:
    one, two = Pages(redis, keys), Pages(redis, keys)
    await one.publish("one", "old")
    await one.publish("one", "new")
    await two.publish("two", "ünïcode")
    assert await one.read() == await two.read() == {"one": "new", "two": "ünïcode"}


async def test_a_page_that_is_not_renewed_is_forgotten(redis: Redis, keys: KeySpace) -> None:
    clock = Clock()
    pages = Pages(redis, keys, clock)
    await pages.publish("gone", "page")
    clock.now += KEEP_S + 1
    await pages.publish("here", "page")
    assert await pages.read() == {"here": "page"}
    assert await redis.hkeys(keys.pages()) == [b"here"]


async def test_nothing_stays_of_a_cluster_that_is_gone(redis: Redis, keys: KeySpace) -> None:
    await Pages(redis, keys).publish("one", "page")
    assert 0 < await redis.ttl(keys.pages()) <= 10 * KEEP_S
