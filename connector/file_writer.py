"""Chunks become files: soon after they were encoded, or when they have to leave memory.

One at a time and in small pieces, so that neither chats nor deletions wait for long. A tier that has no room evicts its
users of long ago; one that fails is passed over, and its chunks are where they were.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from connector.chunk import ChunkId, ChunkRef
from connector.eviction import Evicted
from connector.file_tier import FileTier
from connector.files import owner_key
from connector.ledger import SHARED, ChunkLedger
from connector.moves import DEVICE, HOST, Move, Moves, Outcome
from sharding.errors import EngineFailed, Unavailable

WRITE_BYTES = 4 << 20
"""What one move writes at most, but at least one chunk: a deletion waits for no more than one."""

log = logging.getLogger(__name__)


class FileWriter:
    """Made on the event loop that it runs on; `run` it in a task."""

    def __init__(self, moves: Moves, device: ChunkLedger, host: ChunkLedger, tiers: Sequence[FileTier]) -> None:
        self._moves = moves
        self._memory = ((device, DEVICE), (host, HOST))
        self._tiers = tiers
        self._most = WRITE_BYTES // max(1, device.token_bytes)  # tokens of one move
        self._unwritten: dict[str, set[ChunkId]] = {}  # by owner
        self._changed = asyncio.Condition()
        self._running = False

    async def encoded(self, owner: str, ids: Iterable[ChunkId]) -> None:
        """These chunks are new in memory; their files are written soon."""
        if self._tiers and owner != SHARED:
            async with self._changed:
                self._unwritten.setdefault(owner, set()).update(ids)
                self._changed.notify_all()

    async def written(self) -> None:
        """Returns when every tier that works has what was encoded, or has refused it."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._unwritten and not self._running)

    async def run(self) -> None:
        """Writes until it is cancelled."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: bool(self._unwritten))
                owner, ids = self._unwritten.popitem()
                self._running = True
            try:
                await self._write(owner, ids)
            except EngineFailed as error:
                log.error("Chunks are not written: %s", error)  # the health check ends this replica
            finally:
                async with self._changed:
                    self._running = False
                    self._changed.notify_all()

    async def _write(self, owner: str, ids: set[ChunkId]) -> None:
        for tier in self._tiers:
            for ledger, source in self._memory:
                for some in slices([(id_, ledger.tokens(id_)) for id_ in ids if ledger.peek_resident(id_)], self._most):
                    here = [ref for ref in some if ledger.peek_resident(ref[0])]
                    with ledger.held([id_ for id_, _ in here]):
                        await self._store(tier, owner, here, source)

    async def share(self, owner: str) -> int:
        """Writes what an owner has here, in memory or in a tier that is this shard's alone, to the first tier that
        others see; how many chunks that tier did not have before. Without such a tier: none."""
        tier = next((tier for tier in self._tiers if not tier.exclusive and not tier.ill), None)
        if tier is None:
            return 0
        key = owner_key(owner)
        before = len(tier.ledger.ids_of(key))
        for ledger, source in self._memory:
            refs = [(id_, ledger.tokens(id_)) for id_ in ledger.ids_of(owner) if ledger.peek_resident(id_)]
            for some in slices(refs, self._most):
                here = [ref for ref in some if ledger.peek_resident(ref[0])]
                with ledger.held([id_ for id_, _ in here]):
                    await self._store(tier, owner, here, source)
        for other in self._tiers:
            if other.exclusive and not other.ill:
                for id_ in other.ledger.ids_of(key):
                    await self._copy(other, tier, key, id_)
        return len(tier.ledger.ids_of(key)) - before

    async def _copy(self, source: FileTier, target: FileTier, key: str, id_: ChunkId) -> None:
        """From file to file, as it is: whoever reads it checks it."""
        if id_ in target.ledger or not source.ledger.peek_resident(id_):
            return
        leaving = target.ledger.reserve(key, [(id_, source.ledger.tokens(id_))], own=True)
        if leaving is None:
            return
        done: set[ChunkId] = set()
        with source.ledger.held([id_]):
            async with self._moves.on_the_way([id_], target.name):
                try:
                    target.doom(leaving)
                    await target.remove()
                    if await target.copy_from(source, key, id_):
                        done.add(id_)
                except Unavailable:
                    log.warning("The %s tier is full, and nothing can be removed", target.name)
                finally:
                    target.written(key, [id_], done)

    async def save(self, owner: str, refs: Sequence[ChunkRef], source: str) -> None:
        """Writes what is about to leave memory to the first tier that takes it, where no file is yet."""
        for tier in self._tiers:
            rest = [ref for ref in refs if not any(t.ledger.peek_resident(ref[0]) for t in self._tiers)]
            for some in slices(rest, self._most):
                await self._store(tier, owner, some, source)

    async def _store(self, tier: FileTier, owner: str, refs: Sequence[ChunkRef], source: str) -> None:
        refs = [ref for ref in refs if ref[0] not in tier.ledger]
        if not refs or tier.ill or (leaving := tier.ledger.reserve(owner_key(owner), refs, own=True)) is None:
            return
        await self.fill(tier, Move(source, tier.url, self._moves.workers.model_digest, owner, tuple(refs)), leaving)

    async def fill(self, tier: FileTier, move: Move, leaving: Mapping[ChunkId, Evicted]) -> dict[ChunkId, Outcome]:
        """One move into files, whose room in the tier is reserved: it is committed, or given back. `leaving` is what
        the reservation evicted."""
        key, ids = owner_key(move.owner), [id_ for id_, _ in move.chunks]
        done: set[ChunkId] = set()
        outcomes: dict[ChunkId, Outcome] = {}
        async with self._moves.on_the_way(ids, tier.name):
            try:
                tier.doom(leaving)
                await tier.remove()
                outcomes = await self._moves.workers.move(move)
                done = {id_ for id_, outcome in outcomes.items() if outcome is Outcome.DONE}
                if Outcome.FAILED in outcomes.values() and not move.over_line:
                    tier.failed("a chunk could not be written")
            except Unavailable:
                log.warning("The %s tier is full, and nothing can be removed", tier.name)
            finally:
                tier.written(key, ids, done)
        with suppress(Unavailable):
            await tier.remove()
        return outcomes


def slices(refs: Iterable[ChunkRef], most_tokens: int) -> Iterable[list[ChunkRef]]:
    """The same in pieces of so many tokens, or of one chunk that has more."""
    piece: list[ChunkRef] = []
    for ref in refs:
        if piece and sum(tokens for _, tokens in piece) + ref[1] > most_tokens:
            yield piece
            piece = []
        piece.append(ref)
    if piece:
        yield piece
