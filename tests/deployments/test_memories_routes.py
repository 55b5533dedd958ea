"""What the routes under /v1/memories do for one user, and that they do nothing for another."""

from __future__ import annotations

from urllib.parse import quote

import httpx
import pytest
from gateway_fakes import Cluster

STRANGE_USERS = ["ada", "a/b", "a%2Fb", "50%", "Ада Ловлас", "山田/太郎?&=#", ".."]


async def add(client: httpx.AsyncClient, user: str, *texts: str) -> list[dict[str, object]]:
    messages = [{"role": "user", "content": text} for text in texts]
    body = {"user_id": user, "messages": messages, "infer": False}
    response = await client.post("/v1/memories", json=body)
    assert response.status_code == 200, response.text
    results: list[dict[str, object]] = response.json()["results"]
    return results


async def test_each_message_becomes_one_fact(client: httpx.AsyncClient) -> None:
    added = await add(client, "ada", "I like tea.", "I live in Rome.")
    assert [(fact["memory"], fact["event"], fact["encoded"]) for fact in added] == [
        ("I like tea.", "ADD", False),
        ("I live in Rome.", "ADD", False),
    ]


async def test_a_plain_text_is_one_user_message(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/memories/", json={"user_id": "ada", "messages": "I like tea."})
    assert [fact["memory"] for fact in response.json()["results"]] == ["I like tea."]


async def test_a_fact_told_twice_is_kept_once(client: httpx.AsyncClient) -> None:
    (first,) = await add(client, "ada", "I like tea.")
    (again,) = await add(client, "ada", "I like tea.")
    assert (again["event"], again["id"]) == ("NONE", first["id"])


@pytest.mark.parametrize("user", STRANGE_USERS)
async def test_any_user_id_can_store_list_read_and_delete(client: httpx.AsyncClient, user: str) -> None:
    (fact,) = await add(client, user, "I like tea.")
    listed = (await client.get("/v1/memories", params={"user_id": user})).json()
    assert [(found["id"], found["user_id"]) for found in listed["results"]] == [(fact["id"], user)]
    path = f"/v1/memories/{fact['id']}?user_id={quote(user, safe='')}"
    assert (await client.get(path)).json()["memory"] == "I like tea."
    assert (await client.delete(path)).status_code == 200
    assert (await client.get(path)).status_code == 404


@pytest.mark.parametrize("slash", ["", "/"])
async def test_every_route_works_with_and_without_a_trailing_slash(client: httpx.AsyncClient, slash: str) -> None:
    (fact,) = await add(client, "ada", "I like tea.")
    query = {"user_id": "ada"}
    assert (await client.get(f"/v1/memories{slash}", params=query)).json()["count"] == 1
    assert (await client.get(f"/v1/memories/{fact['id']}{slash}", params=query)).status_code == 200
    assert (await client.delete(f"/v1/memories/{fact['id']}{slash}", params=query)).status_code == 200
    assert (await client.delete(f"/v1/memories{slash}", params=query)).json()["deleted"] == 0


@pytest.mark.parametrize("id", ["nope", "a/b", "a%2Fb", "%2F", "//", "%00", "x" * 300, "%FF"])
async def test_an_id_that_no_fact_has_is_not_found(client: httpx.AsyncClient, id: str) -> None:
    await add(client, "ada", "I like tea.")
    for method in ("GET", "DELETE"):
        response = await client.request(method, f"/v1/memories/{id}?user_id=ada")
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "not_found"
    assert (await client.get("/v1/memories?user_id=ada")).json()["count"] == 1


async def test_pages_link_to_their_neighbours_and_keep_the_query(client: httpx.AsyncClient) -> None:
    await add(client, "a&b", *(f"fact {i}" for i in range(5)))
    seen, url = [], "/v1/memories?user_id=a%26b&page_size=2"
    while url:
        page = (await client.get(url)).json()
        assert page["count"] == 5
        seen += [fact["memory"] for fact in page["results"]]
        url = page["next"]
    assert seen == [f"fact {i}" for i in range(5)]
    before_last = (await client.get(page["previous"])).json()
    assert [fact["memory"] for fact in before_last["results"]] == ["fact 2", "fact 3"]


async def test_deleting_all_of_a_user_leaves_the_others(client: httpx.AsyncClient) -> None:
    await add(client, "ada", "I like tea.", "I live in Rome.")
    (bobs,) = await add(client, "bob", "I like tea.")
    assert (await client.delete("/v1/memories", params={"user_id": "ada"})).json()["deleted"] == 2
    assert (await client.get("/v1/memories", params={"user_id": "ada"})).json()["count"] == 0
    assert (await client.get(f"/v1/memories/{bobs['id']}", params={"user_id": "ada"})).status_code == 404
    assert (await client.get(f"/v1/memories/{bobs['id']}", params={"user_id": "bob"})).status_code == 200


async def test_a_user_stays_with_one_shard(client: httpx.AsyncClient, cluster: Cluster) -> None:
    for _ in range(3):
        await add(client, "ada", "I like tea.")
        await client.get("/v1/memories", params={"user_id": "ada"})
    assert cluster.directory.placements["ada"].epoch == 1
    assert cluster.other_than(cluster.shards.of("ada")).facts == {}


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize("path", ["/v1/memories", "/v1/memories/some-id"])
async def test_a_user_for_whom_nothing_was_ever_stored_is_not_found_and_not_made(
    client: httpx.AsyncClient, cluster: Cluster, method: str, path: str
) -> None:
    response = await client.request(method, f"{path}?user_id=nobody")
    assert response.status_code == 404
    assert response.json()["error"]["message"] == "There is no such user: nothing was ever stored under this id."
    assert cluster.directory.placements == {}


async def test_a_user_whose_facts_were_all_deleted_is_there_with_an_empty_page(client: httpx.AsyncClient) -> None:
    await add(client, "ada", "I like tea.")
    await client.delete("/v1/memories?user_id=ada")
    response = await client.get("/v1/memories?user_id=ada")
    assert (response.status_code, response.json()["results"]) == (200, [])
