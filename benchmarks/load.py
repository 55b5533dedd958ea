"""`memshard load`: many users at once, each with a memory of its own, against a server; every answer checked."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.options import Json, check_targets
from cluster import processes
from sharding.errors import MemshardError

app = typer.Typer(help="Load a running server, and check every answer.", add_completion=False)

ARMS = ("inject", "prompt", "off")
KINDS = ("chat", "add", "update", "delete")
DEFAULT_MIX = "chat=0.8,add=0.12,update=0.04,delete=0.04"
QUICK_S = 10.0
REPORT_WIDTH = 120  # where nothing tells how wide a line may be


@app.callback(invoke_without_command=True)
def load(
    url: Annotated[str | None, typer.Option(help="A running server; by default one is started and stopped.")] = None,
    deterministic: Annotated[
        int | None,
        typer.Option(min=1, help="Start so many shards with the deterministic engine, without a model."),
    ] = None,
    max_shards: Annotated[
        int | None, typer.Option(min=1, help="With --deterministic: more shards, up to so many, as memory fills.")
    ] = None,
    kill_every: Annotated[
        float | None, typer.Option(min=1, help="Seconds after which a shard of a server of its own is killed, again.")
    ] = None,
    people: Annotated[int, typer.Option(min=1, help="Users with a memory of their own.")] = 50,
    facts: Annotated[int, typer.Option(min=1, help="Facts of each before it begins.")] = 20,
    users: Annotated[int, typer.Option(min=1, help="Closed loop: sessions at a time.")] = 10,
    rate: Annotated[float | None, typer.Option(min=0.01, help="Open loop: requests a second (Poisson).")] = None,
    duration: Annotated[float, typer.Option(min=1, help="Seconds that are measured.")] = 60.0,
    ramp: Annotated[float, typer.Option(min=0, help="Seconds from nothing to all of the load; not measured.")] = 5.0,
    think: Annotated[float, typer.Option(min=0, help="Closed loop: mean seconds between a session's requests.")] = 1.0,
    turns: Annotated[float, typer.Option(min=1, help="Closed loop: mean requests of a session.")] = 5.0,
    zipf: Annotated[float, typer.Option(min=0, help="Exponent of the users' popularity; 0: all alike.")] = 1.0,
    mix: Annotated[str, typer.Option(help=f"Shares of {', '.join(KINDS)}.")] = DEFAULT_MIX,
    arms: Annotated[str, typer.Option(help="Memory modes of chats, in equal shares.")] = ",".join(ARMS),
    top_k: Annotated[int, typer.Option(min=1, max=100, help="Facts retrieved for a chat.")] = 10,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 50,
    deadline: Annotated[float, typer.Option(min=1, help="Longest wait for an answer, in seconds.")] = 60.0,
    seed: Annotated[int, typer.Option(help="People and what they tell follow from it.")] = 0,
    page: Annotated[int | None, typer.Option(help="Port of locust's page, on 127.0.0.1.")] = None,
    compare: Annotated[
        int | None, typer.Option(min=1, help="Rounds: each memory mode alone, chats only, in phases of the duration.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help=f"{QUICK_S:.0f} seconds, few people: does it work.")] = False,
    json: Json = None,
    csv: Annotated[Path | None, typer.Option("--csv", dir_okay=False, help="Write a line a request.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", dir_okay=False, help="Write a PNG plot.")] = None,
) -> None:
    """Load a server with many users and check every answer. Exit status 1 where one was wrong or a fact was lost."""
    if compare is not None and (csv or plot or rate):
        raise MemshardError("--compare has phases of a closed loop; leave out --csv, --plot and --rate")
    if url is not None and deterministic is not None:
        raise MemshardError("--url names a server that runs; leave out --deterministic")
    if url is not None and kill_every is not None:
        raise MemshardError("--kill-every kills processes of a server that was started here; leave out --url")
    if max_shards is not None and (deterministic is None or max_shards < deterministic):
        raise MemshardError("--max-shards goes with --deterministic, and is not below it")
    check_targets(json, csv, plot)
    shares, modes = _mix(mix), _arms(arms)
    from benchmarks import load_compare, load_report, load_run
    from benchmarks.load_plan import LoadPlan
    from benchmarks.results import Report

    console = Console(width=None if sys.stdout.isatty() else REPORT_WIDTH)
    if quick:
        people, facts, duration, ramp = min(people, 10), min(facts, 10), min(duration, QUICK_S), min(ramp, 1.0)
    try:
        with processes.interruptible(), _server(console, url, deterministic, max_shards) as address:
            plan = LoadPlan(
                url=address,
                people=people,
                facts=facts,
                mix=shares,
                arms=modes,
                users=users,
                rate=rate,
                duration_s=duration,
                ramp_s=ramp,
                think_s=think,
                turns=turns,
                zipf=zipf,
                top_k=top_k,
                max_tokens=max_tokens,
                deadline_s=deadline,
                seed=seed,
                page_port=page,
                kill_every_s=kill_every,
            )
            with console.status("Beginning") as spinner:

                def went_on(passed_s: float) -> None:
                    spinner.update(f"{passed_s:.0f} of {ramp + duration:.0f} s")

                if compare is None:
                    results = [load_run.run(plan, console.print, went_on)]
                else:
                    results = load_run.compare(plan, compare, console.print, went_on)
    except KeyboardInterrupt:
        raise typer.Exit(processes.INTERRUPTED) from None
    finally:
        console.show_cursor()
    result = results[-1]
    rows = list(load_report.rows(result) if compare is None else load_compare.rows(results))
    for table in load_report.tables(result) if compare is None else load_compare.tables(results):
        console.print(table)
    if json is not None:
        Report.of("load", rows).write_json(json, **load_report.report(result))
    if csv is not None:
        load_report.write_csv(csv, result)
    if plot is not None:
        load_report.plot(plot, result)
    if result.wrong:
        raise MemshardError("Answers were wrong or facts were lost; see the table")


def _server(
    console: Console, url: str | None, deterministic: int | None, max_shards: int | None
) -> AbstractContextManager[str]:
    if url is not None:
        return nullcontext(url.rstrip("/"))
    if deterministic is not None:
        from benchmarks.deterministic_server import serving as serving_deterministic

        return serving_deterministic(console, deterministic, max_shards)
    from benchmarks.server import serving

    return serving(console)


def _mix(text: str) -> dict[str, float]:
    """`chat=0.8,add=0.2` as shares. Raises MemshardError."""
    try:
        shares = {kind.strip(): float(share) for kind, share in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise MemshardError(f"--mix is {text!r}; it must look like {DEFAULT_MIX}") from None
    if not set(shares) <= set(KINDS) or min(shares.values()) < 0 or sum(shares.values()) <= 0:
        raise MemshardError(f"--mix is {text!r}; it must give shares of {', '.join(KINDS)}")
    return shares


def _arms(text: str) -> tuple[str, ...]:
    arms = tuple(arm.strip() for arm in text.split(","))
    if not set(arms) <= set(ARMS):
        raise MemshardError(f"--arms is {text!r}; it must name some of {', '.join(ARMS)}")
    return arms
