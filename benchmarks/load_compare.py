"""From the phases of `load_run.compare` to rows and tables: the same load with memory injected, as text, off. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from rich.table import Table

from benchmarks.load_report import milliseconds, percentiles, what_went_wrong
from benchmarks.load_run import LoadResult
from benchmarks.results import Row, Spread

BOUND = "off"
PROMPT = "prompt"


def rows(results: Sequence[LoadResult]) -> Iterator[Row]:
    """One row an arm; `over_off` and `over_prompt` are medians of the rounds' ratios of answers a second: memory off is
    the bound, the same facts as text what injection is to be better than."""
    for arm in arms(results):
        phases = _of(results, arm)
        answered = [request for phase in phases for request in phase.requests if request.error is None]
        failed = sum(len(phase.requests) for phase in phases) - len(answered)
        yield {
            "row": "compare",
            "model": phases[0].model,
            "arm": arm,
            "rounds": len(phases),
            "people": phases[0].plan.people,
            "users": phases[0].plan.users,
            "top_k": phases[0].plan.top_k,
            "n": len(answered),
            "errors": failed,
            "fallbacks": sum(request.fallback is not None for request in answered),
            **Spread.of(phase.per_second(phase.requests) for phase in phases).row("answered", "per_s"),
            **{f"over_{other}": ratio for other in (BOUND, PROMPT) if (ratio := over(results, arm, other)) is not None},
            **percentiles("ttft", [r.ttft_s for r in answered if r.ttft_s is not None]),
            **percentiles("between_pieces", [gap for r in answered for gap in r.gaps_s]),
            **percentiles("total", [r.seconds for r in answered]),
        }


def tables(results: Sequence[LoadResult]) -> Iterator[Table]:
    """What a person reads."""
    plan = results[0].plan
    drawn = Table(
        title=f"{results[0].model}: {plan.people} people, {plan.users} at a time, k = {plan.top_k}, "
        f"{plan.max_tokens} tokens, phases of {plan.duration_s:.0f} s",
        caption="answers a second: median (quartiles) of the rounds; over …: median of the rounds' ratios; "
        "ms: p50 / p95 / p99 at the client's socket",
    )
    for heading in ("memory", "n", "errors", "answers/s", "over off", "over prompt", "first token", "between", "total"):
        drawn.add_column(heading, justify="left" if heading == "memory" else "right")
    for row in rows(results):
        rates = Spread(*(float(row[f"answered_{part}per_s"]) for part in ("q1_", "", "q3_")))
        ratios = (f"{float(row[over_]):.2f}" if (over_ := f"over_{other}") in row else "" for other in (BOUND, PROMPT))
        times = (milliseconds(row, name) for name in ("ttft", "between_pieces", "total"))
        drawn.add_row(str(row["arm"]), str(row["n"]), str(row["errors"]), rates.text(), *ratios, *times)
    yield drawn
    yield what_went_wrong(results)


def over(results: Sequence[LoadResult], arm: str, other: str) -> float | None:
    """None where the other was not among the arms."""
    pairs = zip(_of(results, arm), _of(results, other), strict=False)
    rates = [(phase.per_second(phase.requests), bound.per_second(bound.requests)) for phase, bound in pairs]
    ratios = [rate / bound for rate, bound in rates if bound]
    return statistics.median(ratios) if ratios else None


def arms(results: Sequence[LoadResult]) -> list[str]:
    """Every arm that was measured."""
    return sorted({result.plan.arms[0] for result in results})


def _of(results: Sequence[LoadResult], arm: str) -> list[LoadResult]:
    """The phases of an arm, one a round, in the rounds' order."""
    return [result for result in results if result.plan.arms == (arm,)]
