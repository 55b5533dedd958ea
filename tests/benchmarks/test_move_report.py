"""From rates and pauses to ratios of the same round, rows and tables."""

from __future__ import annotations

import pytest
from rich.console import Console

from benchmarks.move import RAW, Measured, Rate
from benchmarks.move_report import LINES, pauses, ratio, rows, speeds
from deployments.memory_calls import MoveReport
from sharding.ids import Placement, ShardId, UserId
from sharding.move import End


def measured() -> Measured:
    rates = []
    for round_, slower in ((1, 1.0), (2, 3.0), (3, 2.0)):  # a machine that is busy is slower for all
        rates += [Rate(RAW[0], round_, 8_000_000, 0.01 * slower), Rate(RAW[1], round_, 8_000_000, 0.016 * slower)]
        rates += [Rate("move", round_, 8_000_000, 0.02 * slower, 0.04 * slower)]
    placement = Placement(UserId("user"), ShardId("other"), 2)
    reports = [MoveReport(End.MOVED, placement, paused_s=s, closed_s=s / 2) for s in (0.01, 0.02, 0.03)]
    return Measured("tiny", 50, 160_000, rates, reports, [0.1, 0.2, 0.3], [0.01, 0.02])


def test_parts_of_raw_are_of_the_same_round() -> None:
    rates = measured().rates
    assert ratio(rates, "move, between the workers", RAW[0]) == pytest.approx(0.5)
    assert ratio(rates, "move, the whole copy", RAW[0]) == pytest.approx(0.25)
    assert ratio(rates, "move, between the workers", RAW[1]) == pytest.approx(0.8)
    assert ratio(rates, RAW[0], RAW[0]) == 1.0


def test_every_line_has_a_row_and_so_has_what_writers_saw() -> None:
    found = list(rows(measured()))
    assert [row["what"] for row in found if row["part"] == "rate"] == list(LINES)
    (writes,) = (row for row in found if row["part"] == "writes")
    assert (writes["paused_s"], writes["most_paused_s"], writes["longest_write_s"]) == (0.02, 0.03, 0.2)


def test_tables_show_what_was_measured() -> None:
    console = Console(width=120, record=True, quiet=False)
    console.print(speeds(measured()), pauses(measured()))
    text = console.export_text()
    assert "move, the whole copy" in text
    assert "0.25" in text
    assert "longest fact told during a move" in text
