"""One page out of every benchmark, those that failed included."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import pytest
import typer
from rich.console import Console

from benchmarks import load, page
from benchmarks.cli import app
from sharding.errors import MemshardError

MEMSHARD = """#!/usr/bin/env python3
import json, pathlib, sys
name, options = (sys.argv[2], sys.argv[3:]) if sys.argv[1] == "bench" else (sys.argv[1], sys.argv[2:])
if name == "broken":
    sys.exit("no <model> here")
rows = [{"facts": 5, "ms": 1.23456}, {"facts": 10, "quick": "--quick" in options}]
pathlib.Path(options[options.index("--json") + 1]).write_text(json.dumps({"rows": rows}))
if "--plot" in options:
    pathlib.Path(options[options.index("--plot") + 1]).write_bytes(b"a picture")
"""


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    """Three benchmarks, and a `memshard` that plays them."""
    program = tmp_path / "memshard"
    program.write_text(MEMSHARD)
    program.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    commands = typer.Typer()

    @commands.command()
    def plotted(
        quick: Annotated[bool, typer.Option("--quick")] = False,
        json: Annotated[str, typer.Option("--json")] = "",
        plot: Annotated[str, typer.Option("--plot")] = "",
    ) -> None:
        """How fast it is."""

    @commands.command()
    def broken(json: Annotated[str, typer.Option("--json")] = "") -> None:
        """Needs what is not there."""

    @commands.command()
    def other(url: Annotated[str, typer.Option("--url")] = "") -> None:
        """Measures nothing."""

    return commands


def test_only_those_that_are_named_are_run(commands: typer.Typer) -> None:
    beside = {"load": load.app}
    found = page.run_all(commands, "all", Console(quiet=True), quick=True, only=["plotted", "load"], beside=beside)
    assert [outcome.name for outcome in found] == ["plotted", "load"]
    assert found[1].help.startswith("Load a server")
    assert found[1].plot == b"a picture"
    with pytest.raises(MemshardError, match="--only names other; there are broken, plotted"):
        page.run_all(commands, "all", Console(quiet=True), quick=True, only=["other"])


def test_every_benchmark_has_its_table_its_plot_and_what_it_said(commands: typer.Typer, tmp_path: Path) -> None:
    target = tmp_path / "bench.html"
    outcomes = page.run_all(commands, "all", Console(quiet=True), quick=True)
    page.write(outcomes, target)
    text = target.read_text()
    assert [outcome.name for outcome in outcomes] == ["broken", "plotted"]
    assert "failed with exit status 1" in text
    assert "no &lt;model&gt; here" in text
    assert "<tr><th>facts</th><th>ms</th><th>quick</th></tr><tr><td>5</td><td>1.235</td><td></td></tr>" in text
    assert "<td>10</td><td></td><td>True</td>" in text
    assert text.count("data:image/png;base64,YSBwaWN0dXJl") == 1
    assert not re.search(r'(src|href)="https?:', text)


def test_a_page_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(MemshardError, match="cannot be written"):
        page.write([], tmp_path)


def test_each_benchmark_that_writes_its_rows_can_be_run_short() -> None:
    group = typer.main.get_group(app)
    for name, command in group.commands.items():
        options = {option for parameter in command.params for option in parameter.opts}
        assert "--json" not in options or "--quick" in options, name
    assert {"ttft", "encode", "search"} <= group.commands.keys()
