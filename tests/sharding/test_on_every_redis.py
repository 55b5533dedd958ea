"""Directory and facts on one server, on Redis Cluster and through Sentinel, and over a fail-over of the last two."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime
from typing import Any, TypeVar

import every_redis
import pytest
from every_redis import Kind
from people import ELSEWHERE, HERE

from sharding.api_keys import KeyStore
from sharding.append_log import AppendLog
from sharding.client import RedisClient, connect
from sharding.directory import Directory, Entry, Usage
from sharding.errors import StartupError, Unavailable, WrongShard
from sharding.facts import FactStore
from sharding.ids import Placement, UserId
from sharding.keys import KeySpace
from sharding.limits import Minutes
from sharding.placement import ShardReport
from sharding.scopes import Entity, entity_of, owner_id, tenant_of

T = TypeVar("T")
USERS = [UserId(f"user-{n}") for n in range(40)]  # over all of a cluster's primaries
NOW = datetime(2026, 1, 1, tzinfo=UTC)
KINDS = {"one": every_redis.one, "cluster": every_redis.cluster, "sentinel": every_redis.sentinel}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kind]:
    with KINDS[request.param](tmp_path_factory.mktemp(request.param)) as running:
        yield running


@pytest.fixture
async def redis(kind: Kind) -> AsyncIterator[RedisClient]:
    client = connect(kind.url)
    yield client
    await client.aclose()


@pytest.fixture
def keys() -> KeySpace:
    return KeySpace(uuid.uuid4().hex, "org/model")


async def test_users_are_claimed_switched_and_released(redis: RedisClient, keys: KeySpace) -> None:
    directory = Directory(redis, keys)
    claimed = await asyncio.gather(*(directory.claim(user, HERE, None) for user in USERS))
    assert claimed == [Placement(user, HERE, 1) for user in USERS]
    switched = [await directory.switch(placement, ELSEWHERE) for placement in claimed]
    assert [await directory.lookup(user) for user in USERS] == switched
    with pytest.raises(WrongShard):
        await directory.switch(claimed[0], HERE)
    await directory.release(switched[0])
    assert await directory.lookup(USERS[0]) is None
    assert await directory.claim(USERS[0], HERE, None) == Placement(USERS[0], HERE, 3)


async def test_shards_beat_run_out_and_retire(redis: RedisClient, keys: KeySpace) -> None:
    directory = Directory(redis, keys)
    fields = {"model": "m", "ready": True, "free_bytes": 7, "users": 0, "requests_in_flight": 0}
    for shard, ttl_s in ((ELSEWHERE, 0.02), (HERE, 30)):
        await directory.heartbeat(ShardReport(shard=shard, **fields).model_dump_json(), shard, ttl_s)
    await asyncio.sleep(0.05)
    assert list(await directory.shards()) == [HERE]
    await directory.retire(HERE)
    assert await directory.shards() == {}


async def test_facts_are_appended_embedded_and_deleted_by_the_owner_only(redis: RedisClient, keys: KeySpace) -> None:
    directory, store = Directory(redis, keys), FactStore(redis, keys)
    for user in USERS[:8]:
        placement = await directory.claim(user, HERE, None)
        (first, _), (second, _) = await store.append(placement, ["one", "two"], "turn", NOW)
        await store.put_embeddings(placement, {first.id: b"1234"})
        assert await store.delete(placement, [second.id])
        assert [(fact.text, fact.embedding) for fact in await store.load(user)] == [("one", b"1234")]
        moved = await directory.switch(placement, ELSEWHERE)
        with pytest.raises(WrongShard):
            await store.append(placement, ["three"], "later", NOW)
        assert await store.delete_all(moved) == 1


async def test_facts_have_versions_and_their_owners_are_found(redis: RedisClient, keys: KeySpace) -> None:
    directory, store = Directory(redis, keys), FactStore(redis, keys)
    store.log = AppendLog(redis, every_s=0.0)
    for user in USERS[:8]:
        placement, ada = await directory.claim(user, HERE, None), Entity("user", user)
        await store.registry.register(user, [ada], NOW)
        ((fact, _),) = await store.append(placement, ["one"], "turn", NOW)
        new = await store.update(placement, fact, now=NOW, embedding=b"1234", text="two")
        assert await store.history(new) == [fact]
        assert await store.registry.owners_by_id("", fact.id) == await store.registry.owners_of("", ada) == [user]
        await store.delete(placement, [fact.id])
        await store.registry.unregister(user, [ada], empty=True)
    await store.log.settled()
    assert await store.registry.entities("") == []


async def test_everything_of_a_tenant_is_found_wherever_it_lies_and_forgotten(
    redis: RedisClient, keys: KeySpace
) -> None:
    directory, store = Directory(redis, keys), FactStore(redis, keys)
    store.log = AppendLog(redis, every_s=0.0)
    minutes, api_keys = Minutes(redis, keys), KeyStore(redis, keys)
    red = [owner_id("red", Entity("user", f"{name}}}:facts*")) for name in ("ada", "bob", "eve")]
    others = [UserId("ada"), *(owner_id(tenant, Entity("user", "ada")) for tenant in ("re", "redd", "r*d", "blue"))]
    for user in [*red, *others]:
        placement = await directory.claim(user, HERE, None)
        await store.registry.register(user, [entity_of(user)], NOW)
        await minutes.take(f"requests:u:{user}", 1, 9)
        await minutes.take(f"tokens:t:{tenant_of(user)}", 1, 9)
        if user != red[2]:
            await store.append(placement, ["said"], "turn", NOW)
    (key, known), (other, _) = [await api_keys.create(tenant, "admin") for tenant in ("red", "redd")]
    assert await store.registry.everybody("red", with_memories=False) == sorted(red)
    assert await store.registry.everybody("red", with_memories=True) == sorted(red[:2])
    assert await api_keys.revoke_all("red", but=known.id) == 0
    assert await api_keys.revoke_all("red") == 1
    assert (await api_keys.find(key), (await api_keys.find(other)) is not None) == (None, True)
    for user in red:
        await store.delete_all(Placement(user, HERE, 1))
    await store.registry.forget("red")
    names = [key.decode() async for key in redis.scan_iter(f"{keys.namespace}:*")]
    left = {name.rpartition("}:")[2].partition(":")[0] for name in names if "red%1F" in name or "Ared}" in name}
    assert left == {"owner", "seq"}, "placements, and numbers given out"
    assert not [name for name in names if ":red}" in name]
    assert await store.registry.everybody("red", with_memories=True) == []
    for user in others:
        assert [fact.text for fact in await store.load(user)] == ["said"]
        assert await store.registry.owners_of(tenant_of(user), entity_of(user)) == [user]
    await store.log.settled()


async def test_what_an_owner_notes_of_its_users_is_kept_and_a_strangers_word_is_not(
    redis: RedisClient, keys: KeySpace
) -> None:
    directory = Directory(redis, keys)
    assert await directory.entry(USERS[0]) is None
    mine = [await directory.claim(user, HERE, None) for user in USERS]
    assert await directory.entry(USERS[0]) == Entry(mine[0], None)
    usage = Usage("device", 4096, 1_800_000_000.0)
    await directory.note((placement, usage) for placement in mine)
    assert [await directory.entry(user) for user in USERS] == [Entry(placement, usage) for placement in mine]
    await directory.note([(Placement(USERS[0], ELSEWHERE, 1), Usage("text", 0, 0.0))])
    assert await directory.entry(USERS[0]) == Entry(mine[0], usage)
    await directory.release(mine[0])
    assert await directory.entry(USERS[0]) == Entry(None, usage)


async def test_more_calls_at_once_than_connections_wait_instead_of_failing(redis: RedisClient, keys: KeySpace) -> None:
    directory = Directory(redis, keys)
    placements = await asyncio.gather(*(directory.claim(UserId(f"u{n}"), HERE, None) for n in range(300)))
    assert {placement.shard for placement in placements} == {HERE}


async def test_the_history_stays_while_nothing_happens(redis: RedisClient, keys: KeySpace) -> None:
    directory = Directory(redis, keys)
    assert await directory.histories() == await directory.histories()


@pytest.mark.parametrize("name", ["cluster", "sentinel"])
async def test_after_a_fail_over_the_same_client_goes_on_and_knows_that_there_was_one(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with KINDS[name](tmp_path_factory.mktemp(name)) as running:
        client = connect(running.url, timeout_s=1.0)
        try:
            await _goes_on(running, client)
        finally:
            await client.aclose()


async def _goes_on(running: Kind, client: RedisClient) -> None:
    keys = KeySpace("over", "m")
    directory, store = Directory(client, keys), FactStore(client, keys)
    before = await directory.histories()
    placements = [await directory.claim(user, HERE, None) for user in USERS]
    for placement in placements:
        await store.append(placement, ["kept"], "turn", NOW)
    running.replicated()
    assert running.fail_over is not None
    running.fail_over(keys.placement(USERS[0]))
    assert [await _soon(lambda user=user: directory.lookup(user)) for user in USERS] == placements
    for user in USERS:
        assert [fact.text for fact in await store.load(user)] == ["kept"]
    moved = await _soon(lambda: directory.switch(placements[0], ELSEWHERE))
    assert moved.epoch == 2
    assert await _soon(directory.histories) != before


async def _soon(call: Callable[[], Awaitable[T]]) -> T:
    """The answer, once Redis gives one; until then it may only be said to be away."""
    give_up = time.monotonic() + every_redis.DEADLINE_S
    while True:
        try:
            return await call()
        except Unavailable:
            assert time.monotonic() < give_up, "Redis did not come back"
            await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    "url", ["redis+sentinel://localhost", "redis+cluster://", "redis+sentinel://a,,b/store", "redis+other://localhost"]
)
def test_a_url_that_lacks_something_stops_the_start(url: str) -> None:
    with pytest.raises(StartupError, match="Redis URL"):
        connect(url)


async def test_users_and_passwords_are_taken_out_of_the_url() -> None:
    for url in ("redis+cluster://me:p%40ss@a:1,b", "redis+sentinel://me:p%40ss@a:1,b/store/2?sentinel_password=s"):
        client: Any = connect(url)
        if "cluster" in url:
            held = client.connection_kwargs
            assert sorted(client.nodes_manager.startup_nodes) == ["a:1", "b:6379"]
        else:
            held = client.connection_pool.connection_kwargs
            sentinels = client.connection_pool.sentinel_manager.sentinels
            told = [one.connection_pool.connection_kwargs for one in sentinels]
            assert [(one["host"], one["port"], one["password"]) for one in told] == [("a", 1, "s"), ("b", 26379, "s")]
            assert held["db"] == 2
        assert (held["username"], held["password"]) == ("me", "p@ss")
        await client.aclose()
