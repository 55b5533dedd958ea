import asyncio

import pytest
from people import ALICE, BOB, ELSEWHERE, HERE
from real_valkey import Valkey
from redis.asyncio import Redis

from sharding.client import connect
from sharding.directory import Directory
from sharding.errors import StartupError, Unavailable, WrongShard
from sharding.ids import Placement, ShardId, UserId
from sharding.keys import KeySpace
from sharding.placement import ShardReport


def report(shard: ShardId, **fields) -> str:
    base = {"shard": shard, "model": "m", "ready": True, "free_bytes": 7, "users": 0, "requests_in_flight": 0}
    return ShardReport(**(base | fields)).model_dump_json()


async def test_a_new_user_has_no_placement(directory: Directory) -> None:
    assert await directory.lookup(ALICE) is None


async def test_a_claimed_user_is_found_at_its_owner(directory: Directory) -> None:
    placement = await directory.claim(ALICE, HERE, None)
    assert placement == Placement(ALICE, HERE, 1)
    assert await directory.lookup(ALICE) == placement


async def test_of_many_claims_at_once_one_wins_and_all_hear_who(directory: Directory) -> None:
    claims = [directory.claim(ALICE, ShardId(f"s{i}"), None) for i in range(32)]
    assert len(set(await asyncio.gather(*claims))) == 1


async def test_a_living_owner_is_not_displaced(directory: Directory, placement: Placement) -> None:
    assert await directory.claim(ALICE, ELSEWHERE, None) == placement
    assert await directory.claim(ALICE, ELSEWHERE, Placement(ALICE, HERE, 99)) == placement


async def test_a_dead_owner_is_replaced_under_the_next_epoch(directory: Directory, placement: Placement) -> None:
    assert await directory.claim(ALICE, ELSEWHERE, placement) == Placement(ALICE, ELSEWHERE, 2)


async def test_a_switch_hands_the_user_over_under_the_next_epoch(directory: Directory, placement: Placement) -> None:
    moved = await directory.switch(placement, ELSEWHERE)
    assert moved == await directory.lookup(ALICE) == Placement(ALICE, ELSEWHERE, 2)


async def test_a_switch_repeated_after_a_lost_answer_succeeds(directory: Directory, placement: Placement) -> None:
    assert await directory.switch(placement, ELSEWHERE) == await directory.switch(placement, ELSEWHERE)


async def test_a_stale_placement_cannot_be_switched(directory: Directory, placement: Placement) -> None:
    await directory.switch(placement, ELSEWHERE)
    with pytest.raises(WrongShard):
        await directory.switch(placement, ShardId("third"))


async def test_a_released_user_has_no_owner_but_keeps_its_epoch(directory: Directory, placement: Placement) -> None:
    await directory.release(placement)
    assert await directory.lookup(ALICE) is None
    assert await directory.claim(ALICE, HERE, None) == Placement(ALICE, HERE, 2)


async def test_a_stale_release_changes_nothing(directory: Directory, placement: Placement) -> None:
    moved = await directory.switch(placement, ELSEWHERE)
    await directory.release(placement)
    assert await directory.lookup(ALICE) == moved


async def test_users_with_awkward_ids_are_kept_apart(directory: Directory) -> None:
    users = [UserId(id) for id in ("a}", "{a", "a:owner", "a b", "\ud800", "A", "a")]
    placements = [await directory.claim(user, ShardId(f"s{i}"), None) for i, user in enumerate(users)]
    assert [await directory.lookup(user) for user in users] == placements


async def test_the_same_user_is_placed_separately_for_each_model(redis: Redis, placement: Placement) -> None:
    other = Directory(redis, KeySpace("elsewhere", "other"))
    assert await other.lookup(ALICE) is None


async def test_a_heartbeat_makes_a_shard_listed_with_its_report(directory: Directory) -> None:
    await directory.heartbeat(report(HERE, status={"chunks": 3}), HERE, 30)
    shards = await directory.shards()
    assert list(shards) == [HERE]
    assert shards[HERE].free_bytes == 7
    assert shards[HERE].status == {"chunks": 3}


