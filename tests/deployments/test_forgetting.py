"""What is deleted is gone when the deletion is answered: the bytes of every store are searched for it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import httpx
import pytest

from deployments.deterministic import decode
from tests.deployments.town import MODEL, Town, a_town
from tests.sharding.real_valkey import Valkey

SECRET = "xylophone"
OLDER = "glockenspiel"


@pytest.fixture(scope="module")
def quiet_town(valkey: Valkey) -> Iterator[Town]:
    """One of this module's own: what is left behind elsewhere is not found here."""
    with a_town(valkey) as town:
        yield town


@pytest.fixture
def http(quiet_town: Town) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=quiet_town.url, trust_env=False) as http:
        yield http


@pytest.fixture
def ada() -> str:
    return f"ada-{uuid.uuid4().hex}"


def remember(http: httpx.Client, user: str) -> str:
    """A fact with a history, metadata and feedback, all of which hold the secret; its id."""
    told = {"user_id": user, "agent_id": "band", "messages": f"I play the {OLDER}.", "metadata": {"what": OLDER}}
    (fact,) = http.post("/v1/memories", json=told).raise_for_status().json()["results"]
    change = {"text": f"I play the {SECRET}.", "metadata": {"what": SECRET}}
    http.put(f"/v1/memories/{fact['id']}/", json=change).raise_for_status()
    said = {"memory_id": fact["id"], "feedback": "POSITIVE", "feedback_reason": f"true, {SECRET}"}
    http.post("/v1/feedback/", json=said).raise_for_status()
    ask(http, user)
    return str(fact["id"])


def ask(http: httpx.Client, user: str) -> list[str]:
    """The ids of the facts that an answer was given from."""
    body = {"model": MODEL, "user_id": user, "messages": [{"role": "user", "content": "What do I play?"}]}
    answer = http.post("/v1/chat/completions", json=body).raise_for_status().json()
    ids: list[str] = answer["memory"]["fact_ids"]
    return ids


def found_in(town: Town, *words: str) -> list[object]:
    """Where any of the words is: keys of Redis, chunks on the workers, facts and windows on the shards."""
    places: list[object] = [
        key for key, value in town.kept().items() for word in words if word.encode() in value or word.encode() in key
    ]
    for shard in town.shards.by_id.values():
        chunks = shard.engine.chunks.values()  # type: ignore[attr-defined]
        places += [text for text in map(decode, chunks) for word in words if word in text]
        held = [fact for memory in shard.table.memories() for fact in memory.facts]
        places += [fact for fact in held for word in words if word in repr(fact)]
    return places


def chunks_of(town: Town, user: str) -> int:
    """Chunks that ledgers and workers hold for a user."""
    count = 0
    for shard in town.shards.by_id.values():
        town.run(shard.encoder.settled(user))
        ids = shard.ledger.ids_of(user)
        count += len(ids)
        assert set(ids) <= set(shard.engine.chunks)  # type: ignore[attr-defined]
    return count


@pytest.mark.parametrize("how", ["/v1/memories/{id}/", "/v1/memories?user_id={user}", "/v2/entities/user/{user}/"])
def test_a_deleted_fact_is_in_no_store_when_the_deletion_is_answered(
    quiet_town: Town, http: httpx.Client, ada: str, how: str
) -> None:
    id = remember(http, ada)
    assert found_in(quiet_town, SECRET)
    assert found_in(quiet_town, OLDER), "the history keeps it until then"
    assert chunks_of(quiet_town, ada) == 1
    http.delete(how.format(id=id, user=ada)).raise_for_status()
    assert found_in(quiet_town, SECRET, OLDER) == []
    assert chunks_of(quiet_town, ada) == 0
    assert ask(http, ada) == []


def test_a_deleted_user_is_named_in_no_list(quiet_town: Town, http: httpx.Client, ada: str) -> None:
    remember(http, ada)
    http.delete(f"/v2/entities/user/{ada}/").raise_for_status()
    assert http.get("/v1/entities/").json()["count"] == 0
    left = [key.decode().rsplit(":", 2)[1:] for key in quiet_town.kept() if ada.encode() in key]
    assert sorted(left) == [["owner", MODEL], [f"{{{ada}}}", "seq"]], "who owned the user, and numbers given out"


