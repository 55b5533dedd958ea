"""Who may do what with which key, and how much: on every route, for every tenant."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from gateway_fakes import Cluster

from deployments.access import ADMINS, OPEN, needed_role
from deployments.gateway import create_app
from sharding.api_keys import Role
from tests.deployments.town import MODEL, Town, a_town
from tests.sharding.real_valkey import Valkey

ROUTES = [
    (method.upper(), path)
    for path, methods in create_app(Cluster().gateway).openapi()["paths"].items()
    for method in methods
]
CLOSED = [(method, path) for method, path in ROUTES if path not in OPEN]


@pytest.fixture(scope="module")
def guarded(valkey: Valkey) -> Iterator[Town]:
    with a_town(valkey, require_keys=True) as town:
        yield town


def key(town: Town, tenant: str, role: Role = "write") -> str:
    made: tuple[str, Any] = town.run(town.api_keys.create(tenant, role))
    return made[0]


def client(town: Town, key: str | None, scheme: str = "Bearer") -> httpx.Client:
    headers = {} if key is None else {"X-API-Key": key} if scheme == "X" else {"Authorization": f"{scheme} {key}"}
    return httpx.Client(base_url=town.url, headers=headers, trust_env=False, timeout=20)


def tell(http: httpx.Client, user: str, text: str, **more: Any) -> httpx.Response:
    return http.post("/v1/memories", json={"user_id": user, "messages": text, "infer": False, **more})


def chat(http: httpx.Client, user: str | None, **more: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "What do you know?"}]
    return http.post("/v1/chat/completions", json={"model": MODEL, "user_id": user, "messages": messages, **more})


def filled(path: str) -> str:
    """The path with something in each of its gaps."""
    return path.format(memory_id="x", entity_type="user", name="x", event_id="x", model="x", tenant="x")


def test_no_route_but_the_open_ones_answers_without_a_key_or_with_a_wrong_one(guarded: Town) -> None:
    assert len(CLOSED) > 20
    for text in (None, "msk-wrong"):
        with client(guarded, text) as http:
            for method, path in CLOSED:
                answer = http.request(method, filled(path))
                assert answer.status_code == 401, (method, path)
                assert answer.json()["error"]["code"] == "invalid_api_key"
            assert http.get("/healthz").status_code == http.get("/readyz").status_code == 200
    for text in ("x" * 5000, "msk-w%C3%A9"):
        with client(guarded, text) as http:
            assert http.get("/v1/ping/").status_code == 401


@pytest.mark.parametrize("scheme", ["Bearer", "Token", "bearer", "X"])
def test_a_key_is_taken_however_the_clients_send_it(guarded: Town, scheme: str) -> None:
    with client(guarded, key(guarded, "t"), scheme) as http:
        assert http.get("/v1/ping/").status_code == 200


@pytest.mark.parametrize("role", ["read", "write", "admin"])
def test_a_key_does_what_its_role_may_on_every_route(guarded: Town, role: Role) -> None:
    ranks = ["read", "write", "admin"]
    with client(guarded, key(guarded, f"role-{role}", role)) as http:
        for method, path in CLOSED:
            answer = http.request(method, filled(path))
            allowed = ranks.index(role) >= ranks.index(needed_role(method, path))
            assert (answer.status_code == 403) == (not allowed), (method, path, answer.text)


def test_what_changes_memories_needs_a_key_that_may_write() -> None:
    reading = {("POST", path) for path in ("/v1/chat/completions", "/v3/memories/", "/v3/memories/search/", "/search")}
    for method, path in CLOSED:
        expected = (
            "admin"
            if path in ADMINS or "/admin/" in path
            else "read"
            if method == "GET" or (method, path) in reading
            else "write"
        )
        assert needed_role(method, path) == expected


def test_two_tenants_have_nothing_in_common(guarded: Town) -> None:
    with client(guarded, key(guarded, "red")) as red, client(guarded, key(guarded, "blue")) as blue:
        mine = tell(red, "ada", "ada owns a red boat", agent_id="cook", run_id="r").raise_for_status().json()
        id = mine["results"][0]["id"]
        for path in (f"/v1/memories/{id}/", f"/v1/memories/{id}/history/", f"/memories/{id}"):
            assert blue.get(path).status_code == 404
        for refused in (
            blue.delete(f"/v1/memories/{id}/"),
            blue.delete(f"/v1/memories/{id}/?user_id=ada"),
            blue.put(f"/v1/memories/{id}/", json={"text": "mine now"}),
            blue.put("/v1/batch/", json={"memories": [{"memory_id": id, "text": "mine now"}]}),
            blue.request("DELETE", "/v1/batch/", json={"memories": [{"memory_id": id}]}),
            blue.post("/v1/feedback/", json={"memory_id": id, "feedback": "NEGATIVE"}),
            blue.get(f"/v1/event/{mine['event_id']}/"),
            blue.get("/v1/memories?user_id=ada"),
            blue.get("/v1/export?user_id=ada"),
            blue.delete("/v2/entities/user/ada/"),
            blue.delete("/v2/entities/agent/cook/"),
        ):
            assert refused.status_code == 404, refused.request.url
        blue.delete("/v1/memories?agent_id=cook")
        for filters in ({"user_id": "ada"}, {"agent_id": "cook"}, {"user_id": "*"}, {"OR": [{"run_id": "r"}]}):
            assert blue.post("/v3/memories/", json={"filters": filters}).json()["results"] == []
            found = blue.post("/v3/memories/search/", json={"query": "boat", "filters": filters, "threshold": -1})
            assert found.json()["results"] == []
        assert blue.get("/v1/entities/").json()["count"] == 0
        assert chat(blue, "ada").json()["memory"]["fact_ids"] == []
        assert chat(red, "ada").json()["memory"]["fact_ids"] == [id]
        assert red.get(f"/v1/memories/{id}/").json()["version"] == 1


def test_no_name_reaches_into_another_tenant(guarded: Town) -> None:
    with client(guarded, key(guarded, "deep")) as http:
        tell(http, "ada", "ada dives").raise_for_status()
    there = "deep\x1fuser\x1fada"
    with client(guarded, key(guarded, "", "admin")) as http:
        for filters in ({"user_id": there}, {"agent_id": there}, {"OR": [{"user_id": there}]}):
            assert http.post("/v3/memories/", json={"filters": filters}).status_code == 400
            assert http.delete("/v1/memories", params={"filters": repr(filters)}).status_code == 400
        assert http.get("/v1/memories", params={"user_id": there}).status_code == 400
        assert http.delete("/v2/entities/user/deep%1Fuser%1Fada/").status_code == 400
        assert http.delete("/v1/memories", params={"filters": r"{'agent_id': '\ud800'}"}).status_code == 400
        assert chat(http, there).status_code == 400


def test_the_same_user_of_two_tenants_is_two_users(guarded: Town) -> None:
    for tenant in ("one", "two"):
        with client(guarded, key(guarded, tenant)) as http:
            tell(http, "bob", f"bob is of tenant {tenant}").raise_for_status()
    for tenant in ("one", "two"):
        with client(guarded, key(guarded, tenant)) as http:
            listed = http.get("/v1/memories?user_id=bob").json()["results"]
            assert [(memory["memory"], memory["user_id"]) for memory in listed] == [
                (f"bob is of tenant {tenant}", "bob")
            ]


def test_a_revoked_key_is_refused_within_seconds(guarded: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.access.CACHE_S", 0.0)
    text, known = guarded.run(guarded.api_keys.create("t", "read"))
    with client(guarded, text) as http:
        assert http.get("/v1/ping/").status_code == 200
        assert guarded.run(guarded.api_keys.revoke(known.id))
        assert http.get("/v1/ping/").status_code == 401


def test_keys_are_kept_as_hashes_only(guarded: Town) -> None:
    text = key(guarded, "hashed")
    kept = b" ".join(guarded.kept().values())
    assert b"hashed" in kept
    assert text.encode() not in kept
    assert text.removeprefix("msk-").encode() not in kept


def test_the_clients_of_others_show_refusals_as_their_own(guarded: Town) -> None:
    url = f"{guarded.url}/v1"
    with (
        openai.OpenAI(base_url=url, api_key="msk-wrong", max_retries=0) as asking,
        pytest.raises(openai.AuthenticationError, match="not known"),
    ):
        asking.models.list()
    with openai.OpenAI(base_url=url, api_key=key(guarded, "t", "read"), max_retries=0) as asking:
        assert [model.id for model in asking.models.list()] == [MODEL]


# -- limits -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def limited(valkey: Valkey) -> Iterator[Town]:
    limits = {"tenant_requests_per_minute": 6, "user_requests_per_minute": 3}
    with a_town(valkey, {"user_bytes": 200, "tenant_bytes": 300}, require_keys=True, **limits) as town:
        yield town


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """No minute ends during a test."""
    monkeypatch.setattr("sharding.limits.MINUTE_S", 10**9)


def test_a_tenants_requests_are_limited_and_another_tenants_are_not(limited: Town, frozen: None) -> None:
    with client(limited, key(limited, "busy")) as busy, client(limited, key(limited, "calm")) as calm:
        answers = [busy.get("/v1/ping/") for _ in range(8)]
        assert [answer.status_code for answer in answers] == [200] * 6 + [429] * 2
        assert [answer.headers["x-ratelimit-remaining"] for answer in answers[:6]] == list("543210")
        refused = answers[-1]
        assert refused.headers["x-ratelimit-limit"] == "6"
        assert int(refused.headers["retry-after"]) > 0
        assert refused.json()["detail"].startswith("6 requests a minute are used up")
        assert calm.get("/v1/ping/").status_code == 200


def test_a_users_requests_are_limited_within_the_tenants(limited: Town, frozen: None) -> None:
    with client(limited, key(limited, f"users-{uuid.uuid4().hex}")) as http:
        assert [chat(http, "ada").status_code for _ in range(4)] == [200, 200, 200, 429]
        assert chat(http, "bob").status_code == 200


def test_tokens_are_counted_when_a_chat_ends(valkey: Valkey, frozen: None) -> None:
    with a_town(valkey, user_tokens_per_minute=10) as town, client(town, None) as http:
        assert chat(http, "ada").json()["usage"]["total_tokens"] > 10
        refused = chat(http, "ada", stream=True)
        assert (refused.status_code, "10 tokens of this user" in refused.text) == (429, True)
        assert chat(http, "bob", stream=True).status_code == 200
        assert chat(http, "bob").status_code == 429


def test_bytes_of_a_user_and_of_a_tenant_are_limited_with_the_numbers(limited: Town, frozen: None) -> None:
    tenant = f"bytes-{uuid.uuid4().hex}"
    with client(limited, key(limited, tenant)) as http:
        (fact,) = tell(http, "ada", "a" * 150).raise_for_status().json()["results"]
        refused = tell(http, "ada", "b" * 60)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "quota_exceeded")
        assert refused.json()["detail"] == "This user's memories would take 214 of 200 bytes. Delete some."
    with client(limited, key(limited, tenant)) as http:
        refused = tell(http, "bob", "c" * 180)
        assert refused.json()["detail"].startswith("Your memories take 152 of 300 bytes")
        http.delete(f"/v1/memories/{fact['id']}/").raise_for_status()


def test_what_was_deleted_makes_room(limited: Town, frozen: None) -> None:
    with client(limited, key(limited, f"room-{uuid.uuid4().hex}")) as http:
        (fact,) = tell(http, "ada", "a" * 190).raise_for_status().json()["results"]
        http.delete(f"/v1/memories/{fact['id']}/").raise_for_status()
        tell(http, "bob", "b" * 190).raise_for_status()
        (small,) = tell(http, "ada", "c" * 90).raise_for_status().json()["results"]
        assert http.put(f"/v1/memories/{small['id']}/", json={"text": "d" * 150}).status_code == 413


# -- the audit log ----------------------------------------------------------------------------------------------------


def test_writes_and_deletions_are_noted_and_never_a_text(guarded: Town, caplog: pytest.LogCaptureFixture) -> None:
    text, known = guarded.run(guarded.api_keys.create("audited", "write"))
    with caplog.at_level(logging.DEBUG), client(guarded, text) as http:
        (fact,) = tell(http, "ada", "the word is sackbut").raise_for_status().json()["results"]
        http.put(f"/v1/memories/{fact['id']}/", json={"text": "the word is serpent"}).raise_for_status()
        said = {"memory_id": fact["id"], "feedback": "POSITIVE", "feedback_reason": "a sackbut indeed"}
        http.post("/v1/feedback/", json=said).raise_for_status()
        http.post("/v3/memories/search/", json={"query": "sackbut", "filters": {"user_id": "ada"}}).raise_for_status()
        http.get("/v1/memories?user_id=ada").raise_for_status()
        chat(http, "ada").raise_for_status()
        tell(http, "ada", "sackbut " * 2000)
        http.delete(f"/v1/memories/{fact['id']}/").raise_for_status()
        http.delete("/v1/memories?user_id=ada").raise_for_status()
    lines = [json.loads(record.message) for record in caplog.records if record.name == "memshard.audit"]
    assert [(line["action"], line["ids"]) for line in lines] == [
        ("add", [fact["id"]]),
        ("update", [fact["id"]]),
        ("feedback", [fact["id"]]),
        ("delete", [fact["id"]]),
        ("forget", []),
    ]
    assert {(line["tenant"], line["key"], line["user"]) for line in lines} == {("audited", known.id, "ada")}
    assert "sackbut" not in caplog.text
    assert "serpent" not in caplog.text
