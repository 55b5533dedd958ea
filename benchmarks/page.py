"""`memshard bench all`: every benchmark short, one after the other, and one HTML page with their tables and plots.

Each runs as the command that a person would type, in a process of its own, so that none inherits another's engine, and
what one of them cannot do (no model, no GPU) is said on the page and stops nothing. The page holds all it shows.
"""

from __future__ import annotations

import base64
import html
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from benchmarks.results import commit, machine
from sharding.errors import MemshardError

TIMEOUT_S = 1800.0

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
table { border-collapse: collapse; } td, th { border-bottom: 1px solid #ccc; padding: .2rem .6rem; text-align: right; }
td:first-child, th:first-child { text-align: left; } img { max-width: 100%; }
pre { background: #f4f4f4; padding: 1rem; }
.wide { overflow-x: auto; } .bad { color: #c33; }
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one benchmark left: its rows, its plot, what it printed, and its exit status."""

    name: str
    help: str
    rows: Sequence[dict[str, Any]]
    plot: bytes | None
    output: str
    status: int
    took_s: float


def run_all(
    app: typer.Typer,
    itself: str,
    console: Console,
    quick: bool,
    only: Sequence[str] | None = None,
    beside: Mapping[str, typer.Typer] | None = None,
) -> list[Outcome]:
    """Every command of `app` (`memshard bench`) that writes its rows as JSON, but `itself`, and those that are
    `memshard`'s own, `beside` it; or those of them that `only` names. Raises `MemshardError` where there is none of a
    name."""
    own = {name: typer.main.get_command(command) for name, command in (beside or {}).items()}
    commands = {**typer.main.get_group(app).commands, **own}
    options = {
        name: {option for parameter in command.params for option in parameter.opts}
        for name, command in sorted(commands.items())
    }
    names = [name for name, given in options.items() if name != itself and "--json" in given]
    if unknown := set(only or ()) - set(names):
        raise MemshardError(f"--only names {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    outcomes = []
    for name in only or names:
        command = ("memshard", name) if name in own else ("memshard", "bench", name)
        console.print(f"==> {' '.join(command)}", highlight=False)
        help_ = commands[name].callback.__doc__ if name in own else commands[name].help
        outcomes.append(_run(command[1:], (help_ or "").strip(), options[name], quick))
    return outcomes


def _run(arguments: Sequence[str], help_: str, options: set[str], quick: bool) -> Outcome:
    with tempfile.TemporaryDirectory() as directory:
        rows, plot = Path(directory) / "rows.json", Path(directory) / "plot.png"
        command = [str(Path(sys.executable).with_name("memshard")), *arguments, "--json", str(rows)]
        command += ["--quick"] if quick and "--quick" in options else []
        command += ["--plot", str(plot)] if "--plot" in options else []
        began = time.monotonic()
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
            output, status = done.stdout + done.stderr, done.returncode
        except subprocess.TimeoutExpired:
            output, status = f"It was not done within {TIMEOUT_S:.0f} s.", 1
        return Outcome(
            arguments[-1],
            help_,
            json.loads(rows.read_text())["rows"] if rows.exists() else [],
            plot.read_bytes() if plot.exists() else None,
            output,
            status,
            time.monotonic() - began,
        )


def write(outcomes: Sequence[Outcome], target: Path) -> None:
    """Raises MemshardError where `target` cannot be written."""
    facts = " · ".join(f"{name} {value}" for name, value in {"commit": commit(), **machine()}.items())
    parts = [f"<p>{html.escape(facts)}</p>", *map(_section, outcomes)]
    title = "Memshard, measured"
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    try:
        target.write_text(f"{head}<h1>{title}</h1>{''.join(parts)}</html>\n")
    except OSError as failure:
        raise MemshardError(f"{target} cannot be written: {failure.strerror}") from failure


def _section(outcome: Outcome) -> str:
    failed = "" if outcome.status == 0 else f' <b class="bad">failed with exit status {outcome.status}</b>'
    head = f"<h2>{html.escape(outcome.name)}{failed}</h2><p>{html.escape(outcome.help)} ({outcome.took_s:.0f} s)</p>"
    image = ""
    if outcome.plot is not None:
        data = base64.b64encode(outcome.plot).decode()
        image = f'<img alt="{html.escape(outcome.name)}" src="data:image/png;base64,{data}">'
    is_open = " open" if outcome.status else ""
    said = f"<details{is_open}><summary>printed</summary><pre>{html.escape(outcome.output)}</pre></details>"
    return f"{head}{image}{_table(outcome.rows)}{said}"


def _table(rows: Sequence[dict[str, Any]]) -> str:
    if not rows:
        return ""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    lines = ("".join(f"<td>{html.escape(_value(row.get(name, '')))}</td>" for name in columns) for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
