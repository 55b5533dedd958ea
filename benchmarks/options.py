"""Options that commands of measurement share."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from sharding.errors import MemshardError

Quick = Annotated[bool, typer.Option("--quick", help="Fewer rounds and sizes: does it work, and roughly how fast.")]
Json = Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write the rows to this file.")]
Plot = Annotated[Path | None, typer.Option("--plot", dir_okay=False, help="Write a PNG plot to this file.")]
Url = Annotated[str | None, typer.Option("--url", help="A running server; by default one is started and stopped.")]
Model = Annotated[Path | None, typer.Option(help="Directory of the language model; by default the packaged one.")]


def check_targets(*paths: Path | None) -> None:
    """Minutes of measuring must not end in a path that was wrong from the start. Raises MemshardError."""
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise MemshardError(f"{path} cannot be written: there is no directory {path.absolute().parent}")
    if len(paths) > 1 and paths[-1] is not None:
        check_installed("--plot", "matplotlib")


def check_installed(option: str, package: str) -> None:
    """Likewise for a package that only this option needs."""
    if importlib.util.find_spec(package) is None:
        raise MemshardError(f"{option} needs {package}, which is not installed")
