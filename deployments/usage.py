"""What a shard tells the directory of its users' use: beside its heartbeats, never on the way to an answer.

A user is noted once after having been served, however often; a burst is spread over several heartbeats. What could not
be told (Redis away) is told later; what the process did not live to tell is lost, and nothing rests on it.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable

from sharding.directory import Directory, Usage
from sharding.errors import Unavailable
from sharding.ids import Placement, UserId

NOTES_A_BEAT = 256

HALF_LIFE_S = 120.0
"""Requests of so long ago count half."""

RATES_KEPT = 10_000


class Rates:
    """How often users are served, in requests a second, averaged over minutes: each request counts for half as much
    with every `HALF_LIFE_S`. `clock`: seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: OrderedDict[UserId, tuple[float, float]] = OrderedDict()  # with when they were right; latest last

    def served(self, user: UserId) -> None:
        """The user is being served now."""
        self._counts[user] = (self._count(user) + 1.0, self._clock())
        self._counts.move_to_end(user)
        if len(self._counts) > RATES_KEPT:
            self._counts.popitem(last=False)

    def adopt(self, user: UserId, per_s: float) -> None:
        """The user is about to come, and is served so often."""
        if user not in self._counts and per_s > 0:
            self._counts[user] = (per_s * HALF_LIFE_S / math.log(2), self._clock())

    def forget(self, user: UserId) -> None:
        """The user is another shard's."""
        self._counts.pop(user, None)

    def users(self) -> list[UserId]:
        """Whoever was served lately."""
        return list(self._counts)

    def of(self, user: UserId) -> float:
        """One user's requests a second."""
        return self._count(user) * math.log(2) / HALF_LIFE_S

    def all(self) -> float:
        """Everybody's together."""
        return math.fsum(map(self.of, self._counts))

    def _count(self, user: UserId) -> float:
        count, at = self._counts.get(user, (0.0, 0.0))
        return float(count * 2.0 ** ((at - self._clock()) / HALF_LIFE_S))


class UsageNotes:
    """`bytes_of`: what a user's KV takes now. `clock`: Unix time in seconds."""

    def __init__(self, bytes_of: Callable[[UserId], int], clock: Callable[[], float] = time.time) -> None:
        self._bytes_of = bytes_of
        self._clock = clock
        self._served: dict[Placement, float] = {}  # not told yet, the longest waiting first
        self.rates = Rates()

    def __len__(self) -> int:
        return len(self._served)

    def served(self, placement: Placement) -> None:
        """The user is being served now."""
        self._served[placement] = self._clock()
        self.rates.served(placement.user)

    async def tell(self, directory: Directory) -> None:
        """Tell of the next `NOTES_A_BEAT` users. Raises `Unavailable`, and tells of them again then."""
        some = dict(list(self._served.items())[:NOTES_A_BEAT])
        for placement in some:
            del self._served[placement]
        try:
            await directory.note((placement, self._usage(placement, at)) for placement, at in some.items())
        except Unavailable:
            self._served = some | self._served
            raise

    def _usage(self, placement: Placement, at: float) -> Usage:
        held = self._bytes_of(placement.user)
        return Usage("device" if held else "text", held, at)
