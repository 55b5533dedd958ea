"""`memshard chaos`: break everything that can break, one after the other, and check every answer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from cluster import processes
from sharding.errors import MemshardError

app = typer.Typer(help="Break a cluster and check every answer.", add_completion=False)

QUICK = "shard,redis"


@app.callback(invoke_without_command=True)
def chaos(
    seed: Annotated[int, typer.Option(help="Which faults strike whom follows from it.")] = 0,
    minutes: Annotated[float, typer.Option(min=0, help="Every kind of fault strikes once, and more until then.")] = 5.0,
    faults: Annotated[str | None, typer.Option(help="Kinds of faults, by default all.")] = None,
    model: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Of a model to serve; by default none, but 4 shards."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help=f"Only {QUICK}, each once.")] = False,
) -> None:
    """Start a cluster of three Ray nodes and four shards without a model (or two with one), break it, and check every
    answer against what was acknowledged. Exit status 1 where a promise was not kept."""
    from benchmarks.chaos_faults import FAULTS

    there_are = [kind for kind, fault in FAULTS.items() if model is not None or not fault.with_model]
    kinds = faults.split(",") if faults is not None else QUICK.split(",") if quick else there_are
    if unknown := set(kinds) - set(there_are):
        raise MemshardError(f"--faults names {', '.join(sorted(unknown))}; there are {', '.join(there_are)}")
    from benchmarks.chaos_run import run

    console = Console()
    processes.adopt_orphans()
    try:
        with processes.interruptible():
            outcome = asyncio.run(run(seed, kinds, 0.0 if quick else 60 * minutes, console.print, model))
    except KeyboardInterrupt:
        raise typer.Exit(processes.INTERRUPTED) from None
    finally:
        processes.end_descendants()
    drawn = Table(title=f"Seed {seed}: {outcome.answers} requests, {outcome.facts} facts at the end")
    for heading in ("fault", "requests", "failed", "not allowed", "slowest s", "back after s", "whole after s"):
        drawn.add_column(heading, justify="left" if heading == "fault" else "right")
    for one in outcome.strikes:
        counts = (one.requests, one.failures.total(), one.forbidden.total())
        times = (f"{one.slowest_s:.1f}", f"{one.back_s:.1f}", f"{one.whole_s:.1f}")
        drawn.add_row(one.kind, *map(str, counts), *times)
    console.print(drawn)
    for sentence in outcome.broken:
        console.print(sentence, markup=False, highlight=False)
    if outcome.broken:
        raise MemshardError("The cluster did not keep its promises; see above")


if __name__ == "__main__":
    app()
