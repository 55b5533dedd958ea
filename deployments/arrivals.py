"""Chunks that another shard's workers send, of a user who may be this shard's soon.

Two-phase: room is taken when they are offered, out of what nobody active uses, and chunks are counted when every rank
has all their bytes. Refused: offers under a placement that does not stand, another model's chunks, and what there is no
room for. A user who does not come after all, because the source was lost on the way, is seen off: nothing of what it
sent outlives `GUEST_S`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from typing import Any

from connector.chunk import ChunkId, ChunkRef
from connector.file_writer import slices
from connector.files import owner_key
from connector.moves import DEVICE, MOST_LINES, PEER, Move, Outcome, by_nccl
from connector.port import Engine
from connector.tiers import Tiers
from deployments.copies import fence_of
from deployments.encoder import Encoder
from deployments.memory_calls import Accepted, ArrivedCall, DropCopyCall, OfferCall
from deployments.resident import SPARE_S, Residents
from deployments.usage import Rates
from sharding.directory import not_owner
from sharding.errors import EngineFailed, MemshardError, NotFound
from sharding.ids import Placement, UserId
from sharding.user_memory import UserTable

GUEST_S = 60.0
"""How long chunks of a user who does not come are kept, from the last offer on."""

FILE_BYTES = 16 << 20
"""What one transfer brings to a file system at most: until it is written, it is in no tier's budget."""

Outcomes = dict[ChunkId, Outcome]

log = logging.getLogger(__name__)


