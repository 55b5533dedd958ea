"""From what `move.py` measured to rows and tables. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.table import Table

from benchmarks.move import ARMS, RAW, Arm, Measured, Rate
from benchmarks.results import Row, Spread


def rows(measured: Measured) -> Iterator[Row]:
    """One row an arm, and one of what writers saw (`part` "writes")."""
    about: dict[str, str | int] = {
        "model": measured.model,
        "facts": measured.facts,
        "chunk_bytes": measured.chunk_bytes,
    }
    for arm in ARMS:
        some = [rate for rate in measured.rates if rate.arm == arm]
        yield {
            "part": "rate",
            **about,
            "arm": arm,
            "n": len(some),
            "bytes": some[0].bytes,
            **Spread.of(rate.bytes / rate.line_s for rate in some).row("line", "bytes_per_s"),
            **(
                Spread.of(rate.bytes / rate.copy_s for rate in some).row("copy", "bytes_per_s") if arm == "move" else {}
            ),
            "line_over_raw": ratio(measured.rates, arm, lambda rate: rate.line_s),
            "copy_over_raw": ratio(measured.rates, arm, lambda rate: rate.copy_s or rate.line_s),
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


def ratio(rates: Sequence[Rate], arm: Arm, seconds: Callable[[Rate], float]) -> float:
    """The arm's rate over the fastest raw one of the same round: the median of the rounds."""
    found = []
    for round_ in {rate.round for rate in rates}:
        raw = max(r.bytes / r.line_s for r in rates if r.round == round_ and r.arm in RAW)
        found += [r.bytes / seconds(r) / raw for r in rates if r.round == round_ and r.arm == arm]
    return Spread.of(found).median


def rates(measured: Measured) -> Table:
    """MB/s and milliseconds."""
    drawn = Table(
        title=f"{measured.facts} facts, {measured.rates[0].bytes / 1e6:.0f} MB, {measured.model}: median (quartiles)",
        caption="part of raw: of the faster raw arm of the same round; line: between the workers; copy: all of it, as "
        "the source's shard sees it",
    )
    for heading in ("", "line, MB/s", "part of raw", "copy, MB/s", "part of raw"):
        drawn.add_column(heading, justify="left" if heading == "" else "right")
    for row in rows(measured):
        if row["part"] == "rate":
            some = [rate for rate in measured.rates if rate.arm == row["arm"]]
            copy = ["", ""]
            if row["arm"] == "move":
                copy = [Spread.of(r.bytes / r.copy_s for r in some).text(1e-6), f"{row['copy_over_raw']:.2f}"]
            line = Spread.of(r.bytes / r.line_s for r in some).text(1e-6)
            drawn.add_row(str(row["arm"]), line, f"{row['line_over_raw']:.2f}", *copy)
    return drawn


def pauses(measured: Measured) -> Table:
    """Milliseconds that writers waited."""
    drawn = Table(title=f"{len(measured.reports)} moves while facts are told, ms: median (quartiles), and the most")
    for heading in ("", "ms", "most"):
        drawn.add_column(heading, justify="left" if heading == "" else "right")
    for name, values in {
        "writes paused": [report.paused_s for report in measured.reports],
        "reads closed": [report.closed_s for report in measured.reports],
        "longest fact told during a move": measured.waited_s,
        "facts told between moves": measured.calm_s,
    }.items():
        drawn.add_row(name, Spread.of(values).text(1e3), f"{1e3 * max(values):.0f}")
    return drawn
