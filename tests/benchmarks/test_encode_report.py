"""What was measured of encoding becomes ratios within a round, rows and tables."""

from __future__ import annotations

import pytest
from rich.console import Console

from benchmarks import encode_report
from benchmarks.encode import Arm, Chat, Cost, Encoded, How, Measured


def cost(window: int, how: How, round_: int, seconds: float) -> Cost:
    return Cost(window, how, round_, 10, seconds, 500)


def chat(arm: Arm, round_: int, ttft_s: float) -> Chat:
    return Chat(arm, round_, ttft_s, ttft_s / 2, (0.04, 0.05))


@pytest.fixture
def measured() -> Measured:
    """The second round is twice as slow as the first in everything."""
    hows: tuple[How, ...] = ("at once", "turn by turn")
    costs = [
        cost(window, how, round_, (round_ + 1) * (1.0 if window == 0 else 1.4))
        for how in hows
        for round_ in (0, 1)
        for window in (0, 50)
    ]
    chats = [chat("alone", round_, (round_ + 1) * ttft) for round_ in (0, 1) for ttft in (0.08, 0.1, 0.2)]
    chats += [chat("encoding", round_, (round_ + 1) * ttft) for round_ in (0, 1) for ttft in (0.09, 0.11, 0.5)]
    return Measured("tiny", costs, chats, [Encoded(0, 30, 3.0), Encoded(1, 10, 1.0)])


def test_costs_are_compared_within_a_round(measured: Measured) -> None:
    assert encode_report.cost_ratio(measured.costs, 50, "at once") == pytest.approx(1.4)
    assert encode_report.cost_ratio(measured.costs, 0, "turn by turn") == 1.0


def test_chats_are_compared_by_the_medians_of_a_round(measured: Measured) -> None:
    assert encode_report.chat_ratio(measured.chats, "encoding") == pytest.approx(1.1)
    assert encode_report.chat_ratio(measured.chats, "alone") == 1.0


def test_rows_have_every_window_and_arm_with_units(measured: Measured) -> None:
    rows = list(encode_report.rows(measured))
    costs = {(row["how"], row["window"]): row for row in rows if row["part"] == "cost"}
    assert set(costs) == {(how, window) for how in ("at once", "turn by turn") for window in (0, 50)}
    assert costs["at once", 50]["per_fact_s"] == pytest.approx(0.21)
    assert costs["at once", 50]["prefilled_tokens_per_fact"] == 50
    chats = {row["arm"]: row for row in rows if row["part"] == "chat"}
    assert chats["encoding"]["encoded_facts_per_s"] == 10.0
    assert chats["encoding"]["ttft_s"] > chats["alone"]["ttft_s"]


def test_tables_fit_a_terminal(measured: Measured) -> None:
    console = Console(record=True, width=80)
    console.print(encode_report.cost_table(measured), encode_report.chat_table(measured))
    shown = console.export_text()
    assert "1.40" in shown
    assert "10.0 facts a second" in shown
    assert [line.name for line in encode_report.lines(measured)] == ["at once", "turn by turn"]
