"""All of a tenant is deleted in one call, and nothing of anybody else."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import pytest

from deployments import access
from deployments.callers import Caller
from deployments.tenants import MOST_TIMES, Tenants
from sharding.errors import Unavailable
from sharding.ids import UserId
from tests.deployments.town import Town, a_town
from tests.sharding.real_valkey import Valkey

RED, BLUE = [UserId("red\x1fuser\x1fada")], [UserId("red\x1fuser\x1fada"), UserId("red\x1fagent\x1fcook")]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "CACHE_S", 0.0)


@pytest.fixture(scope="module")
def guarded(valkey: Valkey) -> Any:
    limits = {"tenant_requests_per_minute": 1000, "user_requests_per_minute": 1000}
    with a_town(valkey, {"tenant_bytes": 1 << 20}, require_keys=True, **limits) as town:
        yield town


def client(town: Town, tenant: str, role: Any = "admin") -> httpx.Client:
    key, _ = town.run(town.api_keys.create(tenant, role))
    return httpx.Client(base_url=town.url, headers={"X-API-Key": key}, trust_env=False, timeout=20)


def fill(http: httpx.Client) -> None:
    """Two users, an agent of its own, a turn, feedback."""
    for scope in ({"user_id": "ada"}, {"user_id": "bob", "agent_id": "cook"}, {"agent_id": "cook"}):
        told = http.post("/v1/memories", json={**scope, "messages": "The boat is red."}).raise_for_status().json()
    said = {"memory_id": told["results"][0]["id"], "feedback": "POSITIVE"}
    http.post("/v1/feedback/", json=said).raise_for_status()
    http.post("/v3/memories/add/", json={"user_id": "eve", "messages": "Nothing."}).raise_for_status()


def test_everything_of_a_tenant_goes_in_one_call_and_nothing_of_another(
    guarded: Town, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "memshard.audit")
    with client(guarded, "red") as red, client(guarded, "red", "read") as reader, client(guarded, "redder") as other:
        fill(red)
        fill(other)
        for shard in guarded.shards.by_id.values():
            guarded.run(shard.distillation.settled())
        answer = red.delete("/v1/admin/tenants/red").raise_for_status().json()
        assert answer == {"message": "The tenant was deleted.", "users": 4, "memories": 4, "keys": 2}
        lines = [json.loads(record.message) for record in caplog.records if record.name == "memshard.audit"]
        assert [(line["tenant"], bool(line["key"])) for line in lines if line["action"] == "forget_tenant"] == [
            ("red", True)
        ]
        left = [key.decode() for key in guarded.kept() if b"red%1F" in key or b":red}" in key]
        kinds = {key.rpartition("}:")[2].partition(":")[0] for key in left}
        assert kinds == {"owner", "seq"}, "who owned the users, and numbers given out"
        assert b'"red"' not in b"".join(guarded.kept().values()), "nor a key of it"
        held = [m.placement.user for shard in guarded.shards.by_id.values() for m in shard.table.memories() if len(m)]
        assert not [user for user in held if user.startswith("red\x1f")]
        assert [http.get("/v1/ping/").status_code for http in (red, reader, other)] == [401, 401, 200]
        assert other.get("/v1/entities/").json()["count"] == 4
        assert other.get("/v1/export", params={"user_id": "ada"}).json()["memories"]
    with client(guarded, "red") as again:
        assert again.get("/v1/entities/").json()["count"] == 0
        assert again.get("/v1/memories", params={"user_id": "ada"}).json()["results"] == []
        assert again.delete("/v1/admin/tenants/red").json()["memories"] == 0


def test_what_names_no_single_tenant_deletes_nothing(guarded: Town, town: Town) -> None:
    names = ("%2A", "%20", "re%2Ad", "red%1Fuser%1Fada", "red%2F..", "x" * 65, "%7B%7D")
    with client(guarded, "kept") as http:
        fill(http)
        for name in names:
            assert http.delete(f"/v1/admin/tenants/{name}").status_code in (400, 404)
            unguarded = httpx.delete(f"{town.url}/v1/admin/tenants/{name}", trust_env=False)
            assert unguarded.status_code in (400, 404)
        for path in ("/v1/admin/tenants/", "/v1/admin/tenants"):
            assert http.delete(path).status_code in (404, 405)
        assert http.get("/v1/entities/").json()["count"] == 4


def test_a_key_deletes_its_own_tenant_only_and_only_an_admins(guarded: Town) -> None:
    with client(guarded, "mine") as http, client(guarded, "mine", "write") as writer:
        fill(http)
        with client(guarded, "another") as another:
            assert another.delete("/v1/admin/tenants/mine").status_code == 404
        assert writer.delete("/v1/admin/tenants/mine").status_code == 403
        assert http.get("/v1/entities/").json()["count"] == 4


class Written:
    """A tenant that is written to while it is deleted: who there is, each time that somebody looks."""

    def __init__(self, *found: list[UserId]) -> None:
        self.found = list(found)
        self.forgotten: list[UserId] = []
        self.cleared = False

    async def everybody(self, tenant: str, *, with_memories: bool) -> list[UserId]:
        return self.found.pop(0)

    async def forget(self, tenant: str) -> None:
        self.cleared = True

    async def revoke_all(self, tenant: str, but: str | None = None) -> int:
        return 1

    async def forget_known_owner(self, caller: Caller, owner: UserId) -> int:
        self.forgotten.append(owner)
        return 1


async def test_who_was_written_to_meanwhile_is_deleted_again_before_the_answer() -> None:
    names = Written(RED, RED, BLUE, RED, [])
    there_was = await Tenants(names, names, names).forget(Caller("red", "admin", "k"), "red")  # type: ignore[arg-type]
    assert names.forgotten == [*RED, *BLUE, *RED]
    assert (there_was.users, there_was.memories, there_was.keys) == (2, 4, 2)
    assert names.cleared


async def test_a_tenant_that_is_written_to_for_ever_is_not_said_to_be_gone() -> None:
    names = Written(*[RED] * (2 + MOST_TIMES))
    with pytest.raises(Unavailable, match="still written to"):
        await Tenants(names, names, names).forget(Caller("red", "admin", "k"), "red")  # type: ignore[arg-type]
    assert not names.cleared
