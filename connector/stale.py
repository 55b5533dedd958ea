"""What was encoded behind a fact's old text, and is served until it is rebuilt.

    a fact gets a new text ─► its own chunk is gone ─► it is *corrected*: text beside the memory
                           └► chunks encoded behind it are *stale*: kept, counted ─► rebuilt ─► gone

A stale chunk holds its own fact's keys and values, computed in the presence of the old text. It may be served while its
fact has the same text and every fact that it was encoded behind is still there: a correction replaces what somebody
said, a deletion takes it back, and takes all that depends on it along.

Pure: facts in, ids out. Which chunks are where is asked of the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from connector.chunk import ChunkId
from connector.plan import Piece
from sharding.ids import FactId

Resident = Callable[[ChunkId], bool]


class Former(NamedTuple):
    """A chunk that stood for a fact, and the facts that it was encoded behind."""

    fact: FactId
    token_ids: tuple[int, ...]
    chunk: ChunkId
    behind: frozenset[FactId]


class StaleChunks:
    """Of one user's facts those whose chunks are not what a full build would make of them."""

    def __init__(self) -> None:
        self._former: dict[FactId, Former] = {}
        self._corrected: set[FactId] = set()
        self._waiting: set[FactId] = set()  # for a rebuild that nobody has asked for yet

    def follow(self, former: Iterable[Former], before: Mapping[FactId, Piece], now: Mapping[FactId, Piece]) -> None:
        """Facts that were `before` are `now`. `former`: the chunks of those whose prefixes are others by now."""
        changed = {fact for fact in before.keys() & now.keys() if before[fact].token_ids != now[fact].token_ids}
        waiting = self._waiting | changed
        for one in former:
            self._former.setdefault(one.fact, one)
            waiting.add(one.fact)
        self._former = {fact: one for fact, one in self._former.items() if _servable(one, now)}
        self._corrected = (self._corrected | changed) & now.keys()
        self._waiting = waiting & self.facts()

    def settle(self, now: Mapping[FactId, Piece], resident: Resident) -> None:
        """Gives up stale chunks that are nowhere any more, and those whose successors are there. With the last of them
        corrections end: nothing tells of old texts any more."""
        self._former = {
            fact: one for fact, one in self._former.items() if resident(one.chunk) and not _here(now[fact], resident)
        }
        if not self._former:
            self._corrected.clear()
        self._waiting &= self.facts()

    def renew(self) -> None:
        """What waits for a rebuild waits no longer."""
        self._waiting.clear()

    def facts(self) -> set[FactId]:
        """The facts with a stale chunk, and the corrected ones."""
        return self._former.keys() | self._corrected

    def corrected(self, fact: FactId) -> bool:
        """Whether the fact's text is newer than what others were encoded behind."""
        return fact in self._corrected

    def chunk(self, fact: FactId) -> ChunkId | None:
        """The stale chunk that stands for the fact."""
        one = self._former.get(fact)
        return one and one.chunk

    def ids(self) -> set[ChunkId]:
        """Every stale chunk."""
        return {one.chunk for one in self._former.values()}

    def held_back(self, fact: FactId, resident: Resident) -> bool:
        """Whether the fact's chunk is made with the next rebuild, and not before."""
        if fact not in self._waiting:
            return False
        one = self._former.get(fact)
        return one is None or resident(one.chunk)


def _servable(one: Former, now: Mapping[FactId, Piece]) -> bool:
    piece = now.get(one.fact)
    return (
        piece is not None and piece.token_ids == one.token_ids and piece.chunk != one.chunk and one.behind <= now.keys()
    )


def _here(piece: Piece, resident: Resident) -> bool:
    return piece.chunk is not None and resident(piece.chunk)
