"""From what `tiers.py` measured to rows and tables. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from rich.table import Table

from benchmarks.results import Row, Spread
from benchmarks.tiers import BUDGETS, PLACES, Asked, Measured, Place, Sample

MS = 1000.0
TIERS = ("device", "host", "disk", "shared", "none")


def rows(measured: Measured) -> Iterator[Row]:
    """One row a place (`part` "tier"), one a budget ("traffic")."""
    for place in PLACES:
        samples = _of(measured.samples, place)
        brought = [sample.bring_s for sample in samples if sample.bring_s is not None]
        yield {
            "part": "tier",
            "model": measured.model,
            "place": place,
            "n": len(samples),
            "memory_tokens": measured.memory_tokens,
            **Spread.of(sample.ttft_s for sample in samples).row("ttft"),
            **(Spread.of(brought).row("bring") if brought else {}),
            "encode_over_bring": bring_ratio(measured.samples, place),
            "prompt_over_ttft": ttft_ratio(measured.samples, place),
        }
    for budget in BUDGETS:
        asked = [one for one in measured.asked if one.budget == budget]
        yield {
            "part": "traffic",
            "model": measured.model,
            "budget": budget,
            "n": len(asked),
            "memory_bytes": measured.memory_bytes,
            **{f"found_{tier}": part for tier, part in hits(asked).items()},
            "ttft_p50_s": quantile(asked, 0.5),
            "ttft_p95_s": quantile(asked, 0.95),
            "fallbacks": sum(one.fallback is not None for one in asked),
        }


def tier_table(measured: Measured) -> Table:
    """Milliseconds to the first token, and to bring all chunks, by where they were."""
    rounds = len({sample.round for sample in measured.samples})
    drawn = Table(
        title=f"{measured.memory_tokens} tokens of facts, {measured.model}, ms: median (quartiles) of {rounds} rounds",
        caption="bring: all chunks to the device, alone (encoding at the pace that leaves chats room); ratios are "
        "medians of the rounds' ratios",
    )
    for heading in ("chunks in", "first token", "prompt / this", "bring", "encode / this"):
        drawn.add_column(heading, justify="left" if heading == "chunks in" else "right")
    for place in PLACES:
        samples = _of(measured.samples, place)
        brought = [sample.bring_s for sample in samples if sample.bring_s is not None]
        drawn.add_row(
            {"encode": "nowhere: encoded", "prompt": "no chunks: as text"}.get(place, place),
            Spread.of(sample.ttft_s for sample in samples).text(MS),
            f"{ttft_ratio(measured.samples, place):.1f}",
            Spread.of(brought).text(MS) if brought else "",
            f"{bring_ratio(measured.samples, place):.1f}" if brought else "",
        )
    return drawn


def traffic_table(measured: Measured) -> Table:
    """Where chunks were found, and milliseconds to the first token, by device budget."""
    drawn = Table(title=f"Zipf traffic over {measured.memory_bytes / (1 << 20):.0f} MiB of chunks, {measured.model}")
    for heading in ("device budget", "questions", *TIERS, "p50 ms", "p95 ms", "as text"):
        drawn.add_column(heading, justify="left" if heading == "device budget" else "right")
    for budget in BUDGETS:
        asked = [one for one in measured.asked if one.budget == budget]
        drawn.add_row(
            {"tenth": "a tenth", "everything": "unlimited"}[budget],
            str(len(asked)),
            *(f"{100 * hits(asked)[tier]:.0f} %" for tier in TIERS),
            *(f"{MS * quantile(asked, at):.0f}" for at in (0.5, 0.95)),
            str(sum(one.fallback is not None for one in asked)),
        )
    return drawn


def hits(asked: Sequence[Asked]) -> dict[str, float]:
    """Which part of the chunks that were asked for was in which tier."""
    found: Counter[str] = Counter()
    for one in asked:
        found.update(one.found)
    return {tier: found[tier] / max(1, found.total()) for tier in TIERS}


def quantile(asked: Sequence[Asked], at: float) -> float:
    """Of the times to first token, in seconds."""
    return float(np.quantile([one.ttft_s for one in asked], at))


def bring_ratio(samples: Sequence[Sample], place: Place) -> float:
    """The median over the rounds of encoding / bringing from `place`; 0 where there is nothing to bring."""
    encoded = {sample.round: sample.bring_s for sample in _of(samples, "encode")}
    brought = {sample.round: sample.bring_s for sample in _of(samples, place) if sample.bring_s}
    return statistics.median((encoded[n] or 0.0) / seconds for n, seconds in brought.items()) if brought else 0.0


def ttft_ratio(samples: Sequence[Sample], place: Place) -> float:
    """The median over the rounds of time to first token as text / from `place`."""
    prompted = {sample.round: sample.ttft_s for sample in _of(samples, "prompt")}
    return statistics.median(prompted[sample.round] / sample.ttft_s for sample in _of(samples, place))


def _of(samples: Sequence[Sample], place: Place) -> list[Sample]:
    return [sample for sample in samples if sample.place == place]
