"""What people said, unreadable in Redis without the secret."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from people import ALICE
from redis.asyncio import Redis

from sharding.errors import StartupError
from sharding.facts import FactStore, Told, text_hash
from sharding.ids import Placement
from sharding.keys import KeySpace
from sharding.sealing import Seal, Unreadable, new_secret
from sharding.turns import Event, Turn

NOW = datetime(2026, 1, 2, tzinfo=UTC)
SECRET = new_secret()
SEAL = Seal(SECRET)


@given(st.binary(), st.text())
def test_what_is_sealed_is_opened_with_the_same_secret_about_the_same_thing_only(plain: bytes, about: str) -> None:
    sealed = SEAL.seal(plain, about)
    assert SEAL.open(sealed, about) == plain
    assert SEAL.seal(plain, about) != sealed, "a nonce is never used twice"
    for other, whose in ((Seal(new_secret()), about), (SEAL, about + "x")):
        with pytest.raises(Unreadable):
            other.open(sealed, whose)


@given(st.binary(max_size=60))
def test_whatever_else_is_there_is_unreadable_and_no_crash(garbage: bytes) -> None:
    with pytest.raises(Unreadable):
        SEAL.open(garbage, "x")
    with pytest.raises(Unreadable):
        SEAL.open_text(garbage.decode("latin-1"), "x")


@pytest.mark.parametrize("secret", ["", "short", "!" * 44, new_secret()[:-8]])
def test_a_bad_secret_stops_the_start(secret: str) -> None:
    with pytest.raises(StartupError, match="encryption key"):
        Seal(secret)


async def everything(redis: Redis, keys: KeySpace) -> bytes:
    """All that Redis keeps, as one string of bytes."""
    parts: list[bytes] = []
    async for key in redis.scan_iter(f"{keys.namespace}:*"):
        kind = await redis.type(key)
        if kind == b"hash":
            parts += [part for pair in (await redis.hgetall(key)).items() for part in pair]
        elif kind == b"string":
            parts.append(await redis.get(key))
    return b"\n".join(parts)


async def test_nothing_that_was_said_is_in_redis_and_all_of_it_comes_back(
    redis: Redis, keys: KeySpace, placement: Placement
) -> None:
    store = FactStore(redis, keys, Seal(SECRET))
    told = Told("I play the sackbut", "user", {"user_id": "sackbut-fan"}, {"what": "sackbut"}, "2999-01-01")
    [(fact, event)] = await store.append(placement, [told], "turn", NOW)
    vector = np.arange(96, dtype=np.float32).tobytes()
    await store.put_embeddings(placement, {fact.id: vector})
    new = await store.update(placement, fact, now=NOW, embedding=vector, text="I play the sackbut and the serpent")
    await store.put_feedback(placement, fact.id, {"feedback": "POSITIVE", "reason": "sackbut"})
    turn = Turn((("user", "sackbut"),), {"user_id": "sackbut-fan"}, {"what": "sackbut"})
    await store.turns.begin(placement, "turn-2", turn, Event("PENDING", "", ""))

    kept = await everything(redis, keys)
    for secret in (b"sackbut", b"serpent", vector, text_hash(fact.text).encode(), text_hash(new.text).encode()):
        assert secret not in kept

    [loaded] = await store.load(ALICE)
    assert event == "ADD"
    assert (loaded.text, loaded.metadata, loaded.scopes) == (new.text, told.metadata, told.scopes)
    assert (loaded.embedding, loaded.text_hash) == (vector, text_hash(new.text))
    assert await store.history(loaded) == [fact]
    assert await store.feedback(ALICE) == {fact.id: {"feedback": "POSITIVE", "reason": "sackbut"}}
    assert await store.turns.turn(ALICE, "turn-2") == turn
    [(again, event)] = await store.append(placement, [Told(new.text)], "later", NOW)
    assert (again.id, event) == (fact.id, "NONE"), "a fact is still told apart by its text"
    assert await store.delete(placement, [fact.id]) == 1


@pytest.mark.parametrize("writes", [None, new_secret()])
@pytest.mark.parametrize("reads", [None, SECRET])
async def test_a_store_written_with_another_secret_is_refused(
    redis: Redis, keys: KeySpace, placement: Placement, writes: str | None, reads: str | None
) -> None:
    await FactStore(redis, keys, Seal(writes)).append(placement, ["a"], "t", NOW)
    if writes == reads:
        return
    with pytest.raises(Unreadable, match="not written with this encryption key"):
        await FactStore(redis, keys, Seal(reads)).load(ALICE)
