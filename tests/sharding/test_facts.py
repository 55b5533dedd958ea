import asyncio
import unicodedata
from datetime import UTC, datetime, timedelta, timezone

import numpy as np
import pytest
from people import ALICE, BOB, ELSEWHERE, HERE
from real_valkey import Valkey
from redis.asyncio import Redis

from sharding.client import connect
from sharding.directory import Directory
from sharding.errors import InvalidRequest, Unavailable, WrongShard
from sharding.facts import Fact, FactStore, text_hash
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
