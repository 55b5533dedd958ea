"""From what `encode.py` measured to rows, tables and lines of a plot. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from rich.table import Table

from benchmarks.encode import ARMS, Arm, Chat, Cost, How, Measured
from benchmarks.results import Line, Row, Spread

HOWS: tuple[How, ...] = ("at once", "turn by turn")
MS = 1000.0


def rows(measured: Measured) -> Iterator[Row]:
    """One row a window and way of telling (`part` "cost"), one an arm of the chats ("chat")."""
    for how in HOWS:
        for window in windows(measured.costs):
            costs = _of(measured.costs, window, how)
            yield {
                "part": "cost",
                "model": measured.model,
                "how": how,
                "window": window,
                "n": len(costs),
                "prefilled_tokens_per_fact": statistics.median(c.prefilled_tokens / c.facts for c in costs),
                **Spread.of(c.seconds / c.facts for c in costs).row("per_fact"),
                "over_no_window": cost_ratio(measured.costs, window, how),
            }
    for arm in ARMS:
        chats = [chat for chat in measured.chats if chat.arm == arm]
        yield {
            "part": "chat",
            "model": measured.model,
            "arm": arm,
            "n": len(chats),
            **Spread.of(chat.ttft_s for chat in chats).row("ttft"),
            "ttft_mean_s": statistics.fmean(chat.ttft_s for chat in chats),
            "ttft_p95_s": p95(chat.ttft_s for chat in chats),
            **Spread.of(gap for chat in chats for gap in chat.gaps_s).row("between_tokens"),
            "ttft_over_alone": chat_ratio(measured.chats, arm),
            "encoded_facts_per_s": encode_rate(measured) if arm == "encoding" else 0.0,
        }


def cost_table(measured: Measured) -> Table:
    """Milliseconds a fact by window, and how it compares with no window."""
    rounds = len({cost.round for cost in measured.costs})
    drawn = Table(
        title=f"Encoding one fact, {measured.model}: median (quartiles) of {rounds} rounds",
        caption="over no window: median of the rounds' ratios",
    )
    for heading in ("facts told", "window", "ms a fact", "tokens prefilled a fact", "over no window"):
        drawn.add_column(heading, justify="left" if heading == "facts told" else "right")
    for how in HOWS:
        for window in windows(measured.costs):
            costs = _of(measured.costs, window, how)
            drawn.add_row(
                how,
                str(window),
                Spread.of(c.seconds / c.facts for c in costs).text(MS),
                f"{statistics.median(c.prefilled_tokens / c.facts for c in costs):.0f}",
                f"{cost_ratio(measured.costs, window, how):.2f}",
                end_section=window == windows(measured.costs)[-1],
            )
    return drawn


def chat_table(measured: Measured) -> Table:
    """Time to first token alone and beside encodes, in milliseconds."""
    drawn = Table(
        title="Chats with injected memory, alone and while other users' facts are encoded, ms",
        caption=f"encoded meanwhile: {encode_rate(measured):.1f} facts a second; "
        "over alone: median of the rounds' ratios of medians",
    )
    for heading in ("chats", "n", "first token: median (quartiles)", "mean", "p95", "between tokens", "over alone"):
        drawn.add_column(heading, justify="left" if heading == "chats" else "right")
    for arm in ARMS:
        chats = [chat for chat in measured.chats if chat.arm == arm]
        drawn.add_row(
            arm,
            str(len(chats)),
            Spread.of(chat.ttft_s for chat in chats).text(MS),
            f"{MS * statistics.fmean(chat.ttft_s for chat in chats):.0f}",
            f"{MS * p95(chat.ttft_s for chat in chats):.0f}",
            Spread.of(gap for chat in chats for gap in chat.gaps_s).text(MS),
            f"{chat_ratio(measured.chats, arm):.2f}",
        )
    return drawn


def lines(measured: Measured) -> list[Line]:
    """Milliseconds a fact over the window, one line a way of telling."""
    return [
        Line(
            how,
            {
                window: Spread.of(MS * c.seconds / c.facts for c in _of(measured.costs, window, how))
                for window in windows(measured.costs)
            },
        )
        for how in HOWS
    ]


def cost_ratio(costs: Sequence[Cost], window: int, how: How) -> float:
    """The median over the rounds of this window's cost over no window's, each pair from one round."""
    alone = {cost.round: cost.seconds for cost in _of(costs, 0, how)}
    return statistics.median(cost.seconds / alone[cost.round] for cost in _of(costs, window, how))


def chat_ratio(chats: Sequence[Chat], arm: Arm) -> float:
    """The median over the rounds of this arm's median time to first token over that of chats alone."""

    def median(round_: int, of: Arm) -> float:
        return statistics.median(chat.ttft_s for chat in chats if chat.round == round_ and chat.arm == of)

    return statistics.median(median(r, arm) / median(r, "alone") for r in {chat.round for chat in chats})


def encode_rate(measured: Measured) -> float:
    """Facts encoded a second beside chats."""
    return sum(e.chunks for e in measured.encoded) / sum(e.seconds for e in measured.encoded)


def p95(values: Iterator[float]) -> float:
    """The 95th percentile."""
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


def windows(costs: Sequence[Cost]) -> list[int]:
    """Every window that was measured."""
    return sorted({cost.window for cost in costs})


def _of(costs: Sequence[Cost], window: int, how: How) -> list[Cost]:
    return [cost for cost in costs if cost.window == window and cost.how == how]
