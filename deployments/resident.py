"""What a shard knows of one user beside the facts themselves: embeddings being made, chunks being made.

Lives exactly as long as the `UserMemory` it belongs to.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from connector.plan import Piece
from connector.reason import Reason
from connector.template import PromptTemplate
from connector.tiers import Tiers
from connector.windows import FactChunks, Line
from deployments.encoder import Encoder
from deployments.memory_calls import Rebuilt
from deployments.ports import Embeds
from deployments.telemetry import step
from sharding.errors import EngineFailed, Unavailable, WrongShard
from sharding.facts import Fact, FactStore
from sharding.ids import FactId, UserId
from sharding.user_memory import UserMemory

SPARE_S = 60.0
"""Who was active so lately loses no chunks to those that a chat misses: where the budget is too small for everybody who
is active, some are served as text, instead of each evicting the others with each chat."""

LOAD_DEADLINE_S = 0.5
"""How long a chat waits for chunks to come from a lower tier before they are served as text."""


class Residents:
    """Keeps embeddings and chunks in step with the facts of every resident user."""

    def __init__(
        self,
        store: FactStore,
        embedder: Embeds,
        encoder: Encoder,
        tiers: Tiers,
        template: PromptTemplate,
        *,
        model_digest: str,
        window_facts: int,
        room_tokens: int,
        load_deadline_s: float = LOAD_DEADLINE_S,
        keep_stale: bool = False,
    ) -> None:
        self._store = store
        self._embedder = embedder
        self._encoder = encoder
        self._tiers = tiers
        self._template = template
        self._model_digest = model_digest
        self._head = template.default_head()
        self._window_facts = window_facts
        self._room_tokens = room_tokens
        self._load_deadline_s = load_deadline_s
        self._keep_stale = keep_stale
        self._chunks: WeakKeyDictionary[UserMemory, FactChunks] = WeakKeyDictionary()
        self._lines: WeakKeyDictionary[UserMemory, dict[FactId, tuple[str, Line]]] = WeakKeyDictionary()
        self._indexing: WeakKeyDictionary[UserMemory, asyncio.Lock] = WeakKeyDictionary()

    async def changed(self, memory: UserMemory) -> None:
        """The facts changed. When this returns, chunks that stand for no fact are gone everywhere on this shard; new
        ones come in the background, and what is stale with the next rebuild. Raises `EngineFailed` or `Unavailable`
        where the workers or a file system did not confirm that they are gone."""
        user = memory.placement.user
        if memory not in self._chunks:
            await self._tiers.adopt(user)
        lines = self._lines.setdefault(memory, {})
        current = memory.current()
        # Nothing is awaited before the chunks know the facts: a chat may have found them already.
        lines |= self._lines_of(self._unread(memory, current))
        for gone in lines.keys() - {fact.id for fact in current}:
            del lines[gone]
        chunks = self._chunks.get(memory)
        if chunks is None:
            chunks = self._chunks[memory] = self._no_chunks(user)
        chunks.update([lines[fact.id][1] for fact in current])
        chunks.settle(self._tiers.peek_held)
        await self._encoder.submit(user, chunks)
        await self._forget_others(user, chunks)

    async def _forget_others(self, user: UserId, chunks: FactChunks) -> None:
        standing = chunks.standing()
        await self._encoder.forget([id_ for id_ in self._tiers.ids_of(user) if id_ not in standing])

    async def rebuild(self, memory: UserMemory) -> Rebuilt:
        """Encodes anew what corrections left stale, as far as there is room. Raises what `changed` raises."""
        chunks, user = self._chunks.get(memory), memory.placement.user
        if chunks is None or not chunks.stale_facts:
            return Rebuilt(0, 0, 0 if chunks is None else chunks.full_tokens)
        facts, full = chunks.stale_facts, chunks.full_tokens
        chunks.renew(uuid.uuid4().hex)
        tokens = sum(len(job.token_ids) for job in chunks.jobs(self._tiers.peek_held))
        await self._encoder.submit(user, chunks)
        await self._encoder.settled(user)
        chunks.settle(self._tiers.peek_held)
        await self._forget_others(user, chunks)
        return Rebuilt(facts - chunks.stale_facts, tokens, full)

    def chunks_of(self, memory: UserMemory) -> FactChunks | None:
        """What is known of the user's chunks; None before the first touch."""
        return self._chunks.get(memory)

    async def read(self, memory: UserMemory, facts: Sequence[Fact]) -> None:
        """Tokenises facts beside the event loop, so that `changed` need not on it."""
        if unread := self._unread(memory, facts):
            self._lines.setdefault(memory, {}).update(await asyncio.to_thread(self._lines_of, unread))

    async def added(self, memory: UserMemory) -> None:
        """As `changed`, where no fact was deleted: nobody is told that anything is gone, so nothing is waited for."""
        with suppress(EngineFailed, Unavailable):  # what was not confirmed is dropped later, and served no more
            await self.changed(memory)

    async def ready(self, memory: UserMemory) -> FactChunks:
        """The user's chunks, set up on first touch; every fact is in the index when this returns. Chunks of facts whose
        last day has passed are dropped, with those that were encoded behind them.

        Chunks that are in no tier are encoded again in the background, and those in a lower one brought to the device,
        where nobody who is active has to give theirs.
        """
        if memory not in self._chunks:
            await self.read(memory, memory.current())
        if memory not in self._chunks or memory.expired() & self._lines[memory].keys():
            await self.added(memory)
        await self.index(memory)
        chunks, user = self._chunks[memory], memory.placement.user
        lost = partial(self._encode_missing, user, chunks)
        serving = chunks.serving(self._tiers.peek_held)
        self._tiers.prefetch(user, serving[::-1], spare_s=SPARE_S, lost=lost)
        await lost()
        return chunks

    async def fetch(self, memory: UserMemory, facts: Sequence[Fact]) -> bool:
        """Brings the chunks of these facts (nearest first) to the device, as far as that can be done in time. False
        where none was in a lower tier, and nothing was waited for."""
        chunks, user = self._chunks[memory], memory.placement.user
        served = (chunks.served(fact.id, self._tiers.peek_held) for fact in reversed(facts))
        ids = [id_ for id_ in served if id_ is not None]
        if not self._tiers.peek_below(ids):
            return False
        await self._tiers.promote(user, ids, deadline_s=self._load_deadline_s)
        await self._encode_missing(user, chunks)  # a file may have turned out to be damaged
        return True

    async def _encode_missing(self, user: UserId, chunks: FactChunks) -> None:
        if self._encoder.idle(user) and chunks.lacks(self._tiers.peek_held):
            await self._encoder.submit(user, chunks, spare_s=SPARE_S)

    async def left(self, user: UserId) -> None:
        """The user is another shard's now. Raises `EngineFailed` where the workers did not confirm that the chunks are
        gone, `Unavailable` where a file system did not; they are dropped later then."""
        self._encoder.salts.renew(user)
        await self._encoder.submit(user, self._no_chunks(user))
        self._tiers.release(user)
        await self._encoder.forget(sorted(self._tiers.ids_of(user)))
        await self._tiers.purge(user, shared=False)

    async def gone(self, user: UserId) -> None:
        """Nothing of a user is kept any more who is not resident: nor are chunks, or files. Raises as `left` does."""
        await self.left(user)
        await self._tiers.purge(user)

    async def purge(self, memory: UserMemory) -> None:
        """After `changed`, where something was deleted: nor is there a file of it that no ledger counts, and no prompt
        meets what vLLM's prefix cache has of it. Raises `Unavailable`."""
        self._encoder.salts.renew(memory.placement.user)
        await self._tiers.purge(memory.placement.user)

    async def index(self, memory: UserMemory) -> None:
        """Embeds and indexes the facts that are not, once at a time for a user."""
        if not memory.facts_without_embedding():
            return
        async with self.indexing(memory):
            pending = memory.facts_without_embedding()
            if not pending:
                return
            with step("remember", "embed"):
                vectors = await self._embedder.embed([fact.text for fact in pending])
            embeddings = {fact.id: self._stored(vector) for fact, vector in zip(pending, vectors, strict=True)}
            memory.put_embeddings(embeddings)
            with suppress(Unavailable, WrongShard):  # derived: whoever loads this user next computes them again
                await self._store.put_embeddings(memory.placement, embeddings)

    def indexing(self, memory: UserMemory) -> asyncio.Lock:
        """Held while facts are embedded and indexed: who changes a fact's text takes it, or the vector of the old text
        could come last."""
        return self._indexing.setdefault(memory, asyncio.Lock())

    async def embedding(self, text: str) -> bytes:
        """The embedding of a text, as it is kept in Redis."""
        return self._stored((await self._embedder.embed([text]))[0])

    def _stored(self, vector: NDArray[np.float32]) -> bytes:
        return self._embedder.model + vector.tobytes()

    def encoded(self, memory: UserMemory, fact: FactId) -> bool:
        """Whether the fact is a chunk, in whatever tier, be it a stale one."""
        chunks = self._chunks.get(memory)
        if chunks is None or fact not in self._lines[memory]:
            return False
        id_ = chunks.served(fact, self._tiers.peek_held)
        return id_ is not None and self._tiers.peek_held(id_)

    def fact(self, chunks: FactChunks, fact: FactId) -> Piece:
        """The fact as it can be served now, from a stale chunk while its own is not there."""
        return self.servable(Piece(chunks.piece(fact).token_ids, chunks.served(fact, self._tiers.peek_held)))

    def correction(self, fact: Fact, phrasing: str) -> Piece:
        """A corrected fact as text that takes the place of what others tell of it."""
        return Piece(tuple(self._template.fact(phrasing.format(fact.text))))

    def cached_as(self, user: str) -> str:
        """The name that the user's prompts are cached under now."""
        return self._encoder.salts.name(user)

    def servable(self, piece: Piece) -> Piece:
        """The piece as it can be served now: where its chunk is not on the device, without it and with the reason."""
        id_ = piece.chunk
        if id_ is not None and self._tiers.device.peek_resident(id_):
            return piece
        if id_ is not None and self._tiers.peek_held(id_):
            return Piece(piece.token_ids, unready=Reason.LATE)
        evicted = id_ is not None and self._tiers.device.was_evicted(id_)
        return Piece(piece.token_ids, unready=Reason.EVICTED if evicted else Reason.NOT_ENCODED)

    def _unread(self, memory: UserMemory, facts: Iterable[Fact]) -> list[Fact]:
        known = self._lines.get(memory, {})
        return [fact for fact in facts if fact.id not in known or known[fact.id][0] != fact.text]

    def _lines_of(self, facts: Iterable[Fact]) -> dict[FactId, tuple[str, Line]]:
        return {fact.id: (fact.text, Line(fact.id, fact.seq, tuple(self._template.fact(fact.text)))) for fact in facts}

    def _no_chunks(self, user: UserId) -> FactChunks:
        return FactChunks(
            user,
            self._model_digest,
            self._head,
            window_facts=self._window_facts,
            room_tokens=self._room_tokens,
            keep_stale=self._keep_stale,
        )
