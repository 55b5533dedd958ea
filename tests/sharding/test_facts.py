import asyncio
import unicodedata
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone

import numpy as np
import pytest
from people import ALICE, BOB, ELSEWHERE, HERE
from real_valkey import Valkey
from redis.asyncio import Redis

from sharding.client import connect
from sharding.directory import Directory
from sharding.errors import Conflict, InvalidRequest, Unavailable, WrongShard
from sharding.facts import Fact, FactStore, Told, text_hash
from sharding.ids import FactId, Placement
from sharding.keys import KeySpace

NOW = datetime(2026, 1, 2, 3, 4, 5, 678000, UTC)


async def told(store: FactStore, placement: Placement, *texts: str) -> list[Fact]:
    return [fact for fact, _ in await store.append(placement, texts, "turn", NOW)]


async def test_a_new_fact_is_stored_with_everything_about_it(store: FactStore, placement: Placement) -> None:
    [(fact, event)] = await store.append(placement, ["I like  tea\n"], "turn-7", NOW)
    assert event == "ADD"
    assert (fact.user, fact.text, fact.turn_id, fact.seq, fact.version) == (ALICE, "I like  tea\n", "turn-7", 1, 1)
    assert fact.created_at == fact.updated_at == "2026-01-02T03:04:05.678+00:00"
    assert fact.text_hash == text_hash("I like tea")
    assert await store.load(ALICE) == [fact]


async def test_times_are_kept_in_utc(store: FactStore, placement: Placement) -> None:
    berlin = NOW.astimezone(timezone(timedelta(hours=1)))
    [(fact, _)] = await store.append(placement, ["x"], "t", berlin)
    assert fact.created_at == "2026-01-02T03:04:05.678+00:00"


async def test_a_fact_the_user_has_already_is_not_added_again(store: FactStore, placement: Placement) -> None:
    [first] = await told(store, placement, "Café  au\tlait")
    [(again, event)] = await store.append(placement, [unicodedata.normalize("NFD", " Café au lait ")], "later", NOW)
    assert (again, event) == (first, "NONE")


async def test_a_text_repeated_within_a_turn_is_one_fact(store: FactStore, placement: Placement) -> None:
    outcomes = await store.append(placement, ["a", "b", "a"], "t", NOW)
    assert [event for _, event in outcomes] == ["ADD", "ADD", "NONE"]
    assert outcomes[2][0] == outcomes[0][0]


async def test_concurrent_appends_of_one_text_give_one_fact(store: FactStore, placement: Placement) -> None:
    outcomes = await asyncio.gather(*(store.append(placement, ["same"], f"t{i}", NOW) for i in range(32)))
    assert sorted(event for [(_, event)] in outcomes) == ["ADD"] + ["NONE"] * 31
    assert len({fact.id for [(fact, _)] in outcomes}) == len(await store.load(ALICE)) == 1


async def test_facts_come_back_in_the_order_they_were_told(store: FactStore, placement: Placement) -> None:
    texts = [f"fact {i}" for i in range(25)]
    for start in range(0, 25, 5):
        await told(store, placement, *texts[start : start + 5])
    facts = await store.load(ALICE)
    assert [fact.text for fact in facts] == texts
    assert [fact.seq for fact in facts] == list(range(1, 26))


async def test_a_user_with_no_facts_loads_as_empty(store: FactStore, placement: Placement) -> None:
    assert await told(store, placement) == []
    assert await store.load(ALICE) == []


async def test_the_same_text_is_a_fact_of_each_user(
    store: FactStore, directory: Directory, placement: Placement
) -> None:
    [mine] = await told(store, placement, "same")
    [theirs] = await told(store, await directory.claim(BOB, HERE, None), "same")
    assert mine.id != theirs.id
    assert await store.load(ALICE) == [mine]


async def test_a_stale_owner_cannot_write(store: FactStore, directory: Directory, placement: Placement) -> None:
    [fact] = await told(store, placement, "kept")
    new = await directory.switch(placement, ELSEWHERE)
    for stale in (placement, Placement(ALICE, HERE, new.epoch), Placement(ALICE, ELSEWHERE, new.epoch - 1)):
        for write in (
            store.append(stale, ["lost"], "t", NOW),
            store.put_embeddings(stale, {fact.id: b"0000"}),
            store.delete(stale, [fact.id]),
            store.update(stale, fact, now=NOW, text="lost"),
            store.delete_all(stale),
        ):
            with pytest.raises(WrongShard):
                await write
    assert await store.load(ALICE) == [fact]


async def test_nobody_writes_for_a_released_user(store: FactStore, directory: Directory, placement: Placement) -> None:
    await directory.release(placement)
    with pytest.raises(WrongShard):
        await told(store, placement, "lost")


async def test_embeddings_come_back_with_their_facts(store: FactStore, placement: Placement) -> None:
    _, b = await told(store, placement, "a", "b")
    vector = np.arange(4, dtype=np.float32).tobytes()
    await store.put_embeddings(placement, {b.id: vector})
    assert [fact.embedding for fact in await store.load(ALICE)] == [None, vector]


