"""Moves of chunks by the workers, and what may be said meanwhile: who is on the way where, what is uncertain.

Whoever forgets a chunk waits until it is `quiet`, and finds it in no place that it may have reached: a chunk that was
forgotten while it moved is dropped before its move counts as ended.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Protocol

from connector.chunk import ChunkId
from connector.ledger import ChunkLedger

DEVICE: Final = "device"
HOST: Final = "host"
PEER: Final = "peer:"
"""What stands before the name of a line (`line.py`) to another shard's workers."""

MOST_LINES = 16
"""Beyond so many, the line that was unused longest is closed: its other end may be gone."""


class Outcome(StrEnum):
    """What became of one chunk of a move, on one rank; the worst over all ranks counts. The worst comes last."""

    DONE = "done"
    MISSING = "missing"  # the source does not have it
    DAMAGED = "damaged"  # the source has something else under its name
    NO_ROOM = "no_room"
    FAILED = "failed"  # the source or the target did not do it


Copied = tuple[Outcome, int]
"""What a thread says of one chunk, with the position that it was encoded at."""


@dataclass(frozen=True, slots=True)
class Move:
    """Chunks of one owner from `source` to `target`: `DEVICE`, `HOST`, the root of a file system, or a line. From
    memory to memory they leave the source; what is read from a file, stored in one or sent over a line stays.

    Over a line, both ends were told the same `fence`, which names the transfer and the owner's epoch.
    """

    source: str
    target: str
    digest: str
    owner: str
    chunks: tuple[tuple[ChunkId, int], ...]  # with their tokens
    fence: str = ""

    @property
    def over_line(self) -> bool:
        """Whether it goes to, or comes from, another shard's workers."""
        return self.source.startswith(PEER) or self.target.startswith(PEER)

    def plain(self) -> list[Any]:
        """As it crosses process borders."""
        chunks = [[id_, tokens] for id_, tokens in self.chunks]
        return [self.source, self.target, self.digest, self.owner, chunks, self.fence]

    @classmethod
    def of(cls, plain: Sequence[Any]) -> Move:
        source, target, digest, owner, chunks, fence = plain
        refs = tuple((ChunkId(id_), int(tokens)) for id_, tokens in chunks)
        return cls(source, target, digest, owner, refs, fence)

    def hello(self, rank: int) -> bytes:
        """What both ends of a transfer say of it, in 32 bytes: different where anything of it is."""
        told = [self.fence, self.digest, self.owner, rank, [[id_, tokens] for id_, tokens in self.chunks]]
        return hashlib.blake2b(json.dumps(told).encode(), digest_size=32).digest()


class Workers(Protocol):
    """What moving needs of `connector.engine.MemoryEngine`; both raise `EngineFailed`."""

    model_digest: str

    async def move(self, move: Move) -> dict[ChunkId, Outcome]:
        """What became of each chunk."""

    async def drop(self, ids: Sequence[ChunkId]) -> None:
        """Out of the workers' memory."""


def by_nccl(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    """Whether NCCL can connect the ranks of two engines by the names of their devices: it refuses one GPU twice."""
    both = [*ours, *theirs]
    return len(ours) == len(theirs) > 0 and len({*both}) == len(both) and all(name.startswith("cuda:") for name in both)


class Elsewhere(Protocol):
    """A copy of some chunks that another shard has, or is about to have."""

    async def drop(self, ids: Collection[ChunkId]) -> None:
        """Those of them that are there are there no more. Raises `Unavailable` where nobody says so."""


class Moves:
    """The moves of one shard's workers."""

    def __init__(self, workers: Workers) -> None:
        self.workers = workers
        self._moving: list[tuple[str, frozenset[ChunkId]]] = []  # each with the tier it goes to
        self._moved = asyncio.Condition()
        self._uncertain: set[ChunkId] = set()  # in the workers' memory perhaps, and counted nowhere

    async def into_memory(self, into: ChunkLedger, move: Move) -> dict[ChunkId, Outcome]:
        """One move into memory, whose room in `into` is reserved: it is committed, or given back. What did not come on
        every rank is in no memory afterwards. Raises `EngineFailed`."""
        ids = [id_ for id_, _ in move.chunks]
        done: set[ChunkId] = set()
        async with self.on_the_way(ids, move.target):
            try:
                await self.drop(())
                outcomes = await self.workers.move(move)
                done = {id_ for id_, outcome in outcomes.items() if outcome is Outcome.DONE}
            except BaseException:
                self.uncertain(ids)
                raise
            finally:
                forgotten = into.commit(done)
                into.abort(ids)
            await self.drop([*forgotten, *(id_ for id_ in ids if id_ not in done)])
        return outcomes

    def uncertain(self, ids: Iterable[ChunkId]) -> None:
        """These may still be in the workers' memory; they are dropped before anything else is asked of them."""
        self._uncertain.update(ids)

    async def drop(self, ids: Iterable[ChunkId]) -> None:
        """Out of the workers' memory, with what a failed move may have left there. Raises `EngineFailed`."""
        due = {*ids, *self._uncertain}
        self._uncertain.clear()
        try:
            await self.workers.drop(sorted(due))
        except BaseException:
            self._uncertain |= due
            raise

    @asynccontextmanager
    async def on_the_way(self, ids: Sequence[ChunkId], target: str) -> AsyncIterator[None]:
        """These chunks may appear in `target` at any moment until this ends."""
        moving = (target, frozenset(ids))
        self._moving.append(moving)
        try:
            yield
        finally:
            self._moving.remove(moving)
            async with self._moved:
                self._moved.notify_all()

    async def one_ended(self) -> bool:
        """Returns True when one of the moves that go on has ended; False at once where there is none."""
        now = list(self._moving)
        if not now:
            return False
        async with self._moved:
            await self._moved.wait_for(lambda: any(moving not in self._moving for moving in now))
        return True

    async def quiet(self, ids: set[ChunkId], target: str | None = None) -> None:
        """Returns when none of these chunks is on its way (to `target`) any more."""

        def moving() -> bool:
            return any(ids & some for into, some in self._moving if target in (None, into))

        async with self._moved:
            await self._moved.wait_for(lambda: not moving())
