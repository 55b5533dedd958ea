"""The real `mem0` clients, unmodified, over a socket."""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.deployments.town import Town

if TYPE_CHECKING:
    from mem0 import AsyncMemoryClient, MemoryClient


@pytest.fixture(scope="module")
def mem0(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The package; it reads its settings when it is imported, and writes to its folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEM0_TELEMETRY", "False")
        patch.setenv("MEM0_DIR", str(tmp_path_factory.mktemp("mem0")))
        patch.setenv("NO_PROXY", "127.0.0.1")
        import mem0

        assert "MEM0_TELEMETRY" in os.environ
        yield mem0


@pytest.fixture(scope="module")
def client(mem0: Any, town: Town) -> Iterator[MemoryClient]:
    with httpx.Client(timeout=10) as http:
        yield mem0.MemoryClient(api_key="none", host=town.url, client=http)


@pytest.fixture
async def async_client(mem0: Any, town: Town) -> AsyncIterator[AsyncMemoryClient]:
    async with mem0.AsyncMemoryClient(api_key="none", host=town.url) as client:
        yield client


@pytest.fixture
def ada() -> str:
    """A user whom no other test knows."""
    return f"ada-{uuid.uuid4().hex}"


def tell(client: MemoryClient, *texts: str, **scopes: Any) -> list[str]:
    messages = [{"role": "user", "content": text} for text in texts]
    added = client.add(messages, infer=False, **scopes)
    return [result["id"] for result in added["results"]]


def texts(answer: dict[str, Any]) -> list[str]:
    return [memory["memory"] for memory in answer["results"]]


def of(user: str, **more: Any) -> dict[str, Any]:
    return {"user_id": user, **more}


def test_an_added_memory_is_got_by_its_id_alone(client: MemoryClient, ada: str) -> None:
    added = client.add("I like tea.", user_id=ada, metadata={"mood": "calm"}, infer=False)
    (result,) = added["results"]
    assert (result["event"], result["data"]) == ("ADD", {"memory": "I like tea."})
    got = client.get(result["id"])
    assert (got["memory"], got["user_id"], got["metadata"]) == ("I like tea.", ada, {"mood": "calm"})


def test_all_are_got_page_by_page(client: MemoryClient, ada: str) -> None:
    tell(client, *(f"fact {i}" for i in range(5)), user_id=ada)
    pages = [client.get_all(filters=of(ada), page=page, page_size=2) for page in (1, 2, 3)]
    assert [page["count"] for page in pages] == [5, 5, 5]
    assert [text for page in pages for text in texts(page)] == [f"fact {i}" for i in range(5)]
    assert (pages[0]["previous"], pages[2]["next"]) == (None, None)
    assert client.get_all(filters=of("nobody"))["results"] == []


def test_a_search_finds_the_nearest_first_with_scores(client: MemoryClient, ada: str) -> None:
    tell(client, "my dog is brown", "my cat is black", "the train leaves at nine", user_id=ada)
    found = client.search("which dog is brown", filters=of(ada), top_k=2, threshold=0.0)
    assert texts(found)[0] == "my dog is brown"
    assert len(found["results"]) == 2
    scores = [result["score"] for result in found["results"]]
    assert scores == sorted(scores, reverse=True)
    assert texts(client.search("which dog is brown", filters=of(ada), threshold=0.99)) == []
    assert len(client.search("dog", filters=of(ada), limit=1, threshold=-1.0)["results"]) == 1


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({"agent_id": "cook"}, ["red", "blue"]),
        ({"agent_id": "*"}, ["red", "blue"]),
        ({"agent_id": None}, ["green"]),
        ({"NOT": [{"agent_id": "cook"}]}, ["green"]),
        ({"OR": [{"colour": "red"}, {"metadata": {"colour": "green"}}]}, ["red", "green"]),
        ({"size": {"gte": 2, "lt": 3}}, ["blue"]),
        ({"size": {"gt": 1}}, ["blue", "green"]),
        ({"size": {"lte": 1}}, ["red"]),
        ({"size": {"ne": 2}}, ["red", "green"]),
        ({"colour": {"in": ["red", "blue"]}}, ["red", "blue"]),
        ({"colour": {"nin": ["red", "blue"]}}, ["green"]),
        ({"colour": {"contains": "re"}}, ["red", "green"]),
        ({"colour": {"icontains": "RED"}}, ["red"]),
        ({"keywords": {"icontains": "GREEN"}}, ["green"]),
        ({"created_at": {"lt": "2020-01-01"}}, []),
        ({"created_at": {"gte": "2020-01-01T00:00:00Z"}}, ["red", "blue", "green"]),
        ({"run_id": "r1"}, ["green"]),
    ],
)
def test_filters_choose(client: MemoryClient, ada: str, more: dict[str, Any], found: list[str]) -> None:
    tell(client, "red", user_id=ada, agent_id="cook", metadata={"colour": "red", "size": 1})
    tell(client, "blue", user_id=ada, agent_id="cook", metadata={"colour": "blue", "size": 2})
    tell(client, "green", user_id=ada, run_id="r1", metadata={"colour": "green", "size": 3})
    filters = {"AND": [of(ada), more]}
    assert texts(client.get_all(filters=filters)) == found
    assert set(texts(client.search("red", filters=filters, threshold=-1.0))) == set(found)


