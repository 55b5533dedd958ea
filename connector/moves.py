"""Moves of chunks by the workers, and what may be said meanwhile: who is on the way where, what is uncertain.

Whoever forgets a chunk waits until it is `quiet`, and finds it in no place that it may have reached: a chunk that was
forgotten while it moved is dropped before its move counts as ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Protocol

from connector.chunk import ChunkId
from connector.ledger import ChunkLedger

DEVICE: Final = "device"
HOST: Final = "host"


class Outcome(StrEnum):
    """What became of one chunk of a move, on one rank; the worst over all ranks counts. The worst comes last."""

    DONE = "done"
    MISSING = "missing"  # the source does not have it
    DAMAGED = "damaged"  # the source has something else under its name
    NO_ROOM = "no_room"
    FAILED = "failed"  # the source or the target did not do it


@dataclass(frozen=True, slots=True)
class Move:
    """Chunks of one owner from `source` to `target`: `DEVICE`, `HOST`, or the root of a file system. From memory to
    memory they leave the source; files stay, and what is stored in a file stays in memory."""

    source: str
    target: str
    digest: str
    owner: str
    chunks: tuple[tuple[ChunkId, int], ...]  # with their tokens

    def plain(self) -> list[Any]:
        """As it crosses process borders."""
        return [self.source, self.target, self.digest, self.owner, [[id_, tokens] for id_, tokens in self.chunks]]

    @classmethod
    def of(cls, plain: Sequence[Any]) -> Move:
        source, target, digest, owner, chunks = plain
        return cls(source, target, digest, owner, tuple((ChunkId(id_), int(tokens)) for id_, tokens in chunks))


class Workers(Protocol):
    """What moving needs of `connector.engine.MemoryEngine`; both raise `EngineFailed`."""

    model_digest: str

    async def move(self, move: Move) -> dict[ChunkId, Outcome]:
        """What became of each chunk."""

    async def drop(self, ids: Sequence[ChunkId]) -> None:
        """Out of the workers' memory."""


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