class Arrivals:
    """The guests of one shard."""

    def __init__(
        self,
        engine: Engine,
        tiers: Tiers,
        encoder: Encoder,
        residents: Residents,
        table: UserTable,
        rates: Rates,
        *,
        nccl: bool = False,
    ) -> None:
        self._engine = engine
        self._tiers = tiers
        self._encoder = encoder
        self._residents = residents
        self._table = table
        self._rates = rates
        self._devices = engine.devices if nccl else ()
        self._lines: OrderedDict[str, None] = OrderedDict()  # open, as far as is known: workers close those beyond, too
        self._coming: dict[str, asyncio.Task[Outcomes]] = {}  # by transfer
        self._guests: dict[UserId, float] = {}  # until when
        self._seeing_off: dict[UserId, asyncio.Task[None]] = {}
        self.counters = {"received_chunks": 0, "refused_offers": 0, "guests_seen_off": 0}

    async def offer(self, call: OfferCall) -> Accepted:
        """Takes room for what is not here, and waits for it in the workers. Raises `WrongShard`, `Unavailable`,
        `EngineFailed`."""
        await self._check(call.placement)
        if call.digest != self._engine.model_digest or self._engine.refusal is not None:
            self.counters["refused_offers"] += 1
            return Accepted()
        self._expect(call.placement.user)
        self._rates.adopt(call.placement.user, call.load_per_s)
        known = frozenset(id_ for id_, _ in call.chunks if self._tiers.peek_held(id_))
        wanted = [ref for ref in call.chunks if ref[0] not in known and ref[0] not in self._tiers.device]
        if not wanted:
            return Accepted(known)
        doors, nccl = await self._opened(call)
        coming, refs = await self._begin(call, wanted)
        if coming is None:
            self.counters["refused_offers"] += 1
            return Accepted(known)
        self._coming[call.request_id] = coming
        return Accepted(known, tuple(refs), doors, nccl)

    async def arrived(self, call: ArrivedCall) -> Outcomes:
        """See `ArrivedCall`. Raises `NotFound` for a transfer that nobody waits for."""
        coming = self._coming.get(call.request_id)
        if coming is None:
            raise NotFound("There is no such transfer.", field="request_id")
        outcomes = await asyncio.shield(coming)
        self._coming.pop(call.request_id, None)
        return outcomes

    async def drop(self, call: DropCopyCall) -> None:
        """Chunks of a user who stays where they were. Raises `Unavailable`, `EngineFailed`."""
        user = call.placement.user
        await self._check(call.placement)
        here = self._tiers.ids_of(user)
        if call.ids is None:
            self._rates.forget(user)
        await self._encoder.forget(sorted(here if call.ids is None else here & call.ids))

    def close(self) -> None:
        """Waits for nobody any more."""
        for task in [*self._seeing_off.values(), *self._coming.values()]:
            task.cancel()

    async def _check(self, placement: Placement) -> None:
        """A user is no guest where they live, and whoever speaks for them has to be where they live."""
        standing = await self._table.directory.lookup(placement.user)
        if standing != placement or placement.shard == self._table.me:
            raise not_owner(placement)

    async def _opened(self, call: OfferCall) -> tuple[tuple[tuple[str, int], ...], bool]:
        """The doors of a line that is new."""
        nccl = by_nccl(self._devices, call.devices)
        if call.line in self._lines:
            self._lines.move_to_end(call.line)
            return (), nccl
        doors = await self._engine.listen(call.line, nccl)
        self._lines[call.line] = None
        while len(self._lines) > MOST_LINES:
            self._lines.popitem(last=False)
        return tuple(doors), nccl

    async def _begin(
        self, call: OfferCall, wanted: Sequence[ChunkRef]
    ) -> tuple[asyncio.Task[Outcomes] | None, Sequence[ChunkRef]]:
        """Where there is room: on the device, as long as nobody active has to give theirs, or in files."""
        owner, tiers = call.placement.user, self._tiers
        for parts in (1, 2, 4, 8):
            part = wanted[: -(-len(wanted) // parts)]
            if await tiers.make_room(owner, part, spare_s=SPARE_S):
                move = self._move(call, DEVICE, part)
                return self._receive(call, tiers.moves.into_memory(tiers.device, move)), part
        part = next(iter(slices(wanted, FILE_BYTES // self._engine.token_bytes)))
        for tier in tiers.files:
            if tier.exclusive and not tier.ill:
                leaving = tier.ledger.reserve(owner_key(owner), part, own=True)
                if leaving is not None:
                    move = self._move(call, tier.url, part)
                    return self._receive(call, tiers.writer.fill(tier, move, leaving)), part
        return None, ()

    def _move(self, call: OfferCall, target: str, refs: Sequence[ChunkRef]) -> Move:
        return Move(PEER + call.line, target, call.digest, call.placement.user, tuple(refs), fence_of(call))

    def _receive(self, call: OfferCall, work: Coroutine[Any, Any, Outcomes]) -> asyncio.Task[Outcomes]:
        async def receive() -> Outcomes:
            try:
                outcomes = await work
            except EngineFailed:
                await self._forget_line(call.line)
                raise
            if Outcome.FAILED in outcomes.values():
                await self._forget_line(call.line)
            self.counters["received_chunks"] += sum(outcome is Outcome.DONE for outcome in outcomes.values())
            return outcomes

        def done(task: asyncio.Task[Outcomes]) -> None:
            # Whoever sent it may be gone; then nobody asks.
            asyncio.get_running_loop().call_later(GUEST_S, self._coming.pop, call.request_id, None)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.warning("Chunks of a user did not arrive: %s", error)

        task = asyncio.create_task(receive())
        task.add_done_callback(done)
        return task

    async def _forget_line(self, line: str) -> None:
        self._lines.pop(line, None)
        try:
            await self._engine.hang_up(line)
        except EngineFailed as error:
            log.warning("A line was not closed: %s", error)

    def _expect(self, user: UserId) -> None:
        self._guests[user] = time.monotonic() + GUEST_S
        if user not in self._seeing_off:
            task = self._seeing_off[user] = asyncio.create_task(self._see_off(user))
            task.add_done_callback(lambda _: self._seeing_off.pop(user, None))

    async def _see_off(self, user: UserId) -> None:
        """Drops what was sent of a user who, after a while, is still not this shard's."""
        while True:
            left_s = self._guests[user] - time.monotonic()
            if left_s > 0:
                await asyncio.sleep(left_s)
                continue
            try:
                placement = await self._table.directory.lookup(user)
                if (placement is None or placement.shard != self._table.me) and self._tiers.ids_of(user):
                    self.counters["guests_seen_off"] += 1
                    self._rates.forget(user)
                    await self._residents.left(user)
                break
            except MemshardError as error:
                log.warning("Chunks of a user who did not come are dropped later: %s", error)
                self._guests[user] = time.monotonic() + GUEST_S
        del self._guests[user]
