"""The vector index of one user's facts: exact up to a threshold, a graph over them above it.

The exact index holds every vector, whatever the size. Above the threshold a graph is built beside it, in a thread, and
asked for candidates, which the exact index then scores: results have exact cosines, and equal ones come oldest first,
as without a graph. What is not in the graph yet is scored with them, so that a fact is found as soon as it is added,
and a deleted one is not found from the moment on that it is deleted.

    ids ─► exact.add ─► pending ─► (thread) graph.add, calibrate ─► candidates for exact.search_among
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from sharding.graphs import Graph, open_graph
from sharding.ids import FactId
from sharding.index import ExactIndex, Float32

EXACT_UP_TO = 20_000
"""Facts; 1.5 ms of one core. More are worth a graph."""

SLICE = 16  # vectors added while a search has to wait: a few milliseconds
PENDING_PART = 4  # exact search serves while more than one in so many facts is pending
CANDIDATES = 4  # as many times as facts are asked for
FEWEST_CANDIDATES = 64

_one_at_a_time = threading.Semaphore()


class FactIndex:
    """As `ExactIndex`, whose every method it has. Used from one thread; its own only ever touches the graph."""

    def __init__(
        self, dim: int, exact_up_to: int = EXACT_UP_TO, open_graph: Callable[[int], Graph] = open_graph
    ) -> None:
        self._dim = dim
        self._exact_up_to = exact_up_to
        self._open_graph = open_graph
        self._exact = ExactIndex(dim)
        self._growth: _Growth | None = None

    def __len__(self) -> int:
        return len(self._exact)

    def __contains__(self, id: object) -> bool:
        return id in self._exact

    def add(self, ids: Sequence[FactId], vectors: ArrayLike) -> None:
        """See `ExactIndex.add`."""
        self._exact.add(ids, vectors)
        if self._growth is not None:
            self._growth.changed(ids)
            self._growth.go_on(self._exact)
        elif len(self._exact) > self._exact_up_to:
            self._growth = _Growth(self._open_graph(self._dim))
            self._growth.changed(self._exact.ids())
            self._growth.go_on(self._exact)

    def remove(self, id: FactId) -> bool:
        """See `ExactIndex.remove`."""
        held = self._exact.remove(id)
        if held and self._growth is not None:
            self._growth.forget(id)
            if len(self._exact) < self._exact_up_to // 2:
                self._growth = None
            elif self._growth.mostly_removed():
                self._growth = _Growth(self._open_graph(self._dim))
                self._growth.changed(self._exact.ids())
                self._growth.go_on(self._exact)
        return held

    def search(self, vector: ArrayLike, k: int) -> list[tuple[FactId, float]]:
        """See `ExactIndex.search`; above the threshold, at least 99 of 100 of the ten nearest are found."""
        growth = self._growth
        if growth is not None:
            growth.go_on(self._exact)
            if CANDIDATES * k < len(self) // PENDING_PART and growth.serves(len(self) // PENDING_PART):
                count = max(FEWEST_CANDIDATES, CANDIDATES * k)
                nearest = growth.candidates(self._exact.query(vector), count)
                return self._exact.search_among(vector, nearest, k)
        return self._exact.search(vector, k)

    def uses_graph(self) -> bool:
        """Whether searches go through a graph now."""
        return self._growth is not None and self._growth.serves(len(self) // PENDING_PART)

    def settled(self) -> None:
        """Wait until everything is in the graph, where there is one; for tests and benchmarks."""
        while self._growth is not None and self._growth.busy():
            self._growth.wait()
            self._growth.go_on(self._exact)


class _Growth:
    """A graph, what is to be added to it, and the thread that does."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._lock = threading.Lock()  # of the graph
        self._next_key = 0
        self._key_of: dict[FactId, int] = {}
        self._id_of: dict[int, FactId] = {}  # of keys that stand, in the graph or pending
        self._pending: dict[FactId, None] = {}
        self._arriving: dict[int, None] = {}  # keys that the thread is adding
        self._leaving: list[int] = []  # keys that are to be removed when no thread runs
        self._thread: threading.Thread | None = None
        self._calibrated_at = 0
        self._removed = 0

    def changed(self, ids: Sequence[FactId]) -> None:
        for id in ids:
            self.forget(id)
            self._pending[id] = None

    def forget(self, id: FactId) -> None:
        self._pending.pop(id, None)
        key = self._key_of.pop(id, None)
        if key is not None:
            del self._id_of[key]
            self._removed += 1
            self._leaving.append(key)

    def mostly_removed(self) -> bool:
        return self._removed > max(len(self._key_of), 1)

    def serves(self, most_pending: int) -> bool:
        return self._graph.worthwhile and len(self._pending) + len(self._arriving) <= most_pending

    def busy(self) -> bool:
        return self._thread is not None or bool(self._pending) or bool(self._leaving)

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def candidates(self, query: Float32, count: int) -> list[FactId]:
        """Ids that may be among the nearest, each once; what is not in the graph yet always may."""
        with self._lock:
            keys = self._graph.search(query, count + len(self._leaving)).tolist()
        near = {self._id_of[key]: None for key in keys if key in self._id_of}
        near.update((self._id_of[key], None) for key in self._arriving if key in self._id_of)
        near.update(self._pending)
        return list(near)

    def go_on(self, exact: ExactIndex) -> None:
        """Take note of a thread that ended, and start the next one where something is pending."""
        if self._thread is not None:
            if self._thread.is_alive():
                return
            self._thread = None
            self._arriving.clear()
        for key in self._leaving:
            self._graph.remove(key)
        self._leaving.clear()
        if not self._pending:
            return
        ids = list(self._pending)
        self._pending.clear()
        keys = np.arange(self._next_key, self._next_key + len(ids), dtype=np.int64)
        self._next_key += len(ids)
        for id, key in zip(ids, keys.tolist(), strict=True):
            self._key_of[id] = key
            self._id_of[key] = id
            self._arriving[key] = None
        grown = len(self._key_of) >= 2 * self._calibrated_at
        if grown:
            self._calibrated_at = len(self._key_of)
        work = (keys, exact.vectors(ids), grown)
        self._thread = threading.Thread(target=self._grow, args=work, name="memshard-index", daemon=True)
        self._thread.start()

    def _grow(self, keys: np.ndarray[tuple[int], np.dtype[np.int64]], vectors: Float32, calibrate: bool) -> None:
        """The thread. A process builds one graph at a time; the searches of this user wait for a slice at most."""
        with _one_at_a_time:
            for start in range(0, len(keys), SLICE):
                with self._lock:
                    self._graph.add(keys[start : start + SLICE], vectors[start : start + SLICE])
            if calibrate:
                self._graph.calibrate()
