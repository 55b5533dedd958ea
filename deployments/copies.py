"""A user's chunks sent to the workers of the shard that the user is about to move to, while they are served here.

    offer ─► the target takes room, and says what it lacks ─► both ends copy, worker to worker ─► what arrived there

Slice by slice, one at a time for each target, over a line that is kept for the next user. What fails stays with whoever
moves the user (`mover.py`): there is always another path. Until the user has moved, a chunk that is deleted here is
deleted there, too, before the deletion is answered (`connector/tiers.py::Tiers.remove`).
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

from connector.chunk import ChunkId, ChunkRef
from connector.file_writer import slices
from connector.files import owner_key
from connector.ledger import ChunkLedger
from connector.moves import DEVICE, HOST, PEER, Move, Outcome
from connector.port import Engine
from connector.tiers import Tiers
from deployments.memory_calls import Accepted, ArrivedCall, DropCopyCall, MemoryCall, OfferCall
from deployments.usage import Rates
from sharding.errors import EngineFailed, MemshardError, ShardGone, Unavailable, WrongShard
from sharding.ids import Placement, ShardId

T = TypeVar("T")

SLICE_BYTES = 256 << 20
"""What one transfer takes at most, but at least one chunk: so much room is taken at the target at once."""

ASK_S = 10.0
"""How long the other shard may take for an answer, a transfer that goes on included."""

log = logging.getLogger(__name__)


class Others(Protocol):
    """The other shards; `deployments.shard_client.Shards` says what it raises."""

    async def ask(self, shard: ShardId, call: MemoryCall[T], deadline_s: float) -> T: ...


class Courier:
    """Sends one shard's chunks to others. `shards` gives what calls those; None: they do not reach each other."""

    def __init__(self, engine: Engine, tiers: Tiers, rates: Rates, *, nccl: bool = False) -> None:
        self.engine = engine
        self.tiers = tiers
        self.rates = rates
        self.shards: Callable[[], Others] | None = None
        self.devices = engine.devices if nccl else ()
        self.lines: dict[ShardId, str] = {}
        self.turns: dict[ShardId, asyncio.Lock] = {}
        self.counters = {"sent_chunks": 0, "sent_bytes": 0, "failed_transfers": 0}

    def copy(self, placement: Placement, target: ShardId) -> Copy | None:
        """Of this user's chunks, for that shard; `close` it. None where shards do not reach each other."""
        if self.shards is None or self.engine.refusal is not None:
            return None
        copy = Copy(self, self.shards(), placement, target)
        self.tiers.copies.add(copy)
        return copy