def test_who_only_said_what_is_no_fact_is_listed_until_that_is_deleted_too(
    quiet_town: Town, http: httpx.Client, ada: str
) -> None:
    said = {"user_id": ada, "agent_id": "listener", "messages": "."}  # a sentence without a word
    http.post("/v3/memories/add/", json=said).raise_for_status()
    for shard in quiet_town.shards.by_id.values():
        quiet_town.run(shard.distillation.settled())
    id = http.post("/v1/memories", json={"user_id": ada, "messages": "A fact."}).json()["results"][0]["id"]
    http.delete(f"/v1/memories/{id}/").raise_for_status()
    listed = {one["name"] for one in http.get("/v1/entities/").json()["results"]}
    assert listed == {ada, "listener"}
    assert http.get("/v1/export", params={"user_id": ada}).json()["turns"]
    http.delete(f"/v2/entities/user/{ada}/").raise_for_status()
    assert http.get("/v1/entities/").json()["count"] == 0
    assert http.get("/v1/export", params={"user_id": ada}).json()["turns"] == []


def test_with_an_agent_goes_what_was_said_to_it_also_where_no_fact_came_of_that(
    quiet_town: Town, http: httpx.Client, ada: str
) -> None:
    for agent, said in ((f"{ada}-a", "..."), (f"{ada}-b", " . ")):
        told = {"user_id": ada, "agent_id": agent, "messages": said}
        http.post("/v3/memories/add/", json=told).raise_for_status()
    for shard in quiet_town.shards.by_id.values():
        quiet_town.run(shard.distillation.settled())
    http.delete(f"/v2/entities/agent/{ada}-a/").raise_for_status()
    turns = http.get("/v1/export", params={"user_id": ada}).json()["turns"]
    assert [turn["told_under"] for turn in turns] == [{"user_id": ada, "agent_id": f"{ada}-b"}]
    assert {one["name"] for one in http.get("/v1/entities/").json()["results"]} == {ada, f"{ada}-b"}
    http.delete(f"/v2/entities/user/{ada}/").raise_for_status()
    assert http.get("/v1/entities/").json()["count"] == 0


def test_what_was_encoded_behind_a_deleted_fact_is_encoded_again(
    quiet_town: Town, http: httpx.Client, ada: str
) -> None:
    id = remember(http, ada)
    later = {"user_id": ada, "messages": [{"role": "user", "content": f"fact {i}"} for i in range(3)]}
    http.post("/v1/memories", json=later).raise_for_status()
    (shard,) = [one for one in quiet_town.shards.by_id.values() if ada in one.table]
    assert chunks_of(quiet_town, ada) == 4
    before = set(shard.ledger.ids_of(ada))
    http.delete(f"/v1/memories/{id}/").raise_for_status()
    assert chunks_of(quiet_town, ada) == 3
    assert before - set(shard.ledger.ids_of(ada)), "their ids depend on what stands before them"


def test_an_updated_fact_is_served_in_its_new_version_only(quiet_town: Town, http: httpx.Client, ada: str) -> None:
    id = remember(http, ada)
    assert ask(http, ada) == [id]
    assert chunks_of(quiet_town, ada) == 1
    (shard,) = [one for one in quiet_town.shards.by_id.values() if ada in one.table]
    texts = [decode(shard.engine.chunks[chunk]) for chunk in shard.ledger.ids_of(ada)]  # type: ignore[attr-defined]
    assert texts == [f"- I play the {SECRET}.\n"]
    http.delete(f"/v1/memories?user_id={ada}").raise_for_status()


def test_a_user_is_exported_in_one_call(http: httpx.Client, ada: str) -> None:
    remember(http, ada)
    exported = http.get("/v1/export", params={"user_id": ada}).raise_for_status().json()
    (memory,) = exported["memories"]
    assert (exported["type"], exported["name"]) == ("user", ada)
    assert [version["memory"] for version in memory["versions"]] == [f"I play the {OLDER}.", f"I play the {SECRET}."]
    assert memory["versions"][1]["metadata"] == {"what": SECRET}
    assert memory["feedback"]["feedback"] == "POSITIVE"
    assert http.get("/v1/export", params={"user_id": "nobody"}).status_code == 404
