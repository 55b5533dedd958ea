"""`memshard simulate`: how placement and rebalancing hold up with many users and shards, on a real directory."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.options import Json, Plot, check_targets

if TYPE_CHECKING:
    from benchmarks.simulation import Simulated

app = typer.Typer(help="Simulate many users on many shards, without tensors.", add_completion=False)

QUICK_USERS, QUICK_SHARDS, QUICK_MINUTES = 20_000, 50, 20


@app.callback(invoke_without_command=True)
def simulate(
    users: Annotated[int, typer.Option(min=100, help="Users who arrive at the beginning.")] = 1_000_000,
    shards: Annotated[int, typer.Option(min=2, help="Shards.")] = 1_000,
    minutes: Annotated[int, typer.Option(min=0, help="Virtual minutes of traffic.")] = 120,
    zipf: Annotated[float, typer.Option(min=0, help="Exponent of the users' popularity.")] = 1.0,
    deaths: Annotated[float, typer.Option(min=0, help="Shards that die in an hour.")] = 4.0,
    seed: Annotated[int, typer.Option(help="Everything but the times follows from it.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help=f"{QUICK_USERS} users, {QUICK_SHARDS} shards.")] = False,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Claims per second and their p99, imbalance of bytes and load, moves an hour, Redis bytes per user."""
    check_targets(json, plot)
    if quick:
        users, shards, minutes = QUICK_USERS, QUICK_SHARDS, QUICK_MINUTES
    from benchmarks.results import Line, Report, Spread, plot_lines
    from benchmarks.simulation import simulate as run
    from cluster.embedded_redis import EmbeddedRedis
    from sharding.client import connect
    from sharding.keys import KeySpace

    console = Console()

    async def simulated(url: str) -> Simulated:
        async with connect(url, timeout_s=30.0) as redis:
            with console.status("Beginning") as spinner:
                return await run(
                    redis,
                    KeySpace("simulated", "model"),
                    users=users,
                    shards=shards,
                    minutes=minutes,
                    zipf=zipf,
                    deaths_per_hour=deaths,
                    seed=seed,
                    went_on=spinner.update,
                )

    with tempfile.TemporaryDirectory(prefix="memshard-simulate-") as folder, EmbeddedRedis(Path(folder)) as server:
        server.wait_ready()
        result = asyncio.run(simulated(server.url))
    console.print(_table(result))
    rows = [
        {"minute": m.at, "bytes_ratio": m.bytes_ratio, "load_ratio": m.load_ratio, "moves": m.moves, "died": m.died}
        for m in result.minutes
    ]
    if json is not None:
        Report.of("simulate", rows).write_json(json)
    if plot is not None:
        lines = [
            Line("bytes", {float(m.at): Spread.of([m.bytes_ratio]) for m in result.minutes}),
            Line("load", {float(m.at): Spread.of([m.load_ratio]) for m in result.minutes}),
        ]
        title = f"{result.users} users on {result.shards} shards"
        plot_lines(plot, lines, title=title, x="virtual minutes", y="largest shard over the mean", bottom=1.0)


def _table(result: Simulated) -> Table:
    drawn = Table(title=f"{result.users} users on {result.shards} shards", show_header=False)
    drawn.add_column("what")
    drawn.add_column("how much", justify="right")
    hours = len(result.minutes) / 60
    calm = result.minutes[len(result.minutes) // 2 :]
    lines = [
        ("claims per second", f"{result.claims_per_s:.0f}"),
        ("claim, median", f"{1e3 * result.claim_s[0]:.1f} ms"),
        ("claim, p99", f"{1e3 * result.claim_s[1]:.1f} ms"),
        ("choosing a shard", f"{1e6 * result.choose_s:.1f} µs"),
        ("Redis, per user", f"{result.redis_bytes_per_user:.0f} bytes"),
    ]
    if calm:
        lines += [
            ("bytes, largest over mean: at first", f"{result.minutes[0].bytes_ratio:.2f}"),
            ("  in the second half, worst minute", f"{max(m.bytes_ratio for m in calm):.2f}"),
            ("load, largest over mean: at first", f"{result.minutes[0].load_ratio:.2f}"),
            ("  in the second half, worst minute", f"{max(m.load_ratio for m in calm):.2f}"),
            ("shards that died", str(sum(m.died for m in result.minutes))),
            ("users claimed anew", str(sum(m.reclaimed for m in result.minutes))),
            ("moves per hour", f"{sum(m.moves for m in result.minutes) / hours:.0f}"),
            ("  in the second half", f"{sum(m.moves for m in calm) / (hours / 2):.0f}"),
            ("one virtual minute", f"{result.minute_s:.1f} s"),
        ]
    for line in lines:
        drawn.add_row(*line)
    return drawn
