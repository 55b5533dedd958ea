"""From the samples of `ttft.py` to rows, table and lines of a plot. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Literal

from rich.table import Table

from benchmarks.results import Line, Row, Spread
from benchmarks.ttft import ARMS, Arm, Sample

Where = Literal["engine_ttft_s", "client_ttft_s"]
RATIOS: tuple[tuple[Arm, Arm], ...] = (("prompt", "inject"), ("inject", "native_hit"), ("inject", "no_memory"))
PLACES: tuple[Where, ...] = ("engine_ttft_s", "client_ttft_s")
MS = 1000.0
WIDTH = 78  # of a terminal as narrow as they come


def rows(model: str, samples: Sequence[Sample]) -> Iterator[Row]:
    """One row an arm and k. `*_over_inject` is the median of the rounds' ratios of this arm to `inject`."""
    for k in fact_counts(samples):
        for arm in ARMS:
            measured = _of(samples, arm, k)
            yield {
                "arm": arm,
                "k": k,
                "model": model,
                "memory_tokens": statistics.median(s.memory["memory_tokens"] for s in measured),
                "prompt_tokens": statistics.median(s.prompt_tokens for s in measured),
                "injected_tokens": statistics.median(s.memory["injected_tokens"] for s in measured),
                "prefix_cached_tokens": statistics.median(s.memory["prefix_cached_tokens"] for s in measured),
                "n": len(measured),
                **_spread(measured, "engine_ttft_s").row("engine_ttft"),
                **_spread(measured, "client_ttft_s").row("client_ttft"),
                "engine_ttft_over_inject": ratio(samples, k, arm, "inject", "engine_ttft_s"),
                "client_ttft_over_inject": ratio(samples, k, arm, "inject", "client_ttft_s"),
            }


def ratio(samples: Sequence[Sample], k: int, above: Arm, below: Arm, where: Where) -> float:
    """The median over the rounds of `above` / `below`, each pair from one round."""
    dividends = {s.round: getattr(s, where) for s in _of(samples, above, k)}
    divisors = {s.round: getattr(s, where) for s in _of(samples, below, k)}
    return statistics.median(float(dividends[number] / divisors[number]) for number in dividends)


def times(model: str, samples: Sequence[Sample]) -> Table:
    """Each arm's times in milliseconds, at the engine and at the client, one line an arm and k."""
    rounds = len({sample.round for sample in samples})
    drawn = Table(
        title=f"Time to first token, {model}, ms: median (quartiles) of {rounds} rounds",
        caption="engine: from the prompt in the engine; client: from sending the request, "
        "embedding, search and composition included",
        min_width=WIDTH,
    )
    for heading in ("facts", "tokens", "arm", "engine", "client"):
        drawn.add_column(heading, justify="left" if heading == "arm" else "right")
    for k in fact_counts(samples):
        for arm in ARMS:
            measured = _of(samples, arm, k)
            drawn.add_row(
                str(k),
                f"{statistics.median(s.memory['memory_tokens'] for s in measured):.0f}",
                arm,
                *(_spread(measured, where).text(MS) for where in PLACES),
                end_section=arm == ARMS[-1],
            )
    return drawn


def ratios(samples: Sequence[Sample]) -> Table:
    """How injection compares, one line for engine and client each."""
    drawn = Table(title="Medians of the rounds' ratios", min_width=WIDTH)
    for heading in ("facts", "at", *(f"{above} / {below}" for above, below in RATIOS)):
        drawn.add_column(heading, justify="left" if heading == "at" else "right")
    for k in fact_counts(samples):
        for where in PLACES:
            found = (f"{ratio(samples, k, above, below, where):.2f}" for above, below in RATIOS)
            drawn.add_row(str(k), where.partition("_")[0], *found, end_section=where == PLACES[-1])
    return drawn


def growth(samples: Sequence[Sample]) -> Table:
    """What each arm's time grows by from the smallest to the largest number of facts: the median over the rounds."""
    fewest, *_, most = fact_counts(samples)
    drawn = Table(title=f"Growth from {fewest} to {most} facts, per cent: medians of the rounds", min_width=WIDTH)
    for heading in ("arm", "engine", "client"):
        drawn.add_column(heading, justify="left" if heading == "arm" else "right")
    for arm in ARMS:
        grown = (100 * (_grown(samples, arm, fewest, most, where) - 1) for where in PLACES)
        drawn.add_row(arm, *(f"{per_cent:.0f}" for per_cent in grown))
    return drawn


def _grown(samples: Sequence[Sample], arm: Arm, fewest: int, most: int, where: Where) -> float:
    before = {sample.round: getattr(sample, where) for sample in _of(samples, arm, fewest)}
    return statistics.median(float(getattr(s, where) / before[s.round]) for s in _of(samples, arm, most))


def lines(samples: Sequence[Sample]) -> list[Line]:
    """Engine time to first token in milliseconds over k, one line an arm."""
    return [
        Line(
            arm,
            {k: Spread.of(MS * sample.engine_ttft_s for sample in _of(samples, arm, k)) for k in fact_counts(samples)},
        )
        for arm in ARMS
    ]


def fact_counts(samples: Sequence[Sample]) -> list[int]:
    """Every k that was measured."""
    return sorted({sample.k for sample in samples})


def _of(samples: Sequence[Sample], arm: Arm, k: int) -> list[Sample]:
    return [sample for sample in samples if sample.arm == arm and sample.k == k]


def _spread(samples: Sequence[Sample], where: Where) -> Spread:
    return Spread.of(getattr(sample, where) for sample in samples)