async def test_a_shard_whose_heartbeat_ran_out_is_gone_and_forgotten(
    directory: Directory, redis: Redis, keys: KeySpace
) -> None:
    await directory.heartbeat(report(HERE), HERE, 0.02)
    await directory.heartbeat(report(ELSEWHERE), ELSEWHERE, 30)
    await asyncio.sleep(0.05)
    assert list(await directory.shards()) == [ELSEWHERE]
    assert await redis.smembers(keys.shards()) == {ELSEWHERE.encode()}


async def test_after_all_heartbeats_ran_out_none_is_gone_until_they_are_whole_again(
    directory: Directory, redis: Redis, keys: KeySpace
) -> None:
    """As after Redis was away: its clock went on, and the shards could not beat."""
    for shard in (HERE, ELSEWHERE):
        await directory.heartbeat(report(shard), shard, 0.02)
    await asyncio.sleep(0.05)
    assert {id: found.ready for id, found in (await directory.shards()).items()} == {HERE: False, ELSEWHERE: False}
    await directory.heartbeat(report(HERE), HERE, 0.3)
    assert {id: found.ready for id, found in (await directory.shards()).items()} == {HERE: True, ELSEWHERE: False}
    while await redis.exists(keys.settling()):
        await directory.heartbeat(report(HERE), HERE, 0.3)
        await asyncio.sleep(0.05)
    assert list(await directory.shards()) == [HERE]


async def test_a_retired_shard_is_gone_at_once(directory: Directory) -> None:
    await directory.heartbeat(report(HERE), HERE, 30)
    await directory.retire(HERE)
    assert await directory.shards() == {}


async def test_a_report_nobody_can_read_does_not_hide_the_other_shards(directory: Directory) -> None:
    await directory.heartbeat("{", HERE, 30)
    await directory.heartbeat(report(ELSEWHERE), ELSEWHERE, 30)
    assert list(await directory.shards()) == [ELSEWHERE]


async def test_without_redis_every_call_is_unavailable_with_a_sentence(own_valkey: Valkey, keys: KeySpace) -> None:
    async with connect(own_valkey.url, retries=0) as client:
        directory = Directory(client, keys)
        placement = await directory.claim(ALICE, HERE, None)
        own_valkey.stop()
        for call in (
            directory.lookup(ALICE),
            directory.claim(ALICE, HERE, None),
            directory.switch(placement, ELSEWHERE),
            directory.release(placement),
            directory.heartbeat(report(HERE), HERE, 1),
            directory.shards(),
            directory.retire(HERE),
        ):
            with pytest.raises(Unavailable, match=r"Redis could not be reached to .*; retry shortly") as caught:
                await call
            assert caught.value.retry_after_s > 0


async def test_a_redis_that_hangs_is_unavailable_after_the_stated_time(own_valkey: Valkey, keys: KeySpace) -> None:
    async with connect(own_valkey.url, timeout_s=0.1, retries=1) as client:
        directory = Directory(client, keys)
        await directory.claim(ALICE, HERE, None)
        own_valkey.hang()
        async with asyncio.timeout(2):
            with pytest.raises(Unavailable, match="could not be reached"):
                await directory.lookup(ALICE)


async def test_a_restarted_redis_gets_the_scripts_again(directory: Directory, redis: Redis) -> None:
    await directory.claim(ALICE, HERE, None)
    await redis.script_flush()
    assert await directory.claim(BOB, HERE, None) == Placement(BOB, HERE, 1)


def test_a_url_that_is_not_one_of_redis_stops_the_start() -> None:
    with pytest.raises(StartupError, match="Redis URL"):
        connect("http://localhost")


async def test_what_is_known_of_a_model_is_found_by_later_starts_and_not_by_other_models(
    redis: Redis, keys: KeySpace, directory: Directory
) -> None:
    assert await directory.verdict("canary") is None
    await directory.keep_verdict("canary", "passed")
    assert await Directory(redis, keys).verdict("canary") == "passed"
    assert await Directory(redis, KeySpace(keys.namespace, "another")).verdict("canary") is None
    assert await redis.ttl(keys.verdict("canary")) > 0
