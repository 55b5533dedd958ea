"""What a shard tells the directory of its users' use: beside its heartbeats, never on the way to an answer.

A user is noted once after having been served, however often; a burst is spread over several heartbeats. What could not
be told (Redis away) is told later; what the process did not live to tell is lost, and nothing rests on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sharding.directory import Directory, Usage
from sharding.errors import Unavailable
from sharding.ids import Placement, UserId

NOTES_A_BEAT = 256


class UsageNotes:
    """`bytes_of`: what a user's KV takes now. `clock`: Unix time in seconds."""

    def __init__(self, bytes_of: Callable[[UserId], int], clock: Callable[[], float] = time.time) -> None:
        self._bytes_of = bytes_of
        self._clock = clock
        self._served: dict[Placement, float] = {}  # not told yet, the longest waiting first

    def __len__(self) -> int:
        return len(self._served)

    def served(self, placement: Placement) -> None:
        """The user is being served now."""
        self._served[placement] = self._clock()

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