async def test_an_embedding_that_arrives_after_its_fact_was_deleted_is_not_kept(
    store: FactStore, placement: Placement, redis: Redis, keys: KeySpace
) -> None:
    [fact] = await told(store, placement, "a")
    await store.delete(placement, [fact.id])
    await store.put_embeddings(placement, {fact.id: b"0000"})
    assert not await redis.exists(keys.embeddings(ALICE))


async def test_a_deleted_fact_leaves_no_trace_and_may_be_told_again(
    store: FactStore, placement: Placement, redis: Redis, keys: KeySpace
) -> None:
    [fact] = await told(store, placement, "a")
    await store.put_embeddings(placement, {fact.id: b"0000"})
    assert await store.delete(placement, [fact.id])
    left = [key async for key in redis.scan_iter(f"{keys.namespace}:*")]
    assert sorted(left) == sorted([keys.placement(ALICE).encode(), keys.seq(ALICE).encode()])
    [again] = await told(store, placement, "a")
    assert again.id != fact.id
    assert again.seq > fact.seq


async def test_deleting_an_unknown_fact_says_so(store: FactStore, placement: Placement) -> None:
    assert not await store.delete(placement, [FactId("no-such-fact")])


async def test_deleting_one_fact_leaves_the_others(store: FactStore, placement: Placement) -> None:
    a, b, c = await told(store, placement, "a", "b", "c")
    await store.delete(placement, [b.id])
    assert await store.load(ALICE) == [a, c]


async def test_after_deleting_all_nothing_of_the_user_remains_but_the_fence(
    store: FactStore, directory: Directory, placement: Placement, redis: Redis, keys: KeySpace
) -> None:
    facts = await told(store, placement, "a", "b")
    await store.put_embeddings(placement, {fact.id: b"0000" for fact in facts})
    assert await store.delete_all(placement) == 2
    left = [key async for key in redis.scan_iter(f"{keys.namespace}:*")]
    assert sorted(left) == sorted([keys.placement(ALICE).encode(), keys.seq(ALICE).encode()])
    assert await directory.lookup(ALICE) == placement
    assert await store.delete_all(placement) == 0


