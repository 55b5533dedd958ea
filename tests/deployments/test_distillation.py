"""Facts out of conversations: events, decisions, and what is left when something goes wrong. The model that reads them
is a stand-in; `test_engine_distils.py` has a real one."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from sharding.errors import EngineFailed
from sharding.ids import UserId
from sharding.scopes import owner_tag
from tests.deployments.town import SentenceReader, Town, a_town
from tests.sharding.real_valkey import Valkey


@pytest.fixture(scope="module")
def reading_town(valkey: Valkey) -> Iterator[Town]:
    with a_town(valkey, deadline_s=10.0) as town:
        yield town


@pytest.fixture
def reader(reading_town: Town) -> Iterator[SentenceReader]:
    reader = SentenceReader()
    for shard in reading_town.shards.by_id.values():
        shard.distillation.distiller = reader
    yield reader
    reading_town.run(open_gate(reader))
    for shard in reading_town.shards.by_id.values():
        reading_town.run(shard.distillation.settled())


async def open_gate(reader: SentenceReader) -> None:
    reader.gate.set()


@pytest.fixture
def http(reading_town: Town) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=reading_town.url, trust_env=False, timeout=20) as http:
        yield http


@pytest.fixture
def ada() -> str:
    return f"ada-{uuid.uuid4().hex}"


def tell(http: httpx.Client, user: str, text: str, **more: Any) -> str:
    """The id of the event."""
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "I see."}]
    added = http.post("/v3/memories/add/", json={"user_id": user, "messages": messages, **more})
    assert added.raise_for_status().json()["status"] == "PENDING"
    return str(added.json()["event_id"])


def over(http: httpx.Client, event_id: str) -> dict[str, Any]:
    """The event, once it is over."""
    give_up = time.monotonic() + 10
    while True:
        event: dict[str, Any] = http.get(f"/v1/event/{event_id}/").raise_for_status().json()
        if event["status"] != "PENDING":
            return event
        assert time.monotonic() < give_up
        time.sleep(0.02)


def texts(http: httpx.Client, user: str) -> list[str]:
    return [memory["memory"] for memory in http.get("/memories", params={"user_id": user}).json()["results"]]


def outcomes(event: dict[str, Any]) -> list[tuple[str, str]]:
    return [(result["event"], result["data"]["memory"]) for result in event["results"]]


def test_a_turn_becomes_at_most_five_facts_under_an_event(reader: SentenceReader, http: httpx.Client, ada: str) -> None:
    told = "One cat. Two dogs. Three birds. Four mice. Five rats. Six hens."
    event = over(http, tell(http, ada, told, run_id="r1"))
    facts = ["One cat.", "Two dogs.", "Three birds.", "Four mice.", "Five rats."]
    assert (event["status"], outcomes(event)) == ("SUCCEEDED", [("ADD", fact) for fact in facts])
    assert texts(http, ada) == facts
    assert reader.read == [
        (("user", "One cat. Two dogs. Three birds. Four mice. Five rats. Six hens."), reader.read[0][1])
    ]
    assert http.get("/memories", params={"run_id": "r1"}).json()["results"][0]["user_id"] == ada


def test_what_is_known_is_left_and_what_is_corrected_is_a_new_version(
    reader: SentenceReader, http: httpx.Client, ada: str
) -> None:
    over(http, tell(http, ada, "My home is a flat in Rome. My dog is called Rex."))
    event = over(http, tell(http, ada, "My home is a flat in Oslo. My dog is called Rex. Trains are late today."))
    assert sorted(outcomes(event)) == [
        ("ADD", "Trains are late today."),
        ("NONE", "My dog is called Rex."),
        ("UPDATE", "My home is a flat in Oslo."),
    ]
    assert texts(http, ada) == ["My home is a flat in Oslo.", "My dog is called Rex.", "Trains are late today."]
    changed = next(result["id"] for result in event["results"] if result["event"] == "UPDATE")
    assert [entry["new_memory"] for entry in http.get(f"/memories/{changed}/history").json()] == [
        "My home is a flat in Rome.",
        "My home is a flat in Oslo.",
    ]


def test_the_self_hosted_route_waits_for_what_becomes_of_the_turn(
    reader: SentenceReader, http: httpx.Client, ada: str
) -> None:
    told = http.post("/memories", json={"user_id": ada, "messages": "I like tea."}).raise_for_status().json()
    assert [(result["memory"], result["event"]) for result in told["results"]] == [("I like tea.", "ADD")]


def test_an_add_that_distils_nothing_has_an_event_too(http: httpx.Client, ada: str) -> None:
    added = http.post("/v3/memories/add/", json={"user_id": ada, "messages": "I like tea.", "infer": False}).json()
    event = over(http, added["event_id"])
    assert (event["status"], outcomes(event)) == ("SUCCEEDED", [("ADD", "I like tea.")])


def test_a_turn_that_cannot_be_read_fails_with_the_reason_and_is_kept(
    reading_town: Town, reader: SentenceReader, http: httpx.Client, ada: str
) -> None:
    reader.fails_with = EngineFailed("The model's answer about this turn was not complete.")
    event = over(http, tell(http, ada, "I like tea."))
    assert (event["status"], event["reason"]) == ("FAILED", reader.fails_with.message)
    answer = http.post("/memories", json={"user_id": ada, "messages": "I like tea."})
    assert (answer.status_code, answer.json()["detail"]) == (500, reader.fails_with.message)
    assert texts(http, ada) == []


def test_a_bug_in_reading_fails_the_event_without_its_words(
    reader: SentenceReader, http: httpx.Client, ada: str
) -> None:
    reader.fails_with = ValueError("secret")
    event = over(http, tell(http, ada, "I like tea."))
    assert (event["status"], event["reason"]) == ("FAILED", "The server failed to distil this turn.")


def test_a_turn_that_a_dead_shard_left_is_finished_by_the_next_one(
    reading_town: Town, reader: SentenceReader, http: httpx.Client, ada: str
) -> None:
    reader.gate = reading_town.run(a_closed_gate())
    event_id = tell(http, ada, "I like tea.")
    assert http.get(f"/v1/event/{event_id}/").json()["status"] == "PENDING"
    for shard in reading_town.shards.by_id.values():  # what a death leaves behind
        reading_town.run(stopped(shard))
    reading_town.run(open_gate(reader))
    event = over(http, event_id)
    assert (event["status"], outcomes(event)) == ("SUCCEEDED", [("ADD", "I like tea.")])
    assert texts(http, ada) == ["I like tea."]


def test_what_is_deleted_while_it_is_read_does_not_come_back(
    reading_town: Town, reader: SentenceReader, http: httpx.Client, ada: str
) -> None:
    reader.gate = reading_town.run(a_closed_gate())
    tell(http, ada, "I play the marimba.")
    http.delete(f"/v2/entities/user/{ada}/").raise_for_status()
    reading_town.run(open_gate(reader))
    for shard in reading_town.shards.by_id.values():
        reading_town.run(shard.distillation.settled())
    assert not [key for key, value in reading_town.kept().items() if b"marimba" in value]


def test_a_turn_goes_with_any_fact_that_it_tells(
    reading_town: Town, reader: SentenceReader, http: httpx.Client, ada: str
) -> None:
    first = over(http, tell(http, ada, "I play the celesta."))
    over(http, tell(http, ada, "I play the celesta. I am tall and also thin."))
    exported = http.get("/v1/export", params={"user_id": ada}).json()
    assert [turn["messages"][0]["content"] for turn in exported["turns"]].count("I play the celesta.") == 1
    assert len(exported["turns"]) == 2
    http.delete(f"/memories/{first['results'][0]['id']}").raise_for_status()
    assert texts(http, ada) == ["I am tall and also thin."]
    assert not [key for key, value in reading_town.kept().items() if b"celesta" in value]


def test_an_event_of_nobody_is_not_found(http: httpx.Client) -> None:
    tag = owner_tag(UserId("x"))
    for id in ("none", f"{tag[:8]}-{tag[8:12]}-8{tag[12:]}-8000-000000000000"):
        assert http.get(f"/v1/event/{id}/").status_code == 404


async def a_closed_gate() -> asyncio.Event:
    return asyncio.Event()


async def stopped(shard: Any) -> None:
    shard.distillation.close()
    await shard.distillation.settled()