def test_filters_over_several_users_are_merged(client: MemoryClient, ada: str) -> None:
    bob, agent = f"{ada}-bob", f"{ada}-agent"
    for user, text in ((ada, "first"), (bob, "second")):
        tell(client, text, user_id=user, agent_id=agent)
    tell(client, "third", agent_id=agent)
    for filters in ({"OR": [of(ada), of(bob), {"agent_id": agent}]}, {"agent_id": agent}):
        assert texts(client.get_all(filters=filters)) == ["first", "second", "third"]
        assert texts(client.get_all(filters=filters, page=2, page_size=2)) == ["third"]
    assert texts(client.get_all(filters={"AND": [{"user_id": "*"}, {"agent_id": agent}]})) == ["first", "second"]


@pytest.mark.parametrize(
    "filters",
    [{}, {"colour": "red"}, {"NOT": [{"user_id": "ada"}]}, {"OR": [{"user_id": "ada"}, {"colour": "red"}]}],
)
def test_filters_that_name_nobody_are_refused(mem0: Any, client: MemoryClient, filters: dict[str, Any]) -> None:
    for call in (lambda: client.get_all(filters=filters), lambda: client.search("x", filters=filters)):
        with pytest.raises(mem0.exceptions.ValidationError, match="whose memories"):
            call()


def test_an_update_is_a_new_version_and_history_tells_the_old_one(client: MemoryClient, ada: str) -> None:
    (id,) = tell(client, "I live in Rome", user_id=ada)
    updated = client.update(id, text="I live in Oslo", metadata={"sure": True})
    assert (updated["id"], updated["memory"], updated["version"]) == (id, "I live in Oslo", 2)
    assert texts(client.get_all(filters=of(ada))) == ["I live in Oslo"]
    history = client.history(id)
    assert [(entry["event"], entry["old_memory"], entry["new_memory"]) for entry in history] == [
        ("ADD", None, "I live in Rome"),
        ("UPDATE", "I live in Rome", "I live in Oslo"),
    ]
    assert client.search("who lives in Oslo", filters=of(ada))["results"][0]["memory"] == "I live in Oslo"


def test_an_update_to_what_another_memory_says_is_refused(mem0: Any, client: MemoryClient, ada: str) -> None:
    _, second = tell(client, "one", "two", user_id=ada)
    with pytest.raises(mem0.exceptions.ValidationError, match="has this text already"):
        client.update(second, text="one")
    assert client.get(second)["memory"] == "two"


def test_an_expired_memory_is_not_served_until_it_is_told_again(client: MemoryClient, ada: str) -> None:
    (id,) = tell(client, "The code is 1234", user_id=ada, expiration_date="2020-01-01")
    assert texts(client.get_all(filters=of(ada))) == texts(client.search("code", filters=of(ada))) == []
    assert texts(client.get_all(filters=of(ada), show_expired=True)) == ["The code is 1234"]
    assert texts(client.search("code", filters=of(ada), show_expired=True, threshold=-1.0)) == ["The code is 1234"]
    client.update(id, expiration_date=None)
    assert texts(client.get_all(filters=of(ada))) == ["The code is 1234"]
    client.update(id, expiration_date="2020-01-01")
    (again,) = tell(client, "The code is 1234", user_id=ada)
    assert again != id
    assert texts(client.get_all(filters=of(ada), show_expired=True)) == ["The code is 1234"]


def test_a_memory_is_deleted_and_its_history_with_it(mem0: Any, client: MemoryClient, ada: str) -> None:
    (id,) = tell(client, "I like tea.", user_id=ada)
    client.delete(id, delete_linked=True)
    for call in (client.get, client.history, client.delete):
        with pytest.raises(mem0.exceptions.MemoryNotFoundError):
            call(id)


def test_delete_all_takes_entities_and_typed_filters(mem0: Any, client: MemoryClient, ada: str) -> None:
    from mem0.client.types import DeleteAllMemoryOptions

    tell(client, "one", user_id=ada, agent_id="cook")
    tell(client, "two", user_id=ada)
    client.delete_all(options=DeleteAllMemoryOptions(filters={"AND": [of(ada), {"agent_id": "cook"}]}))
    assert texts(client.get_all(filters=of(ada))) == ["two"]
    client.delete_all(user_id=ada)
    assert texts(client.get_all(filters=of(ada))) == []


