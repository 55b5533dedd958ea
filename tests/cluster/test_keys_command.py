"""`memshard keys`, with the embedded Redis: in use by a server, and by nobody."""

from __future__ import annotations

import asyncio
import base64
import pickle
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from typer.testing import CliRunner

from cluster import app, keys, serve
from cluster.embedded_redis import EmbeddedRedis
from cluster.settings import Settings
from sharding.api_keys import ApiKey, KeyStore
from sharding.client import connect
from sharding.errors import InvalidRequest, NotFound, StartupError
from sharding.keys import KeySpace
from sharding.sealing import new_secret


@pytest.fixture
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEMSHARD_STATE_DIR", str(tmp_path))
    return tmp_path


def run(*arguments: str) -> str:
    done = CliRunner().invoke(keys.app, arguments, catch_exceptions=False, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.stdout


def found(url: str, key: str) -> ApiKey | None:
    async def find() -> ApiKey | None:
        async with connect(url) as redis:
            return await KeyStore(redis, KeySpace("memshard", "any")).find(key)

    return asyncio.run(find())


def test_keys_are_made_listed_and_revoked_while_nothing_runs(state_dir: Path) -> None:
    key = run("create", "acme", "--role", "read", "--label", "the dashboard").strip()
    listed = run("list")
    assert "acme" in listed
    assert "the dashboard" in listed
    assert key not in listed
    with EmbeddedRedis(state_dir / "redis") as server:
        server.wait_ready()
        known = found(server.url, key)
        assert known is not None
        assert (known.tenant, known.role) == ("acme", "read")
    run("revoke", known.id)
    assert known.id not in run("list")
    with pytest.raises(NotFound, match="no key with the id"):
        run("revoke", known.id)


@pytest.mark.parametrize("tenant", ["", "a b", "a\x1fuser\x1fb", "x" * 65])
def test_a_tenants_name_is_a_plain_word(state_dir: Path, tenant: str) -> None:
    with pytest.raises(InvalidRequest, match="1 to 64"):
        run("create", tenant)


def test_a_running_servers_redis_is_asked(state_dir: Path) -> None:
    with EmbeddedRedis(state_dir / "redis") as server:
        server.wait_ready()
        key = run("create", "acme").strip()
        assert found(server.url, key) is not None
        assert found(server.url, f"{key}x") is None


def test_where_others_can_call_a_start_without_any_key_is_refused(state_dir: Path) -> None:
    settings = Settings.from_environment(host="0.0.0.0")
    assert settings.keys_required
    with EmbeddedRedis(state_dir / "redis") as server:
        server.wait_ready()
        with pytest.raises(StartupError, match=r"others can call 0\.0\.0\.0, and there is none; make one"):
            serve.check_keys(settings, server.url)
        run("create", "acme")
        serve.check_keys(settings, server.url)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.0.0.2"])
def test_on_this_machine_alone_keys_are_off_unless_they_are_asked_for(host: str) -> None:
    assert not Settings.from_environment(host=host).keys_required
    assert Settings.from_environment(host=host, require_keys=True).keys_required


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_elsewhere_keys_cannot_be_switched_off(host: str) -> None:
    with pytest.raises(StartupError, match="MEMSHARD_REQUIRE_KEYS may be false on a loopback address only"):
        Settings.from_environment(host=host, require_keys=False)


def test_the_encryption_key_comes_from_the_environment_or_a_file(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Settings.from_environment().encryption_secret() is None
    secret = run("secret").strip()
    monkeypatch.setenv("MEMSHARD_ENCRYPTION_KEY", secret)
    settings = Settings.from_environment()
    assert settings.encryption_secret() == secret
    assert secret not in repr(settings)
    (state_dir / "key").write_text(f"{run('secret')}\n")
    monkeypatch.setenv("MEMSHARD_ENCRYPTION_KEY_FILE", str(state_dir / "key"))
    assert Settings.from_environment().encryption_secret() == (state_dir / "key").read_text().strip()
    (state_dir / "key").write_text("not a key")
    with pytest.raises(StartupError, match="not base64"):
        Settings.from_environment().encryption_secret()
    (state_dir / "key").unlink()
    with pytest.raises(StartupError, match=r"not to be read from .*key here"):
        Settings.from_environment().encryption_secret()


@pytest.mark.parametrize("place", ["variable", "file"])
def test_the_encryption_key_is_in_nothing_that_ray_keeps_and_every_process_finds_it(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    secret = new_secret()

    def put(text: str) -> None:
        (state_dir / "key").write_text(f"{text}\n")
        monkeypatch.setenv("MEMSHARD_ENCRYPTION_KEY", text)

    put(secret)
    if place == "file":
        monkeypatch.setenv("MEMSHARD_ENCRYPTION_KEY_FILE", str(state_dir / "key"))
    application: Any = app.build(
        Settings.from_environment(), redis_url="unix:///r", model_path=state_dir, embedding_path=state_dir
    )
    gateway = application._bound_deployment
    shards = gateway.init_args[0]._bound_deployment
    for bound, settings in ((shards, shards.init_args[0]), (gateway, gateway.init_args[1].args[0])):
        assert settings.encryption_key == secret, "it would be found"
        sent = cloudpickle.dumps((bound.init_args[bound is gateway :], bound.init_kwargs))
        kept = secret.encode()
        assert kept not in sent
        assert base64.b64decode(kept) not in sent
        assert secret not in repr(settings)
        assert pickle.loads(pickle.dumps(settings)).encryption_key == secret
    put(new_secret())
    with pytest.raises(StartupError, match="not the same for all processes"):
        pickle.loads(sent)
    monkeypatch.delenv("MEMSHARD_ENCRYPTION_KEY")
    (state_dir / "key").unlink()
    with pytest.raises(StartupError, match="not to be read from"):
        pickle.loads(sent)
