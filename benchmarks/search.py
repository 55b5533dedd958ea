"""`memshard bench search`: how fast facts are found among many, and how many of the nearest ten, against exact search.

Two kinds of vectors, 384 wide as the packaged embedder's: around topics, as embeddings of sentences are, and random
ones, which no graph searches faster than looking at all of them: the index finds that out and does so.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from benchmarks.results import Row, Spread
from sharding.fact_index import FactIndex
from sharding.graphs import questions_about
from sharding.ids import FactId
from sharding.index import ExactIndex

DIM = 384
K = 10
QUESTIONS = 200
COUNTS = (1_000, 10_000, 100_000)
QUICK_COUNTS = (1_000, 30_000)
A_TOPIC = 50  # facts


@dataclass(frozen=True, slots=True)
class Found:
    """One number of facts of one kind. Times in seconds."""

    kind: str
    facts: int
    uses_graph: bool
    recall: float
    index_s: Spread
    exact_s: Spread
    build_s: float  # until the graph serves
    add_s: Spread  # one fact, as the caller waits for it

    def row(self) -> Row:
        times = self.index_s.row("search") | self.exact_s.row("exact") | self.add_s.row("add")
        about: dict[str, str | int | float] = {"kind": self.kind, "facts": self.facts, "graph": int(self.uses_graph)}
        about["recall"] = self.recall
        return {**about, "build_s": self.build_s, **times}


def measure(console: Console, counts: tuple[int, ...]) -> Iterator[Found]:
    """Both kinds at each count; exact and indexed searches are interleaved."""
    for count in counts:
        for kind in ("topics", "random"):
            with console.status(f"{count} facts, {kind}"):
                yield _measure(kind, count)


def table(found: list[Found]) -> Table:
    drawn = Table(title=f"Finding {K} facts, milliseconds, median (quartiles) of {QUESTIONS} questions")
    for heading in ("vectors", "facts", "by", "recall", "search", "exact", "add one", "built, s"):
        drawn.add_column(heading, justify="left" if heading in ("vectors", "by") else "right", no_wrap=True)
    for one in found:
        drawn.add_row(
            one.kind,
            str(one.facts),
            "graph" if one.uses_graph else "exact",
            f"{one.recall:.4f}",
            one.index_s.text(1e3),
            one.exact_s.text(1e3),
            one.add_s.text(1e3),
            f"{one.build_s:.0f}",
        )
    return drawn


def _measure(kind: str, count: int) -> Found:
    random = np.random.default_rng(0)
    vectors = _vectors(kind, count + QUESTIONS, random)
    ids = [FactId(f"f{n}") for n in range(len(vectors))]
    index, exact = FactIndex(DIM), ExactIndex(DIM)
    exact.add(ids[:count], vectors[:count])
    began = time.perf_counter()
    index.add(ids[:count], vectors[:count])
    index.settled()
    build_s = time.perf_counter() - began
    asked = questions_about(vectors[random.integers(0, count, QUESTIONS)], random)
    searches: tuple[list[float], list[float]] = ([], [])
    both: tuple[FactIndex | ExactIndex, ...] = (index, exact)
    hits = 0
    for question in asked:
        answers = []
        for one, times in zip(both, searches, strict=True):
            began = time.perf_counter()
            answers.append({id for id, _ in one.search(question, K)})
            times.append(time.perf_counter() - began)
        hits += len(answers[0] & answers[1])
    adds = []
    uses_graph = index.uses_graph()
    for at in range(count, count + QUESTIONS):
        began = time.perf_counter()
        index.add([ids[at]], vectors[at : at + 1])
        adds.append(time.perf_counter() - began)
    spreads = Spread.of(searches[0]), Spread.of(searches[1])
    return Found(kind, count, uses_graph, hits / (K * QUESTIONS), *spreads, build_s, Spread.of(adds))


def _vectors(kind: str, count: int, random: np.random.Generator) -> NDArray[np.float32]:
    noise = random.normal(size=(count, DIM))
    if kind == "random":
        return noise.astype(np.float32)
    topics = random.normal(size=(count // A_TOPIC, DIM))
    return (topics[random.integers(0, len(topics), count)] + 0.6 * noise).astype(np.float32)