class Copy:
    """One user's chunks that are there, or may be."""

    def __init__(self, courier: Courier, shards: Others, placement: Placement, target: ShardId) -> None:
        self._from = courier
        self._shards = shards
        self._placement = placement
        self._target = target
        self._there: set[ChunkId] = set()
        self._perhaps_there: set[ChunkId] = set()
        self.sent_chunks = 0
        self.sent_bytes = 0

    async def run(self) -> bool:
        """Sends what is here and not there; whether everything is there then: the target may have no room. Raises
        `ShardGone` where the target is no more, and other members of the tree where a transfer did not work: what is
        there stays, and this may be called again."""
        lacking: set[ChunkId] = set()  # that some rank has not, or that a file does not give
        for source, ledger, refs in self._here():
            for some in slices(refs, SLICE_BYTES // self._from.engine.token_bytes):
                done = self._there | lacking
                while rest := [ref for ref in some if ref[0] not in done and ledger.peek_resident(ref[0])]:
                    with ledger.held([id_ for id_, _ in rest]):
                        tried = await self._send(source, rest)
                    if not tried:
                        return False
                    lacking |= tried - self._there
                    done = self._there | lacking
        return not lacking

    async def drop(self, ids: Collection[ChunkId]) -> None:
        """See `Elsewhere.drop`."""
        due = self._perhaps_there.intersection(ids)
        if due:
            await self._drop(frozenset(due))
            self._there -= due
            self._perhaps_there -= due

    async def undo(self) -> None:
        """The user stays: nothing of it is there when this returns. Raises `Unavailable`."""
        if self._perhaps_there:
            await self._drop(None)

    def close(self) -> None:
        """What is there is the target's own now, or it has been undone."""
        self._from.tiers.copies.discard(self)

    def _here(self) -> Iterator[tuple[str, ChunkLedger, list[ChunkRef]]]:
        """Where the user's chunks are, but for tiers that the target sees, too."""
        tiers, owner = self._from.tiers, self._placement.user
        key = owner_key(owner)
        files = [tier for tier in tiers.files if tier.exclusive and not tier.ill]
        places = [(DEVICE, tiers.device, owner), (HOST, tiers.host, owner), *((t.url, t.ledger, key) for t in files)]
        taken: set[ChunkId] = set()
        for source, ledger, name in places:
            ids = [id_ for id_ in ledger.ids_of(name) if ledger.peek_resident(id_) and id_ not in taken]
            taken.update(ids)
            yield source, ledger, [(id_, ledger.tokens(id_)) for id_ in ids]

    async def _send(self, source: str, refs: Sequence[ChunkRef]) -> set[ChunkId]:
        """One transfer, of as many of these chunks as the target takes at once; which ones it took, or had."""
        async with self._from.turns.setdefault(self._target, asyncio.Lock()):
            line = self._from.lines.setdefault(self._target, uuid.uuid4().hex)
            load_per_s = self._from.rates.of(self._placement.user)
            about = (line, self._from.engine.model_digest, self._from.devices, tuple(refs), load_per_s)
            offer = OfferCall(uuid.uuid4().hex, self._placement, *about)
            async with self._from.tiers.moves.on_the_way([id_ for id_, _ in refs], PEER):
                self._perhaps_there.update(id_ for id_, _ in refs)
                try:
                    accepted = await self._ask(offer)
                    came = await self._over_line(source, offer, accepted) if accepted.chunks else {}
                except BaseException:
                    await self._hang_up(line)
                    raise
        done = {id_ for id_, outcome in came.items() if outcome is Outcome.DONE}
        self._there |= accepted.known | done
        self._count([tokens for id_, tokens in accepted.chunks if id_ in done])
        if Outcome.FAILED in came.values():
            await self._hang_up(line)
            raise Unavailable("The line to the other shard failed.")
        return {*accepted.known, *came}

    async def _over_line(self, source: str, offer: OfferCall, accepted: Accepted) -> dict[ChunkId, Outcome]:
        engine, fence = self._from.engine, fence_of(offer)
        if accepted.doors:
            await engine.dial(offer.line, accepted.doors, accepted.nccl)
        move = Move(source, PEER + offer.line, offer.digest, self._placement.user, accepted.chunks, fence)
        sending = asyncio.ensure_future(engine.move(move))
        try:
            return await self._ask(ArrivedCall(offer.request_id, self._placement))
        finally:  # what the target says counts; but the chunks are held until they are not read any more
            await asyncio.shield(asyncio.wait([sending]))
            sending.exception()

    def _count(self, tokens: Sequence[int]) -> None:
        size = sum(tokens) * self._from.engine.token_bytes
        self.sent_chunks += len(tokens)
        self.sent_bytes += size
        self._from.counters["sent_chunks"] += len(tokens)
        self._from.counters["sent_bytes"] += size

    async def _hang_up(self, line: str) -> None:
        """Nobody uses the line again."""
        self._from.counters["failed_transfers"] += 1
        if self._from.lines.get(self._target) == line:
            del self._from.lines[self._target]
        with suppress(EngineFailed):
            await self._from.engine.hang_up(line)

    async def _drop(self, ids: frozenset[ChunkId] | None) -> None:
        try:
            await self._ask(DropCopyCall(uuid.uuid4().hex, self._placement, ids))
        except ShardGone as gone:
            if not gone.details.get("certain"):
                raise Unavailable("A copy of the memory could not be deleted; try again.") from gone
        except WrongShard:
            return  # the user is another's by now, who knows what there is of it
        except MemshardError as error:
            raise Unavailable("A copy of the memory could not be deleted; try again.") from error

    async def _ask(self, call: MemoryCall[T]) -> T:
        return await self._shards.ask(self._target, call, ASK_S)


def fence_of(offer: OfferCall) -> str:
    """What both ends of a transfer were told: which it is, and under which epoch."""
    return f"{offer.request_id}:{offer.placement.epoch}"
