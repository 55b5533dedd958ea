"""While no shard runs: adds are kept, chats wait for a shard that they wake, and the next shard has all of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from deployments.deterministic import mark
from deployments.memory_calls import AddCall
from sharding.errors import WrongShard
from sharding.ids import NOBODY, Placement, ShardId, UserId
from sharding.scopes import Entity, owner_id
from tests.deployments.town import MODEL, Town, a_town
from tests.sharding.real_valkey import Valkey

SHARD = ShardId("shard-a")
WAKE_S = 1.5
TEA = "Ada likes tea"


@pytest.fixture(scope="module")
def town(valkey: Valkey) -> Iterator[Town]:
    with a_town(valkey, {"user_bytes": 500}, expected_shards=0, reports_ttl_s=0.05, wake_s=WAKE_S) as town:
        yield town


@pytest.fixture
def http(town: Town) -> Iterator[httpx.Client]:
    """To the town, whose shards have ended, one of which comes when it is woken."""

    async def end() -> None:
        for shard in town.shards.by_id:
            await town.directory.retire(shard)
        town.shards.start = start

    async def start() -> None:
        await asyncio.sleep(0.3)
        await town.beat(town.directory, SHARD)

    town.run(end())
    with httpx.Client(base_url=town.url, timeout=20) as client:
        client.get("/status")  # the gateway looks who lives
        yield client


def owner(name: str) -> UserId:
    return owner_id("", Entity("user", name))


def add(http: httpx.Client, user: str, *texts: str, infer: bool = False) -> httpx.Response:
    messages = [{"role": "user", "content": text} for text in texts]
    return http.post("/v1/memories", json={"user_id": user, "messages": messages, "infer": infer})


def chat(http: httpx.Client, user: str | None) -> httpx.Response:
    body: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "What does Ada like?"}]}
    return http.post("/v1/chat/completions", json=body | ({"user_id": user} if user else {}))


def placement(town: Town, user: str) -> Placement | None:
    found: Placement | None = town.run(town.directory.lookup(owner(user)))
    return found


def test_an_add_is_kept_and_the_next_shard_answers_from_it(town: Town, http: httpx.Client) -> None:
    told = add(http, "ada", TEA, "Ada likes rain").json()["results"]
    assert [fact["memory"] for fact in told] == [TEA, "Ada likes rain"]
    kept = placement(town, "ada")
    assert kept is not None
    assert kept.shard == NOBODY
    assert [fact.text for fact in town.run(town.unattended._store.load(owner("ada")))] == [TEA, "Ada likes rain"]
    again = add(http, "ada", TEA, "Ada likes snow")
    assert [fact["event"] for fact in again.json()["results"]] == ["NONE", "ADD"]
    assert placement(town, "ada") == kept, "nobody need be asked twice"

    answer = chat(http, "ada")
    assert answer.status_code == 200, answer.text
    assert mark(TEA) in answer.json()["choices"][0]["message"]["content"]
    assert len(answer.json()["memory"]["fact_ids"]) == 3
    assert placement(town, "ada") == Placement(kept.user, SHARD, kept.epoch + 1)


def test_what_a_shard_would_refuse_is_refused(town: Town, http: httpx.Client) -> None:
    assert add(http, "eve", "  ").status_code == 400
    assert add(http, "eve", "word " * 1500).status_code == 413
    assert add(http, "eve", "a" * 300).status_code == 200
    over = add(http, "eve", "b" * 300)
    assert (over.status_code, over.json()["error"]["code"]) == (413, "quota_exceeded")
    stored = placement(town, "eve")
    assert stored is not None
    assert stored.shard == NOBODY


def test_a_user_of_a_shard_that_ended_is_added_to_and_found_again(town: Town, http: httpx.Client) -> None:
    town.run(town.beat(town.directory, SHARD))
    http.get("/status")  # the gateway looks
    assert add(http, "bob", TEA).status_code == 200
    before = placement(town, "bob")
    assert before is not None
    assert before.shard == SHARD
    town.run(town.directory.retire(SHARD))
    http.get("/status")  # the gateway looks
    assert add(http, "bob", "Bob likes milk").status_code == 200
    assert placement(town, "bob") == Placement(before.user, NOBODY, before.epoch + 1)
    assert http.get("/v1/memories", params={"user_id": "bob"}).json()["count"] == 2


def test_an_add_that_a_shard_overtakes_goes_to_that_shard(town: Town, http: httpx.Client) -> None:
    add(http, "tom", TEA)
    old = placement(town, "tom")
    assert old is not None
    town.run(town.directory.claim(old.user, SHARD, old))
    with pytest.raises(WrongShard):
        town.run(town.unattended.ask(AddCall("x", old, ("Tom likes ink",))))
    town.run(town.beat(town.directory, SHARD))
    http.get("/status")  # the gateway looks
    assert add(http, "tom", "Tom likes ink").status_code == 200
    assert http.get("/v1/memories", params={"user_id": "tom"}).json()["count"] == 2


def test_a_conversation_is_kept_and_distilled_once_a_shard_is_there(town: Town, http: httpx.Client) -> None:
    event = add(http, "una", "Una sings. Una sails.", infer=True).json()
    assert event["status"] == "PENDING"
    give_up = time.monotonic() + 10  # nobody asks for it
    while len(town.run(town.unattended._store.load(owner("una")))) < 2:
        assert time.monotonic() < give_up
        time.sleep(0.05)
    found = http.get(f"/v1/event/{event['event_id']}/")
    assert found.json()["status"] == "SUCCEEDED", found.text


def test_many_who_come_at_once_wake_one_shard(town: Town, http: httpx.Client) -> None:
    woken, start = [], town.shards.start

    async def counted() -> None:
        woken.append(1)
        assert start is not None
        await start()

    town.shards.start = counted

    async def all_at_once() -> list[int]:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
        async with httpx.AsyncClient(base_url=town.url, timeout=20) as client:
            posts = [client.post("/v1/chat/completions", json=body) for _ in range(8)]
            return [answer.status_code for answer in await asyncio.gather(*posts)]

    assert asyncio.run(all_at_once()) == [200] * 8
    assert woken == [1]


@pytest.mark.parametrize("user", ["ada", None])
def test_a_chat_that_no_shard_comes_for_is_refused_after_the_bound(
    town: Town, http: httpx.Client, user: str | None
) -> None:
    town.shards.start = None
    began = time.monotonic()
    refused = chat(http, user)
    assert refused.status_code == 503
    assert int(refused.headers["Retry-After"]) >= 1
    assert time.monotonic() - began >= WAKE_S


def test_the_model_is_listed_and_the_gateway_is_ready(town: Town, http: httpx.Client) -> None:
    assert [model["id"] for model in http.get("/v1/models").json()["data"]] == [MODEL]
    ready = http.get("/readyz")
    assert (ready.status_code, ready.json()["memory"]) == (200, "asleep")
    assert http.get("/status").json()["shards"] == []


def test_a_gateway_that_cannot_read_the_tokenizer_asks_to_come_again(
    town: Town, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Any:
        raise OSError("no such file")

    monkeypatch.setattr(town.unattended, "_template", None)
    monkeypatch.setattr(town.unattended, "_open_template", broken)
    refused = add(http, "zoe", TEA)
    assert (refused.status_code, refused.headers["Retry-After"]) == (503, "5")
    monkeypatch.undo()
    assert add(http, "zoe", TEA).status_code == 200