async def test_an_append_repeated_after_a_lost_answer_still_says_that_it_added(
    store: FactStore, placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = store._append

    async def send_twice(keys: list[str], arguments: list[str]) -> object:
        await send(keys, arguments)
        return await send(keys, arguments)

    monkeypatch.setattr(store, "_append", send_twice)
    assert [event for _, event in await store.append(placement, ["a", "b", "a"], "t", NOW)] == ["ADD", "ADD", "NONE"]
    assert len(await store.load(ALICE)) == 2


async def test_an_append_that_another_shard_repeats_says_what_the_first_one_did(
    store: FactStore, directory: Directory, placement: Placement
) -> None:
    await store.append(placement, ["known"], "earlier", NOW)
    first = await store.append(placement, ["a", "known", "a"], "t", NOW)
    moved = await directory.claim(ALICE, ELSEWHERE, placement)
    assert await store.append(moved, ["a", "known", "a"], "t", NOW) == first
    assert [event for _, event in first] == ["ADD", "NONE", "NONE"]


@pytest.mark.parametrize("text", ["🙂 用户", '"quoted" \\ {json}', "a\0b", "x" * 100_000])
async def test_any_text_comes_back_as_it_was_told(store: FactStore, placement: Placement, text: str) -> None:
    await told(store, placement, text)
    assert [fact.text for fact in await store.load(ALICE)] == [text]


async def test_text_that_utf8_cannot_hold_is_refused_and_nothing_is_stored(
    store: FactStore, placement: Placement
) -> None:
    with pytest.raises(InvalidRequest, match="valid Unicode"):
        await told(store, placement, "fine", "\ud800")
    assert await store.load(ALICE) == []


async def test_ten_thousand_facts_load_with_their_embeddings(store: FactStore, placement: Placement) -> None:
    facts = await told(store, placement, *(f"fact {i}" for i in range(10_000)))
    vector = np.ones(384, np.float32).tobytes()
    await store.put_embeddings(placement, {fact.id: vector for fact in facts})
    loaded = await store.load(ALICE)
    assert [fact.id for fact in loaded] == [fact.id for fact in facts]
    assert all(fact.embedding == vector for fact in loaded)
    assert await store.delete_all(placement) == 10_000


# -- versions ---------------------------------------------------------------------------------------------------------


async def test_an_update_is_a_new_version_with_its_embedding_and_the_old_one_in_the_history(
    store: FactStore, placement: Placement
) -> None:
    [fact] = await told(store, placement, "I live in Rome")
    await store.put_embeddings(placement, {fact.id: b"rome"})
    later = NOW + timedelta(hours=1)
    new = await store.update(placement, fact, now=later, embedding=b"oslo", text="I live in Oslo", metadata={"n": 1})
    assert (new.id, new.seq, new.version, new.created_at) == (fact.id, fact.seq, 2, fact.created_at)
    assert new.updated_at == "2026-01-02T04:04:05.678+00:00"
    [loaded] = await store.load(ALICE)
    assert (loaded, loaded.embedding) == (replace(new, embedding=b"oslo"), b"oslo")
    assert await store.history(new) == [fact]


async def test_an_update_frees_the_old_text_and_takes_the_new_one(store: FactStore, placement: Placement) -> None:
    [fact] = await told(store, placement, "old")
    await store.update(placement, fact, now=NOW, embedding=b"", text="new")
    [(again, event)] = await store.append(placement, ["new"], "t2", NOW)
    assert (again.id, event) == (fact.id, "NONE")
    [(other, event)] = await store.append(placement, ["old"], "t2", NOW)
    assert (other.id != fact.id, event) == (True, "ADD")


async def test_two_facts_never_come_to_say_the_same(store: FactStore, placement: Placement) -> None:
    a, b = await told(store, placement, "a", "b")
    with pytest.raises(Conflict):
        await store.update(placement, b, now=NOW, text=" a ")
    assert await store.load(ALICE) == [a, b]


async def test_only_one_of_two_updates_of_one_version_is_done(store: FactStore, placement: Placement) -> None:
    [fact] = await told(store, placement, "a")
    changes = (store.update(placement, fact, now=NOW, text=text) for text in ("b", "c"))
    outcomes = await asyncio.gather(*changes, return_exceptions=True)
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["Fact", "NotFound"]


async def test_an_update_repeated_after_a_lost_answer_is_one_version(
    store: FactStore, placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    [fact] = await told(store, placement, "a")
    send = store._update

    async def send_twice(keys: list[str], arguments: list[str]) -> object:
        await send(keys, arguments)
        return await send(keys, arguments)

    monkeypatch.setattr(store, "_update", send_twice)
    new = await store.update(placement, fact, now=NOW, text="b")
    assert await store.load(ALICE) == [new]
    assert await store.history(new) == [fact]


async def test_the_history_keeps_the_latest_versions(
    store: FactStore, placement: Placement, monkeypatch: pytest.MonkeyPatch, redis: Redis, keys: KeySpace
) -> None:
    monkeypatch.setattr("sharding.facts.VERSIONS_KEPT", 3)
    [fact] = await told(store, placement, "0")
    for text in "123456":
        fact = await store.update(placement, fact, now=NOW, text=text)
    assert [version.text for version in await store.history(fact)] == ["3", "4", "5"]
    await store.delete(placement, [fact.id])
    assert not await redis.exists(keys.history(ALICE))


async def test_metadata_and_expiry_change_without_the_text(store: FactStore, placement: Placement) -> None:
    told = Told("a", "user", {"user_id": "alice"}, {"deep": [{"x": 1.5, "big": 10**20}]}, "2030-01-01")
    [(fact, _)] = await store.append(placement, [told], "t", NOW)
    await store.put_embeddings(placement, {fact.id: b"kept"})
    new = await store.update(placement, fact, now=NOW, expires_on=None)
    [loaded] = await store.load(ALICE)
    assert (loaded.embedding, loaded.expires_on, loaded.metadata) == (b"kept", None, fact.metadata)
    assert (new.role, new.scopes) == ("user", {"user_id": "alice"})


async def test_feedback_goes_with_its_fact(
    store: FactStore, placement: Placement, redis: Redis, keys: KeySpace
) -> None:
    a, b = await told(store, placement, "a", "b")
    for fact in (a, b):
        await store.put_feedback(placement, fact.id, {"feedback": "POSITIVE"})
    await store.put_feedback(placement, b.id, None)
    await store.put_feedback(placement, FactId("unknown"), {"feedback": "POSITIVE"})
    assert await store.feedback(ALICE) == {a.id: {"feedback": "POSITIVE"}}
    await store.delete(placement, [a.id])
    assert not await redis.exists(keys.feedback(ALICE))


async def test_a_write_that_redis_did_not_take_is_unavailable(own_valkey: Valkey, keys: KeySpace) -> None:
    async with connect(own_valkey.url, retries=0) as client:
        placement = await Directory(client, keys).claim(ALICE, HERE, None)
        own_valkey.stop()
        with pytest.raises(Unavailable, match="store facts"):
            await told(FactStore(client, keys), placement, "a")


async def test_a_full_redis_refuses_the_write_as_unavailable(own_valkey: Valkey, keys: KeySpace) -> None:
    async with connect(own_valkey.url) as client:
        placement = await Directory(client, keys).claim(ALICE, HERE, None)
        await client.config_set("maxmemory", "1")
        with pytest.raises(Unavailable, match="Redis refused to store facts"):
            await told(FactStore(client, keys), placement, "a")
