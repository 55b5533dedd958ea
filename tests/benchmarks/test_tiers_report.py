"""From samples to ratios, hit rates and percentiles."""

from __future__ import annotations

import pytest
from rich.console import Console

from benchmarks.tiers import PLACES, Asked, Measured, Place, Sample
from benchmarks.tiers_report import bring_ratio, hits, quantile, rows, tier_table, traffic_table, ttft_ratio

BRING: dict[Place, float | None] = dict.fromkeys(PLACES)
BRING |= {"host": 0.1, "disk": 0.2, "shared": 0.4, "encode": 4.0}


def measured() -> Measured:
    samples = [
        Sample(place, round_, 1.0 + (place == "prompt"), seconds and seconds * round_, 10)
        for round_ in (1, 2, 3)
        for place, seconds in BRING.items()
    ]
    found = [{"device": 3, "disk": 1}, {"device": 0, "disk": 4}]
    asked = [Asked("tenth", 0, 0.1 * (n + 1), found[n % 2], None) for n in range(4)]
    asked += [Asked("everything", 0, 0.1, {"device": 4}, None)]
    return Measured("tiny", 1250, 10 << 20, samples, asked)


def test_ratios_are_of_the_same_round() -> None:
    samples = measured().samples
    assert bring_ratio(samples, "disk") == pytest.approx(20.0)
    assert bring_ratio(samples, "device") == 0.0
    assert ttft_ratio(samples, "host") == pytest.approx(2.0)


def test_hits_are_parts_of_the_chunks_that_were_asked_for() -> None:
    tenth = [one for one in measured().asked if one.budget == "tenth"]
    assert hits(tenth) == pytest.approx({"device": 6 / 16, "host": 0.0, "disk": 10 / 16, "shared": 0.0, "none": 0.0})
    assert quantile(tenth, 0.5) == pytest.approx(0.25)


def test_every_place_and_budget_has_a_row_and_a_line() -> None:
    told = list(rows(measured()))
    assert [row["place"] for row in told if row["part"] == "tier"] == list(PLACES)
    assert [row["budget"] for row in told if row["part"] == "traffic"] == ["tenth", "everything"]
    console = Console(width=120, record=True)
    console.print(tier_table(measured()), traffic_table(measured()))
    printed = console.export_text()
    assert "20.0" in printed
    assert "62 %" in printed
