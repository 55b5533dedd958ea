"""Where a shard's chunks are, and how they get where they are needed. Ids and bytes; the tensors are the workers'.

    encoded ─► device ─► (evicted) ─► host ─► (evicted) ─► gone, or in files only
                 │  ▲                   │
       in the    │  │ promote: what a chat needs, or whom a chat may come from next
    background   ▼  │                   ▼
               files: local disk, shared path; a copy of each chunk, written soon after it was encoded

Each tier has a ledger with a budget of its own. A chunk is on the device or on the host, and in files beside it; it is
injected from the device alone. Every move is two-phase: room is reserved, the source is held, the workers copy, then
the chunk is committed or the room given back.

Refused: to lose what can be kept. What leaves memory is written to a file first, where there is none yet and a tier has
room; a tier that fails is passed over.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any, NamedTuple

from connector.chunk import ChunkId, ChunkRef
from connector.eviction import Evicted
from connector.file_tier import FileTier
from connector.file_writer import FileWriter, slices
from connector.files import owner_key
from connector.ledger import SHARED, ChunkLedger
from connector.moves import DEVICE, HOST, Elsewhere, Move, Moves, Outcome, Workers
from sharding.errors import MemshardError, Unavailable

READ_BYTES = 16 << 20
"""What one move brings to the device at most, but at least one chunk: others get their turn in between."""

ROOM_TRIES = 16
"""How many copies that hold what could give room are waited for, one after the other."""

log = logging.getLogger(__name__)


class _Place(NamedTuple):
    """A tier under the device. `name` is for people, `source` what a `Move` calls it."""

    name: str
    source: str
    ledger: ChunkLedger
    tier: FileTier | None


class Tiers:
    """Made on the event loop that it runs on. Without a host and files, what leaves the device is gone.

    `counters` tells of the chunks that chats asked for in which tier they were (`found_…`, `found_none`), of those that
    were not on the device in time (`late_chunks`), and of files that did not hold what they should (`bad_files`).
    """

    def __init__(
        self, workers: Workers, device: ChunkLedger, host: ChunkLedger | None = None, files: Sequence[FileTier] = ()
    ) -> None:
        self.device = device
        self.host = host if host is not None else ChunkLedger(0, device.token_bytes)
        self.files = tuple(files)
        self.counters: Counter[str] = Counter()
        self._digest = workers.model_digest
        self.moves = Moves(workers)
        self._below = [
            _Place(HOST, HOST, self.host, None),
            *(_Place(tier.name, tier.url, tier.ledger, tier) for tier in self.files),
        ]
        self._evicting = asyncio.Lock()  # in the order of the reservations: what was to leave first, leaves first
        self._prefetching: set[str] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.copies: set[Elsewhere] = set()  # of users who are about to move
        self.writer = FileWriter(self.moves, self.device, self.host, self.files)
        if self.files:
            self._spawn(self.writer.run())

    # -- what there is ----------------------------------------------------------------------------------------------

    def peek_held(self, id_: ChunkId) -> bool:
        """Whether the chunk is complete in some tier, so that it need not be encoded."""
        return self.device.peek_resident(id_) or any(place.ledger.peek_resident(id_) for place in self._below)

    def peek_below(self, ids: Iterable[ChunkId]) -> list[ChunkId]:
        """Those that are complete in a tier under the device, and not on it; tells the counters where each is."""
        tiers = [(DEVICE, self.device), *((place.name, place.ledger) for place in self._below)]
        below: list[ChunkId] = []
        for id_ in ids:
            tier = next((name for name, ledger in tiers if ledger.peek_resident(id_)), "none")
            self.counters[f"found_{tier}"] += 1
            if tier not in (DEVICE, "none"):
                below.append(id_)
        return below

    def ids_of(self, owner: str) -> set[ChunkId]:
        """Everything of one owner in any tier, what is on its way there included."""
        held = {*self.device.ids_of(owner), *self.host.ids_of(owner)}
        return held.union(*(tier.ledger.ids_of(owner_key(owner)) for tier in self.files))

    def usage(self) -> tuple[tuple[str, int, int], ...]:
        """(tier, bytes held, budget in bytes), from the fastest tier on."""
        named = [(DEVICE, self.device), *((place.name, place.ledger) for place in self._below)]
        return tuple((name, ledger.bytes, ledger.budget_bytes) for name, ledger in named if ledger.budget_bytes)

    # -- leaving the device -----------------------------------------------------------------------------------------

    async def make_room(self, owner: str, refs: Sequence[ChunkRef], *, spare_s: float = 0.0, own: bool = False) -> bool:
        """Reserves room on the device (`ChunkLedger.reserve`) and clears it; False where there is none. Raises
        `EngineFailed`: then nothing is reserved."""
        own = own and any(place.ledger.budget_bytes for place in self._below)
        leaving = self.device.reserve(owner, refs, spare_s=spare_s, own=own)
        for _ in range(ROOM_TRIES):  # what is in the way may be held by a copy that goes on
            if leaving is not None or not await self.moves.one_ended():
                break
            leaving = self.device.reserve(owner, refs, spare_s=spare_s, own=own)
        if leaving is None:
            return False
        try:
            await self._evict(leaving)
        except BaseException:
            self.moves.uncertain(leaving)
            self.device.abort([id_ for id_, _ in refs])
            raise
        return True

    async def demote(self, owner: str) -> None:
        """Takes what an owner has off the device, as if others needed the room. Raises `EngineFailed`."""
        leaving = self.device.evict(owner)
        try:
            await self._evict(leaving)
        except BaseException:
            self.moves.uncertain(leaving)
            raise

    async def _evict(self, leaving: Mapping[ChunkId, Evicted]) -> None:
        async with self._evicting:
            users = {id_: gone for id_, gone in leaving.items() if gone.owner != SHARED}
            for owner, refs in _by_owner(users):
                await self._demote(owner, refs)
            await self.moves.drop([id_ for id_ in leaving if id_ not in users])

    async def _demote(self, owner: str, refs: Sequence[ChunkRef]) -> None:
        """From the device to the host, or out of memory where there is no room."""
        leaving = self.host.reserve(owner, refs, own=True)
        if leaving is None:
            await self.writer.save(owner, refs, DEVICE)
            await self.moves.drop(id_ for id_, _ in refs)
            return
        try:
            for other, theirs in _by_owner(leaving):
                await self.writer.save(other, theirs, HOST)
            await self.moves.drop(leaving)
        except BaseException:
            self.host.abort(id_ for id_, _ in refs)
            raise
        await self.moves.into_memory(self.host, Move(DEVICE, HOST, self._digest, owner, tuple(refs)))

    # -- coming to the device ---------------------------------------------------------------------------------------

    async def promote(self, owner: str, ids: Sequence[ChunkId], *, deadline_s: float) -> int:
        """Brings chunks to the device, the first ones first, as far as that can be done in time. Returns how many of
        those that some tier holds are still elsewhere; what is late goes on in the background."""
        below = [id_ for id_ in ids if not self.device.peek_resident(id_) and self.peek_held(id_)]
        if not below:
            return 0
        await asyncio.wait({self._spawn(self._promote(owner, below, keep=ids))}, timeout=deadline_s)
        late = sum(not self.device.peek_resident(id_) and self.peek_held(id_) for id_ in below)
        self.counters["late_chunks"] += late
        return late

    def prefetch(
        self, owner: str, ids: Sequence[ChunkId], *, spare_s: float, lost: Callable[[], Awaitable[None]]
    ) -> None:
        """Brings a user's chunks to the device before a chat asks for them, in the background, while nobody who was
        active within `spare_s` has to give room. `lost` is called where some turn out to be in no tier."""
        below = [id_ for id_ in ids if id_ not in self.device and self.peek_held(id_)]
        if below and owner not in self._prefetching:
            self._prefetching.add(owner)
            task = self._spawn(self._prefetch(owner, below, spare_s, lost))
            task.add_done_callback(lambda _: self._prefetching.discard(owner))

    async def _prefetch(
        self, owner: str, ids: Sequence[ChunkId], spare_s: float, lost: Callable[[], Awaitable[None]]
    ) -> None:
        await self._promote(owner, ids, spare_s=spare_s)
        if not all(map(self.peek_held, ids)):
            await lost()

    async def _promote(
        self, owner: str, ids: Sequence[ChunkId], *, keep: Sequence[ChunkId] = (), spare_s: float = 0.0
    ) -> None:
        """With `keep`, the owner's other chunks give room for these."""
        await self.moves.quiet(set(ids), DEVICE)  # some may be on their way already
        self.touch(owner)
        with self.device.held(keep):
            for place in self._below:
                here = [(id_, place.ledger.tokens(id_)) for id_ in ids if place.ledger.peek_resident(id_)]
                for some in slices(here, READ_BYTES // self.device.token_bytes):
                    if not await self._fetch(owner, some, place, spare_s, own=bool(keep)):
                        return

    async def _fetch(self, owner: str, refs: Sequence[ChunkRef], place: _Place, spare_s: float, own: bool) -> bool:
        """Brings chunks of one tier to the device; False where there is no room."""
        refs = [ref for ref in refs if ref[0] not in self.device and place.ledger.peek_resident(ref[0])]
        if not refs or (place.tier is not None and place.tier.ill):
            return True
        with place.ledger.held([id_ for id_, _ in refs]):
            if not await self.make_room(owner, refs, spare_s=spare_s, own=own):
                return False
            move = Move(place.source, DEVICE, self._digest, owner, tuple(refs))
            outcomes = await self.moves.into_memory(self.device, move)
        if place.tier is None:
            place.ledger.forget(outcomes)  # they are on the device now, or in no memory
            return True
        done = [id_ for id_, outcome in outcomes.items() if outcome is Outcome.DONE]
        await self.writer.encoded(owner, done)  # another tier of files may lack it
        bad = [id_ for id_, outcome in outcomes.items() if outcome not in (Outcome.DONE, Outcome.NO_ROOM)]
        self.counters["bad_files"] += len(bad)
        place.tier.strike(bad)
        with suppress(Unavailable):
            await place.tier.remove()
        return True

    # -- users and chunks that come and go --------------------------------------------------------------------------

    async def adopt(self, owner: str) -> None:
        """The user is this shard's: what others left of it in a tier that both see counts here from now on, and what
        they sent is written to files."""
        for tier in self.files:
            await tier.adopt(owner)
        await self.writer.encoded(owner, {*self.device.ids_of(owner), *self.host.ids_of(owner)})

    async def share(self, owner: str) -> int:
        """Sees to it that others find what an owner has here; how many chunks had to be copied for it. Raises
        `EngineFailed`."""
        return await self.writer.share(owner)

    def release(self, owner: str) -> None:
        """The user is another shard's: what is in a tier that both see is that one's."""
        for tier in self.files:
            if not tier.exclusive:
                tier.ledger.forget(tier.ledger.ids_of(owner_key(owner)))

    def touch(self, owner: str) -> None:
        """The user was active."""
        self.host.touch(owner)
        for tier in self.files:
            tier.ledger.touch(owner_key(owner))

    def strike(self, ids: Iterable[ChunkId]) -> list[ChunkId]:
        """Not there any more as far as anybody asks; `remove` makes it true. Returns those that were."""
        wanted = list(ids)
        struck = {*self.device.forget(wanted), *self.host.forget(wanted)}
        return sorted(struck.union(*(tier.strike(wanted) for tier in self.files)))

    async def remove(self, ids: Iterable[ChunkId]) -> None:
        """When this returns, chunks that were struck out are in no memory and in no file, here or where their user is
        being copied to. Raises `EngineFailed` or `Unavailable`: then any of them may still be there."""
        due = set(ids)
        if due:
            await self.moves.quiet(due)
        await self.moves.drop(due)
        for copy in list(self.copies):
            await copy.drop(due)
        for tier in self.files:
            await tier.remove()

    async def purge(self, owner: str, *, shared: bool = True) -> None:
        """After `remove`: no file of an owner is anywhere that this shard can reach, but those of chunks that stand;
        `shared`: also where others see it. Raises `Unavailable`."""
        for tier in self.files:
            if shared or tier.exclusive:
                await tier.purge(owner)

    async def open(self) -> None:
        """Finds what earlier shards left in files that are this one's now."""
        for tier in self.files:
            await tier.open()

    def close(self) -> None:
        """Begins nothing more; what runs is left to end with the workers."""
        for task in self._tasks:
            task.cancel()
        for tier in self.files:
            tier.close()

    def check_integrity(self) -> None:
        """Raises AssertionError where a ledger does not add up, or a chunk is on the device and on the host."""
        for ledger in (self.device, *(place.ledger for place in self._below)):
            ledger.check_integrity()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and isinstance(error := task.exception(), MemshardError):
                log.error("Chunks were not moved: %s", error)
            elif not task.cancelled() and error is not None:
                log.error("Chunks were not moved", exc_info=error)

        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(done)
        return task


def _by_owner(leaving: Mapping[ChunkId, Evicted]) -> Iterator[tuple[str, list[ChunkRef]]]:
    """Each owner's chunks."""
    ordered = sorted(leaving, key=lambda id_: leaving[id_].owner)
    for owner, some in groupby(ordered, key=lambda id_: leaving[id_].owner):
        yield owner, [(id_, leaving[id_].tokens) for id_ in some]
