"""The last minutes of something measured, for people who look now; Prometheus keeps the rest."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np

WINDOW_S = 300.0
MOST = 2_000  # of each kind; of more, the newest


class Recent:
    """Durations in seconds by kind, none older than `WINDOW_S`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, deque[tuple[float, float]]] = {}

    def add(self, kind: str, took_s: float) -> None:
        self._seen.setdefault(kind, deque(maxlen=MOST)).append((self._clock(), took_s))

    def summary(self) -> dict[str, dict[str, float]]:
        """By kind: how many `chats`, their median `p50_s`, and `p95_s`. Kinds without any are left out."""
        since = self._clock() - WINDOW_S
        found: dict[str, dict[str, float]] = {}
        for kind, seen in self._seen.items():
            while seen and seen[0][0] < since:
                seen.popleft()
            if seen:
                p50_s, p95_s = (float(value) for value in np.percentile([took_s for _, took_s in seen], (50, 95)))
                found[kind] = {"chats": len(seen), "p50_s": p50_s, "p95_s": p95_s}
        return found
