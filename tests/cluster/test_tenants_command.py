"""`memshard tenants delete`, against a server in this process."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from typer.testing import CliRunner

from cluster import tenants
from deployments import access
from sharding.errors import InvalidRequest, Unavailable
from tests.deployments.town import Town, a_town
from tests.sharding.real_valkey import running_valkey


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Town, str]]:
    """A server, and its Redis."""
    with running_valkey(tmp_path_factory.mktemp("v")) as valkey, a_town(valkey, require_keys=True) as town:
        yield town, valkey.url


@pytest.fixture
def town(running: tuple[Town, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Town]:
    """With one fact and one key of the tenant acme."""
    town, url = running
    monkeypatch.setattr(access, "CACHE_S", 0.0)
    monkeypatch.setenv("MEMSHARD_REDIS_URL", url)
    monkeypatch.setenv("MEMSHARD_NAMESPACE", town.keys.namespace)
    key, _ = town.run(town.api_keys.create("acme", "write"))
    told = {"user_id": "ada", "messages": "I row."}
    httpx.post(f"{town.url}/v1/memories", json=told, headers={"X-API-Key": key}).raise_for_status()
    yield town
    town.run(town.api_keys.revoke_all("acme"))


def run(*arguments: str, input: str | None = None) -> str:
    done = CliRunner().invoke(tenants.app, arguments, catch_exceptions=False, input=input, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_tenant_is_deleted_by_who_may_make_its_keys(town: Town) -> None:
    assert "acme is gone: 1 memories of 1 users, and 1 keys." in run("delete", "acme", "--url", town.url, "--yes")
    assert town.run(town.api_keys.list()) == []
    assert "acme is gone: 0 memories" in run("delete", "acme", "--url", town.url, input="y\n")


def test_who_does_not_mean_it_or_names_none_deletes_nothing(town: Town) -> None:
    refused = CliRunner().invoke(tenants.app, ["delete", "acme", "--url", town.url], input="n\n")
    assert refused.exit_code == 1
    for name in ("", "*", "acme x"):
        with pytest.raises(InvalidRequest, match="Name one tenant"):
            run("delete", name, "--url", town.url, "--yes")
    assert len(town.run(town.api_keys.list())) == 1


def test_no_key_is_left_of_a_call_that_failed(town: Town) -> None:
    with pytest.raises(Unavailable):
        run("delete", "acme", "--url", "http://127.0.0.1:9", "--yes")
    assert [key.label for key in town.run(town.api_keys.list())] == [""]
