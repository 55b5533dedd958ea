"""`memshard bench`: one command a benchmark. Each measures, prints a table, and writes the same report as JSON."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from benchmarks.options import Json, Model, Plot, Quick, Url, check_installed, check_targets
from cluster import processes
from sharding.errors import MemshardError

T = TypeVar("T")

app = typer.Typer(help="Measure what the README quotes.", no_args_is_help=True)


class Device(StrEnum):
    """Where to compose."""

    cpu = "cpu"
    cuda = "cuda"


@app.callback()
def bench() -> None:
    """Measure what the README quotes."""


@app.command()
def ttft(
    quick: Quick = False,
    json: Json = None,
    plot: Plot = None,
    url: Url = None,
    model: Model = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds for each number of facts.")] = None,
) -> None:
    """Time to first token with memory injected, as text, natively cached, and without memory."""
    if url is not None and model is not None:
        raise MemshardError("--url names a server that has its model already; leave out --model")
    check_targets(json, plot)
    from benchmarks import ttft, ttft_report
    from benchmarks.results import Report, plot_lines
    from benchmarks.server import serving

    console = Console()
    counts = ttft.QUICK_FACT_COUNTS if quick else ttft.FACT_COUNTS
    rounds = rounds or (ttft.QUICK_ROUNDS if quick else ttft.ROUNDS)
    try:
        with serving(console, url, model) as address:
            name, samples = ttft.measure(address, console, counts, rounds)
    except KeyboardInterrupt:
        raise typer.Exit(processes.INTERRUPTED) from None
    finally:
        console.show_cursor()
    console.print(ttft_report.times(name, samples), ttft_report.ratios(samples), ttft_report.growth(samples), sep="\n")
    if json is not None:
        Report.of("ttft", list(ttft_report.rows(name, samples))).write_json(json)
    if plot is not None:
        title = f"Time to first token at the engine, {name}"
        plot_lines(
            plot,
            ttft_report.lines(samples),
            title=title,
            x="facts in memory (about 25 tokens each)",
            y="ms, median and quartiles",
        )


@app.command()
def compose(
    quick: Quick = False,
    json: Json = None,
    model: Annotated[Path | None, typer.Option(help="A model's directory, for its shape alone.")] = None,
    device: Annotated[Device, typer.Option(help="With cuda, the shape is Llama-3.1-8B's by default.")] = Device.cpu,
) -> None:
    """Composing 1,250 tokens of memory, against a copy of the same bytes."""
    check_targets(json, None)
    from benchmarks import compose
    from benchmarks.results import Report
    from cluster.models import prepare_language_model
    from cluster.settings import Settings

    console = Console()
    if model is None and device is Device.cuda:
        shape = compose.LLAMA_8B
    else:
        shape = compose.model_of(prepare_language_model(Settings.from_environment(model=model), console.print))
    measured = compose.measure(shape, device.value, compose.QUICK_ROUNDS if quick else compose.ROUNDS)
    found = list(compose.rows(shape, device.value, measured))
    console.print(compose.table(found))
    if json is not None:
        Report.of("compose", found).write_json(json)


@app.command()
def encode(
    quick: Quick = False,
    json: Json = None,
    plot: Plot = None,
    model: Model = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of each of the two measurements.")] = None,
) -> None:
    """What encoding a fact costs, by window, and what the chats that go on meanwhile feel of it."""
    check_targets(json, plot)
    from benchmarks import encode, encode_report
    from benchmarks.results import Report, plot_lines

    console = Console()
    default = encode.QUICK_ROUNDS if quick else encode.ROUNDS
    measured = run_to_end(encode.measure(model, console, *((rounds, rounds) if rounds else default)), console)
    console.print(encode_report.cost_table(measured), encode_report.chat_table(measured), sep="\n")
    if json is not None:
        Report.of("encode", list(encode_report.rows(measured))).write_json(json)
    if plot is not None:
        title = f"Encoding one fact, {measured.model}"
        plot_lines(plot, encode_report.lines(measured), title=title, x="window (facts)", y="ms a fact")


@app.command()
def tiers(quick: Quick = False, json: Json = None, model: Model = None) -> None:
    """Time to first token by where the chunks are, and under traffic over ten times what the device holds."""
    check_targets(json, None)
    from benchmarks import tiers as bench
    from benchmarks import tiers_report
    from benchmarks.results import Report

    console = Console()
    measured = run_to_end(bench.measure(model, console, quick), console)
    console.print(tiers_report.tier_table(measured), tiers_report.traffic_table(measured), sep="\n")
    if json is not None:
        Report.of("tiers", list(tiers_report.rows(measured))).write_json(json)


@app.command()
def move(quick: Quick = False, json: Json = None, model: Model = None) -> None:
    """How fast a user moves from shard to shard, beside plain gloo, and how long writes wait for it."""
    check_targets(json, None)
    from benchmarks import move as bench
    from benchmarks import move_report
    from benchmarks.results import Report

    console = Console()
    measured = run_to_end(bench.measure(model, console, quick), console)
    console.print(move_report.speeds(measured), move_report.pauses(measured), sep="\n")
    if json is not None:
        Report.of("move", list(move_report.rows(measured))).write_json(json)


@app.command()
def search(quick: Quick = False, json: Json = None) -> None:
    """Finding facts among many: recall and time of the index, against exact search."""
    check_targets(json, None)
    from benchmarks import search as bench
    from benchmarks.results import Report

    console = Console()
    found = list(bench.measure(console, bench.QUICK_COUNTS if quick else bench.COUNTS))
    console.print(bench.table(found))
    if json is not None:
        Report.of("search", [one.row() for one in found]).write_json(json)


@app.command()
def route(quick: Quick = False, json: Json = None) -> None:
    """What the pinned router costs over a plain Ray handle, and that a full shard delays no other."""
    check_targets(json, None)
    from benchmarks import route as bench
    from benchmarks.results import Report

    console = Console()
    try:
        with processes.interruptible():
            routed = bench.measure(console, quick)
    except KeyboardInterrupt:
        raise typer.Exit(processes.INTERRUPTED) from None
    console.print(bench.table(routed))
    if json is not None:
        Report.of("route", list(routed.rows())).write_json(json)


@app.command()
def quality(
    quick: Quick = False,
    json: Json = None,
    model: Model = None,
    locomo: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="LoCoMo's file: its questions, not invented ones.")
    ] = None,
    questions: Annotated[int | None, typer.Option(min=1, help="The most, of each kind of memory.")] = None,
    k: Annotated[list[int] | None, typer.Option(min=1, help="Facts in the prompt; may be repeated.")] = None,
    window: Annotated[list[int] | None, typer.Option(min=0, help="Facts in front while encoded; repeatable.")] = None,
    prefill_nearest: Annotated[
        list[int] | None, typer.Option(min=0, help="Nearest ones left text; repeatable.")
    ] = None,
    text_facts: Annotated[int, typer.Option(min=0, help="So many facts at most are all left text.")] = 5,
    judge: Annotated[
        str | None, typer.Option(help="Let a model say what is right: the base URL of its OpenAI API (OPENAI_API_KEY).")
    ] = None,
    judge_model: Annotated[str | None, typer.Option(help="Its name there.")] = None,
) -> None:
    """Right answers from injected memory and from the same facts as text, with intervals, and time to first token."""
    check_targets(json, None)
    if (judge is None) != (judge_model is None):
        raise MemshardError("--judge and --judge-model go together")
    if judge is not None:
        check_installed("--judge", "openai")
    from benchmarks import quality, quality_questions, quality_report
    from benchmarks.results import Report
    from cluster.settings import Settings
    from deployments.trial import Setting

    console = Console()
    people = quality_questions.invented_people() if locomo is None else quality_questions.locomo_people(locomo)
    most = questions or (quality.QUICK_QUESTIONS if quick else quality.QUESTIONS)
    people = quality_questions.first_questions(people, most)
    counts = tuple(k or (quality.QUICK_FACT_COUNTS if quick else quality.FACT_COUNTS))
    windows, nearest = window or [Settings.from_environment().window_facts], prefill_nearest or [0]
    arms = [Setting(facts, r, text_facts) for facts in windows for r in nearest]
    name, answers = run_to_end(quality.run(model, people, counts, arms, console), console)
    if judge is not None and judge_model is not None:
        from openai import AsyncOpenAI

        from benchmarks.judge import judged

        client = AsyncOpenAI(base_url=judge, api_key=os.environ.get("OPENAI_API_KEY", "none"))
        answers = run_to_end(judged(answers, client, judge_model), console)
    console.print(quality_report.table(name, answers), quality_report.kinds_table(answers), sep="\n")
    if json is not None:
        Report.of("quality", list(quality_report.rows(name, answers))).write_json(json)


@app.command()
def freshness(
    quick: Quick = False,
    json: Json = None,
    model: Model = None,
    corrections: Annotated[int | None, typer.Option(min=1, max=100, help="Of each profile.")] = None,
) -> None:
    """Answers about corrected facts, beside an old memory and after it was rebuilt, and what that costs."""
    check_targets(json, None)
    from benchmarks import freshness, freshness_report
    from benchmarks.results import Report

    console = Console()
    profiles, default = (
        (freshness.QUICK_PROFILES, freshness.QUICK_CORRECTIONS)
        if quick
        else (freshness.PROFILES, freshness.CORRECTIONS)
    )
    measured = run_to_end(freshness.run(model, profiles, corrections or default, console), console)
    console.print(freshness_report.table(measured), freshness_report.cost_table(measured.window_facts), sep="\n")
    if json is not None:
        costs = list(freshness_report.cost_rows(measured.window_facts))
        Report.of("freshness", list(freshness_report.rows(measured))).write_json(json, costs=costs)


@app.command(name="all")
def every(
    target: Annotated[Path, typer.Option("--html", dir_okay=False, help="Where the page goes.")] = Path("bench.html"),
    full: Annotated[bool, typer.Option("--full", help="At full length: hours, not minutes.")] = False,
    only: Annotated[list[str] | None, typer.Option(help="A benchmark's name; may be repeated. By default all.")] = None,
) -> None:
    """Every benchmark, short, and one HTML page with their tables and plots."""
    check_targets(target, None)
    from benchmarks import load, page, simulate

    console = Console()
    outcomes = page.run_all(
        app, "all", console, quick=not full, only=only, beside={"load": load.app, "simulate": simulate.app}
    )
    page.write(outcomes, target)
    console.print(f"Written to {target}", highlight=False)
    if failed := [outcome.name for outcome in outcomes if outcome.status != 0]:
        raise MemshardError(f"{', '.join(failed)} failed; the page says how")


def run_to_end(measuring: Coroutine[Any, Any, T], console: Console) -> T:
    """What it measures; a signal undoes what it started, and ends the command with the status of an interruption."""
    try:
        with processes.interruptible():
            return asyncio.run(measuring)
    except KeyboardInterrupt:
        raise typer.Exit(processes.INTERRUPTED) from None
    finally:
        console.show_cursor()
