"""The routes of mem0's self-hosted server, as people call them by hand; and many clients at once."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.deployments.town import Town


@pytest.fixture
async def http(town: Town) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=town.url, trust_env=False, timeout=20, limits=limits) as http:
        yield http


@pytest.fixture
def ada() -> str:
    return f"ada-{uuid.uuid4().hex}"


async def test_a_memory_lives_through_all_routes(http: httpx.AsyncClient, ada: str) -> None:
    told = {"user_id": ada, "messages": [{"role": "user", "content": "I like tea."}], "infer": False}
    (added,) = (await http.post("/memories", json=told)).json()["results"]
    path = f"/memories/{added['id']}"
    assert (added["memory"], added["event"]) == ("I like tea.", "ADD")
    assert (await http.get(path)).json()["hash"]
    assert (await http.put(path, json={"text": "I like mate."})).json() == {"message": "Memory updated successfully!"}
    listed = (await http.get("/memories", params={"user_id": ada, "top_k": 5})).json()
    assert [memory["memory"] for memory in listed["results"]] == ["I like mate."]
    assert [entry["new_memory"] for entry in (await http.get(f"{path}/history")).json()] == [
        "I like tea.",
        "I like mate.",
    ]
    for where in ({"filters": {"user_id": ada}}, {"user_id": ada}):
        found = (await http.post("/search", json={"query": "mate", "threshold": -1, **where})).json()
        assert [memory["memory"] for memory in found["results"]] == ["I like mate."]
    assert ada in [entity["name"] for entity in (await http.get("/entities")).json()]
    assert (await http.delete(path)).json() == {"message": "Memory deleted successfully"}
    assert (await http.get(path)).status_code == 404
    await http.post("/memories", json=told)
    assert (await http.delete("/memories", params={"user_id": ada})).status_code == 200
    assert (await http.get("/memories", params={"user_id": ada})).json() == {"results": []}
    await http.post("/memories", json=told)
    assert (await http.delete(f"/entities/user/{ada}")).status_code == 200
    assert (await http.get("/memories", params={"user_id": ada})).json() == {"results": []}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/memories", 400),
        ("DELETE", "/memories", 400),
        ("GET", "/memories?user_id=x&top_k=0", 400),
        ("GET", "/memories/unknown", 404),
        ("DELETE", "/entities/planet/mars", 404),
        ("DELETE", "/entities/agent/nobody", 404),
        ("POST", "/reset", 501),
        ("GET", "/configure", 501),
        ("POST", "/search", 400),
    ],
)
async def test_what_cannot_be_done_is_refused_with_a_sentence(
    http: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    answer = await http.request(method, path)
    assert answer.status_code == status
    assert answer.json()["detail"].endswith(".")


async def test_a_fact_that_32_clients_add_at_once_is_one_fact(http: httpx.AsyncClient, ada: str) -> None:
    told = {"user_id": ada, "messages": "I like tea.", "infer": False}
    answers = await asyncio.gather(*(http.post("/memories", json=told) for _ in range(32)))
    results = [answer.raise_for_status().json()["results"][0] for answer in answers]
    assert len({result["id"] for result in results}) == 1
    assert sorted(result["event"] for result in results) == ["ADD"] + ["NONE"] * 31
    assert len((await http.get("/memories", params={"user_id": ada})).json()["results"]) == 1


async def test_of_32_updates_at_once_the_history_has_every_one(http: httpx.AsyncClient, ada: str) -> None:
    told = {"user_id": ada, "messages": "0", "infer": False}
    (fact,) = (await http.post("/memories", json=told)).json()["results"]
    path = f"/memories/{fact['id']}"
    answers = await asyncio.gather(*(http.put(path, json={"text": str(n)}) for n in range(1, 33)))
    assert {answer.status_code for answer in answers} == {200}
    history = (await http.get(f"{path}/history")).json()
    assert sorted(int(entry["new_memory"]) for entry in history) == list(range(33))
    assert history[-1]["new_memory"] == (await http.get(path)).json()["memory"]
