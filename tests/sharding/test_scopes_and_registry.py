import asyncio
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from sharding.errors import InvalidRequest
from sharding.ids import UserId
from sharding.keys import KeySpace
from sharding.registry import Registry
from sharding.scopes import (
    KINDS,
    NO_TENANT,
    SEPARATOR,
    Entity,
    entities,
    entity_of,
    new_id,
    owner_id,
    owner_tag,
    tag_in,
    tenant_of,
)

NOW = datetime(2026, 1, 2, tzinfo=UTC)
ADA, COOK = Entity("user", "ada"), Entity("agent", "cook")
names = st.text(st.characters(codec="utf-8", exclude_characters=SEPARATOR), min_size=1)
kinds = st.sampled_from(["user", "agent", "app", "run"])


@pytest.fixture
def registry(redis: Redis, keys: KeySpace) -> Registry:
    return Registry(redis, keys)


@given(names | st.just(NO_TENANT), kinds, names)
def test_an_owner_says_whose_it_is(tenant: str, kind: str, name: str) -> None:
    owner = owner_id(tenant, Entity(kind, name))
    assert (tenant_of(owner), entity_of(owner)) == (tenant, Entity(kind, name))
    assert tag_in(new_id(owner)) == owner_tag(owner)


@given(st.tuples(names, kinds, names), st.tuples(names, kinds, names))
def test_two_entities_are_never_one_owner(one: tuple[str, str, str], other: tuple[str, str, str]) -> None:
    assert (owner_id(one[0], Entity(*one[1:])) == owner_id(other[0], Entity(*other[1:]))) == (one == other)


@pytest.mark.parametrize("name", [f"blue{SEPARATOR}user{SEPARATOR}ada", SEPARATOR, "\ud800"])
def test_a_name_that_could_be_another_tenants_owner_is_refused(name: str) -> None:
    for tenant in (NO_TENANT, "red"):
        for kind in KINDS:
            with pytest.raises(InvalidRequest):
                owner_id(tenant, Entity(kind, name))


def test_the_user_owns_before_the_agent_the_app_and_the_run() -> None:
    scopes = {"run_id": "r", "agent_id": "cook", "user_id": "ada"}
    assert entities(scopes) == [ADA, COOK, Entity("run", "r")]


def test_what_is_no_id_of_ours_has_no_tag() -> None:
    for id in ("", "x", "2f1c7a53-3b0c-4c0e-9d6a-5b1a0c6f1e11", new_id(UserId("a")).upper(), new_id(UserId("a")) + "0"):
        assert tag_in(id) is None


async def test_an_owner_is_found_by_entity_and_by_id_within_its_tenant_only(registry: Registry) -> None:
    mine, theirs = owner_id("t1", ADA), owner_id("t2", ADA)
    for owner in (mine, theirs):
        await registry.register(owner, [ADA, COOK], NOW)
    for tenant, owner, other in (("t1", mine, theirs), ("t2", theirs, mine)):
        assert await registry.owners_of(tenant, COOK) == [owner]
        assert await registry.owners_by_id(tenant, new_id(owner)) == [owner]
        assert await registry.owners_by_id(tenant, new_id(other)) == []
    assert await registry.entities(NO_TENANT) == []


async def test_an_entity_is_listed_until_its_last_owner_has_gone(registry: Registry) -> None:
    bob = Entity("user", "bob")
    for one in (ADA, bob):
        await registry.register(owner_id("t", one), [one, COOK], NOW)
    await registry.unregister(owner_id("t", ADA), [ADA, COOK], empty=True)
    assert [seen.entity for seen in await registry.entities("t")] == [COOK, bob]
    assert await registry.owners_by_id("t", new_id(owner_id("t", ADA))) == []
    await registry.unregister(owner_id("t", bob), [COOK], empty=False)
    assert [seen.entity for seen in await registry.entities("t")] == [bob]
    assert await registry.owners_by_id("t", new_id(owner_id("t", bob))) == [owner_id("t", bob)]


async def test_two_owners_with_one_tag_are_both_found(
    registry: Registry, redis: Redis, keys: KeySpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sharding.registry.owner_tag", lambda owner: "0" * 15)
    owners = [owner_id("t", ADA), owner_id("t", COOK)]
    await asyncio.gather(*(registry.register(owner, [entity_of(owner)], NOW) for owner in owners * 2))
    clash = "00000000-0000-8000-8000-000000000000"
    assert sorted(await registry.owners_by_id("t", clash)) == sorted(owners)
    await registry.unregister(owners[0], [ADA], empty=True)
    assert await registry.owners_by_id("t", clash) == [owners[1]]


async def test_nothing_is_left_of_a_tenant_whose_owners_have_gone(
    registry: Registry, redis: Redis, keys: KeySpace
) -> None:
    await registry.register(owner_id("t", ADA), [ADA, COOK], NOW)
    await registry.unregister(owner_id("t", ADA), [ADA, COOK], empty=True)
    assert [key async for key in redis.scan_iter(f"{keys.namespace}:*")] == []
