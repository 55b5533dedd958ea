"""From what `move.py` measured to rows and tables. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.table import Table

from benchmarks.move import RAW, Arm, Measured, Rate
from benchmarks.results import Row, Spread

Seconds = Callable[[Rate], float]

LINES: dict[str, tuple[Arm, Seconds]] = {
    RAW[0]: (RAW[0], lambda rate: rate.line_s),
    RAW[1]: (RAW[1], lambda rate: rate.line_s),
    "move, between the workers": ("move", lambda rate: rate.line_s),
    "move, the whole copy": ("move", lambda rate: rate.copy_s),
}
"""What has a row, of which arm and by which of its times."""


def rows(measured: Measured) -> Iterator[Row]:
    """One row of each of `LINES` (`part` "rate"), and one of what writers saw ("writes")."""
    about: dict[str, str | int] = {"model": measured.model, "facts": measured.facts}
    about |= {"chunk_bytes": measured.chunk_bytes}
    for name, (arm, seconds) in LINES.items():
        some = [rate for rate in measured.rates if rate.arm == arm]
        yield {
            "part": "rate",
            **about,
            "what": name,
            "n": len(some),
            "bytes": some[0].bytes,
            **Spread.of(rate.bytes / seconds(rate) for rate in some).row("rate", "bytes_per_s"),
            **{f"over_raw_{n}": ratio(measured.rates, name, raw) for n, raw in enumerate(RAW)},
        }
    yield {
        "part": "writes",
        **about,
        "n": len(measured.reports),
        **Spread.of(report.paused_s for report in measured.reports).row("paused"),
        **Spread.of(report.closed_s for report in measured.reports).row("closed"),
        **Spread.of(measured.waited_s).row("longest_write"),
        **Spread.of(measured.calm_s).row("calm_write"),
        "most_paused_s": max(report.paused_s for report in measured.reports),
        "most_waited_s": max(measured.waited_s),
    }


def ratio(rates: Sequence[Rate], name: str, raw: Arm) -> float:
    """One of `LINES` over a raw arm of the same round: the median of the rounds."""
    arm, seconds = LINES[name]
    raw_by_round = {rate.round: rate.bytes / rate.line_s for rate in rates if rate.arm == raw}
    found = [rate.bytes / seconds(rate) / raw_by_round[rate.round] for rate in rates if rate.arm == arm]
    return Spread.of(found).median


def speeds(measured: Measured) -> Table:
    """MB/s, and parts of what gloo does alone."""
    drawn = Table(
        title=f"{measured.facts} facts, {measured.rates[0].bytes / 1e6:.0f} MB, {measured.model}: median (quartiles)",
        caption="parts are medians of the rounds' ratios; the whole copy is as the source's shard sees it",
    )
    for heading in ("", "MB/s", "of raw, 4 MiB", "of raw, new memory"):
        drawn.add_column(heading, justify="left" if heading == "" else "right")
    for name, (arm, seconds) in LINES.items():
        speed = Spread.of(rate.bytes / seconds(rate) for rate in measured.rates if rate.arm == arm)
        parts = [f"{ratio(measured.rates, name, raw):.2f}" for raw in RAW]
        drawn.add_row(name, speed.text(1e-6), *parts)
    return drawn


def pauses(measured: Measured) -> Table:
    """Milliseconds that writers waited."""
    drawn = Table(title=f"{len(measured.reports)} moves while facts are told, ms")
    for heading in ("", "median (quartiles)", "most"):
        drawn.add_column(heading, justify="left" if heading == "" else "right")
    for name, values in {
        "writes paused": [report.paused_s for report in measured.reports],
        "reads closed": [report.closed_s for report in measured.reports],
        "longest fact told during a move": measured.waited_s,
        "facts told between moves": measured.calm_s,
    }.items():
        drawn.add_row(name, Spread.of(values).text(1e3), f"{1e3 * max(values):.0f}")
    return drawn
