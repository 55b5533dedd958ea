"""A model is prepared once, and what has its final name is complete. Conversion itself is stood in for here."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from cluster import models
from cluster.settings import Settings
from sharding.errors import StartupError

WRITE = "import pathlib, sys; pathlib.Path(sys.argv[1], 'config.json').write_text('{}')"
DIE = WRITE + "; sys.exit('Traceback\\nOSError: disk full')"


def converting(program: str) -> models.Command:
    def command(source: Path, target: Path) -> Sequence[str]:
        assert source.suffix == ".gguf"
        return (sys.executable, "-c", program, str(target))

    return command


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.from_environment(state_dir=tmp_path)


def test_the_second_preparation_does_nothing(settings: Settings) -> None:
    said: list[str] = []
    first = models.prepare_language_model(settings, said.append, converting(WRITE))
    assert (first / "config.json").is_file()
    assert first.is_relative_to(settings.state_dir)
    assert len(said) == 2

    assert models.prepare_language_model(settings, said.append, converting("raise SystemExit(1)")) == first
    assert len(said) == 2


def test_one_that_fails_half_way_leaves_nothing_and_says_why(settings: Settings) -> None:
    with pytest.raises(StartupError, match="could not be prepared: OSError: disk full"):
        models.prepare_language_model(settings, command=converting(DIE))
    assert list((settings.state_dir / "models").iterdir()) == []
    assert models.prepare_language_model(settings, command=converting(WRITE)).is_dir()


def test_the_loser_of_a_race_uses_what_the_winner_made(settings: Settings) -> None:
    def slower(source: Path, target: Path) -> Sequence[str]:
        models.prepare_language_model(settings, command=converting(WRITE))
        return converting(WRITE)(source, target)

    prepared = models.prepare_language_model(settings, command=slower)
    assert list(prepared.parent.iterdir()) == [prepared]


def test_a_state_directory_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = Settings.from_environment(state_dir=tmp_path / "file")
    with pytest.raises(StartupError, match="could not be written"):
        models.prepare_language_model(settings, command=converting(WRITE))


def test_a_configured_model_is_used_where_it_is_and_gives_its_name(tmp_path: Path) -> None:
    model = tmp_path / "my-model"
    model.mkdir()
    settings = Settings.from_environment(model=model)
    with pytest.raises(StartupError, match=r"MEMSHARD_MODEL is .*/my-model, which is not a model directory"):
        models.prepare_language_model(settings)
    (model / "config.json").write_text("{}")
    assert models.prepare_language_model(settings) == model
    assert models.model_name(settings) == "my-model"
    assert models.model_name(settings.model_copy(update={"served_model_name": "mine"})) == "mine"


def test_the_packaged_embedding_model_is_there(settings: Settings) -> None:
    config = json.loads((models.embedding_model(settings) / "config.json").read_text())
    assert config["hidden_size"] == 384