@pytest.mark.parametrize(
    "query",
    [
        {},
        {"user_id": "*"},
        {"user_id": ""},
        {"filters": "{}"},
        {"filters": "{'user_id': '*'}"},
        {"filters": "{'NOT': [{'user_id': 'x'}]}"},
        {"filters": "__import__('os')"},
        {"filters": "{'user_id': " + "(" * 500},
        {"user": "ada"},
        {"metadata": "{'a': 1}", "user_id": "ada"},
    ],
)
def test_a_deletion_that_does_not_say_whose_is_refused(
    mem0: Any, client: MemoryClient, ada: str, query: dict[str, str]
) -> None:
    tell(client, "kept", user_id=ada)
    with pytest.raises(mem0.exceptions.ValidationError):
        client.delete_all(**query)
    assert texts(client.get_all(filters=of(ada))) == ["kept"]


@pytest.mark.parametrize("name", ["a/b", "a%2Fb", "50%", "Ада Ловлас", "山田/太郎?&=#", "..", "a/b/", " x ", "%"])
def test_any_name_can_be_an_entity_and_be_deleted(client: MemoryClient, ada: str, name: str) -> None:
    for kind in ("user", "agent", "app", "run"):
        tell(client, "something", **{f"{kind}_id": ada + name})
        named = [(entity["type"], entity["name"]) for entity in client.users()["results"]]
        assert named.count((kind, ada + name)) == 1
        assert client.delete_users(**{f"{kind}_id": ada + name}) == {"message": "Entity deleted successfully."}
        assert (kind, ada + name) not in [(one["type"], one["name"]) for one in client.users()["results"]]
        assert texts(client.get_all(filters={f"{kind}_id": ada + name})) == []


def test_deleting_an_agent_takes_what_users_told_it_and_nothing_else(client: MemoryClient, ada: str) -> None:
    tell(client, "told the cook", user_id=ada, agent_id=f"{ada}-cook")
    tell(client, "told nobody", user_id=ada)
    client.delete_users(agent_id=f"{ada}-cook")
    assert texts(client.get_all(filters=of(ada))) == ["told nobody"]


def test_batches_change_and_delete(mem0: Any, client: MemoryClient, ada: str) -> None:
    ids = tell(client, "one", "two", "three", user_id=ada)
    client.batch_update([{"memory_id": ids[0], "text": "uno"}, {"memory_id": ids[1], "metadata": {"n": 2}}])
    assert texts(client.get_all(filters=of(ada))) == ["uno", "two", "three"]
    assert client.get(ids[1])["metadata"] == {"n": 2}
    client.batch_delete([{"memory_id": id} for id in ids[:2]])
    assert texts(client.get_all(filters=of(ada))) == ["three"]
    with pytest.raises(mem0.exceptions.MemoryNotFoundError):
        client.batch_delete([{"memory_id": ids[0]}, {"memory_id": ids[2]}])
    assert texts(client.get_all(filters=of(ada))) == [], "one that is missing does not keep the others"


def test_feedback_is_kept_with_the_memory(town: Town, client: MemoryClient, ada: str) -> None:
    (id,) = tell(client, "I like tea.", user_id=ada)
    client.feedback(id, feedback="NEGATIVE", feedback_reason="it was coffee")
    (kept,) = httpx.get(f"{town.url}/v1/export", params=of(ada)).json()["memories"]
    assert kept["feedback"] == {"feedback": "NEGATIVE", "reason": "it was coffee"}
    client.delete(id)
    assert not any(b"coffee" in value for value in town.kept().values())


def test_parts_of_the_platform_that_are_no_memory_are_not_offered(client: MemoryClient) -> None:
    for path in ("/v1/exports/", "/v2/profiles/jobs/", "/v1/summary/"):
        answer = client.client.post(path, json={})
        assert answer.status_code == 501
        assert answer.json()["detail"] == answer.json()["error"]["message"]


def test_refusals_are_its_own_exceptions_with_our_sentence(mem0: Any, client: MemoryClient, ada: str) -> None:
    with pytest.raises(mem0.exceptions.ValidationError, match="must not be blank"):
        client.add(" ", user_id=ada, infer=False)
    with pytest.raises(mem0.exceptions.MemoryQuotaExceededError, match="longer than"):
        client.add("x" * 10_000, user_id=ada, infer=False)


async def test_the_asynchronous_client_does_the_same(async_client: AsyncMemoryClient, ada: str) -> None:
    added = await async_client.add("I like tea.", user_id=ada, infer=False)
    id = added["results"][0]["id"]
    assert (await async_client.get(id))["memory"] == "I like tea."
    assert (await async_client.update(id, text="I like mate."))["memory"] == "I like mate."
    assert len(await async_client.history(id)) == 2
    assert texts(await async_client.search("mate", filters=of(ada), threshold=-1.0)) == ["I like mate."]
    assert (await async_client.get_all(filters=of(ada)))["count"] == 1
    assert ada in [entity["name"] for entity in (await async_client.users())["results"]]
    await async_client.batch_update([{"memory_id": id, "text": "I like both."}])
    await async_client.delete(id)
    await async_client.delete_all(user_id=ada)
    assert (await async_client.get_all(filters=of(ada)))["count"] == 0
