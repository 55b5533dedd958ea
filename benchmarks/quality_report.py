"""From the answers of `quality.py` to rows and tables. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import numpy as np
from rich.table import Table

from benchmarks.quality import TEXT, Answer, memories
from benchmarks.results import Row, Spread

RESAMPLES = 10_000
PERCENT = 100.0
MS = 1000.0


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean of paired differences: percentile bootstrap over the questions (Efron 1979), with
    10,000 resamples that are the same every time."""
    values = np.asarray(differences, dtype=np.float64)
    draws = np.random.default_rng(0).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.percentile(values[draws].mean(axis=1), (2.5, 97.5))
    return float(low), float(high)


def rows(model: str, answers: Sequence[Answer]) -> Iterator[Row]:
    """One row an arm, k, kind of memory and kind of question, "all" included. `minus_text` and its interval are of the
    share of right answers, paired by question."""
    for memory, k in memories(answers):
        for arm in arms(answers):
            for kind in ("all", *kinds(answers)):
                found = _of(answers, memory, k, arm, kind)
                if not found:
                    continue
                low, high = interval(minus_text(answers, memory, k, arm, kind))
                yield {
                    "arm": arm,
                    "memory": memory,
                    "k": k,
                    "kind": kind,
                    "model": model,
                    "n": len(found),
                    "right": statistics.fmean(answer.right for answer in found),
                    "f1": statistics.fmean(answer.f1 for answer in found),
                    "minus_text": statistics.fmean(minus_text(answers, memory, k, arm, kind)),
                    "minus_text_low": low,
                    "minus_text_high": high,
                    "memory_tokens": statistics.median(answer.memory_tokens for answer in found),
                    **(_ttft(found).row("engine_ttft") if kind == "all" else {}),
                }


def minus_text(answers: Sequence[Answer], memory: str, k: int, arm: str, kind: str) -> list[float]:
    """Question by question, whether `arm` is right less whether text is: 1, 0 or -1."""
    text = {(a.person, a.question.text): a.right for a in _of(answers, memory, k, TEXT, kind)}
    return [a.right - text[a.person, a.question.text] for a in _of(answers, memory, k, arm, kind)]


def table(model: str, answers: Sequence[Answer]) -> Table:
    """Each arm's score, what it has over text, and its time to first token: one line an arm, k and kind of memory."""
    drawn = Table(
        title=f"Right answers, {model}",
        caption="memory: what a person has; n: questions; minus text: percentage points, with the 95 % interval of a "
        "paired bootstrap; first token at the engine: median (quartiles) in ms; window: facts in front while encoded; "
        "r: nearest facts prefilled as text; text up to: of so many facts at most all are",
    )
    for heading in ("memory", "k", "arm", "n", "right %", "minus text", "F1", "first token"):
        drawn.add_column(heading, justify="left" if heading in ("memory", "arm") else "right")
    names = arms(answers)
    for memory, k in memories(answers):
        for arm in names:
            found = _of(answers, memory, k, arm)
            differences = minus_text(answers, memory, k, arm, "all")
            low, high = interval(differences)
            points = f"{PERCENT * statistics.fmean(differences):+.1f} ({PERCENT * low:+.1f} to {PERCENT * high:+.1f})"
            drawn.add_row(
                memory,
                str(k),
                arm,
                str(len(found)),
                f"{PERCENT * statistics.fmean(answer.right for answer in found):.1f}",
                "" if arm == TEXT else points,
                f"{statistics.fmean(answer.f1 for answer in found):.3f}",
                _ttft(found).text(MS),
                end_section=arm == names[-1],
            )
    return drawn


def kinds_table(answers: Sequence[Answer]) -> Table:
    """How many of each kind of question were right, all k together."""
    drawn = Table(title="Right answers by kind of question, all k together, %")
    drawn.add_column("arm")
    for kind in kinds(answers):
        drawn.add_column(kind, justify="right")
    for arm in arms(answers):
        found = [[a.right for a in answers if a.arm == arm and a.question.kind == kind] for kind in kinds(answers)]
        drawn.add_row(arm, *(f"{PERCENT * statistics.fmean(right):.1f}" for right in found))
    return drawn


def arms(answers: Sequence[Answer]) -> list[str]:
    """Text first, the settings as they were given."""
    return sorted(dict.fromkeys(answer.arm for answer in answers), key=lambda arm: arm != TEXT)


def kinds(answers: Sequence[Answer]) -> list[str]:
    return sorted({answer.question.kind for answer in answers})


def _of(answers: Sequence[Answer], memory: str, k: int, arm: str, kind: str = "all") -> list[Answer]:
    return [a for a in answers if (a.memory, a.k, a.arm) == (memory, k, arm) and kind in ("all", a.question.kind)]


def _ttft(answers: Sequence[Answer]) -> Spread:
    return Spread.of(answer.ttft_s for answer in answers if answer.ttft_s is not None)
