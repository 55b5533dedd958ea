"""Settings come from the environment once, and a bad value is one sentence that names its variable."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from cluster.settings import Settings
from sharding.errors import StartupError


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"MEMSHARD_{name.upper()}", raising=False)


def test_nothing_has_to_be_set() -> None:
    settings = Settings.from_environment()
    assert settings.base_url == "http://127.0.0.1:8000"
    assert settings.redis_url is None
    assert settings.model is None


def test_an_option_wins_over_the_environment_and_one_not_given_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSHARD_SHARDS", "3")
    monkeypatch.setenv("MEMSHARD_PORT", "9000")
    settings = Settings.from_environment(port=9001, shards=None)
    assert (settings.port, settings.shards) == (9001, 3)


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSHARD_REDIS_URL", "")
    assert Settings.from_environment().redis_url is None


def test_the_state_directory_follows_the_xdg_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert Settings.from_environment().state_dir == tmp_path / "memshard"


def test_relative_paths_are_resolved_where_they_were_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert Settings.from_environment(model=Path("here")).model == tmp_path / "here"


def test_nothing_can_be_changed_afterwards() -> None:
    with pytest.raises(ValidationError):
        Settings.from_environment().port = 1


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MEMSHARD_SHARDS", "0"),
        ("MEMSHARD_SHARDS", "two"),
        ("MEMSHARD_PORT", "65536"),
        ("MEMSHARD_PORT", "tcp://10.0.0.7:8000"),  # what Kubernetes sets for a service called memshard
        ("MEMSHARD_REDIS_URL", "http://localhost"),
        ("MEMSHARD_NAMESPACE", "Not A Name"),
        ("MEMSHARD_REQUEST_DEADLINE_S", "-1"),
        ("MEMSHARD_KV_CACHE_BYTES", "1"),
        ("MEMSHARD_HEARTBEAT_TTL_S", "1.5"),
    ],
)
def test_a_bad_value_is_one_line_that_names_its_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(StartupError) as refused:
        Settings.from_environment()
    assert variable in refused.value.message
    assert "\n" not in refused.value.message


def test_every_field_says_what_it_means() -> None:
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []


def test_a_shard_that_is_too_many_may_end_whatever_it_was_asked() -> None:
    assert Settings(shards=2).shard_stop_s == Settings(shards=2).stop_deadline_s
    settings = Settings(shards=2, max_shards=3, request_deadline_s=90.0)
    assert settings.shard_stop_s > settings.request_deadline_s
    assert Settings(shards=2, max_shards=3, stop_deadline_s=500.0).shard_stop_s == 500.0
