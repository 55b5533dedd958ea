"""What a shard knows of one user beside the facts themselves: embeddings being made, chunks being made.

Lives exactly as long as the `UserMemory` it belongs to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from connector.ledger import ChunkLedger
from connector.memory_counts import Reason
from connector.plan import Piece
from connector.template import PromptTemplate
from connector.windows import FactChunks, Line
from deployments.encoder import Encoder
from deployments.ports import Embeds
from deployments.telemetry import step
from sharding.errors import EngineFailed, Unavailable, WrongShard
from sharding.facts import Fact, FactStore
from sharding.ids import FactId, UserId
from sharding.user_memory import UserMemory

SPARE_S = 60.0
"""Who was active so lately loses no chunks to those that a chat misses: where the budget is too small for everybody who
is active, some are served as text, instead of each evicting the others with each chat."""


class Residents:
    """Keeps embeddings and chunks in step with the facts of every resident user."""

    def __init__(
        self,
        store: FactStore,
        embedder: Embeds,
        encoder: Encoder,
        ledger: ChunkLedger,
        template: PromptTemplate,
        *,
        model_digest: str,
        window_facts: int,
        room_tokens: int,
    ) -> None:
        self._store = store
        self._embedder = embedder
        self._encoder = encoder
        self._ledger = ledger
        self._template = template
        self._model_digest = model_digest
        self._head = template.default_head()
        self._window_facts = window_facts
        self._room_tokens = room_tokens
        self._chunks: WeakKeyDictionary[UserMemory, FactChunks] = WeakKeyDictionary()
        self._lines: WeakKeyDictionary[UserMemory, dict[FactId, tuple[str, Line]]] = WeakKeyDictionary()
        self._indexing: WeakKeyDictionary[UserMemory, asyncio.Lock] = WeakKeyDictionary()

    async def changed(self, memory: UserMemory) -> None:
        """The facts changed. When this returns, chunks that stand for no fact are gone everywhere on this shard; new
        ones come in the background. Raises `EngineFailed` where the workers did not confirm that they are gone."""
        user = memory.placement.user
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
        await self._encoder.submit(user, chunks)
        wanted = set(chunks.ids())
        await self._encoder.forget([id_ for id_ in self._ledger.ids_of(user) if id_ not in wanted])

    async def read(self, memory: UserMemory, facts: Sequence[Fact]) -> None:
        """Tokenises facts beside the event loop, so that `changed` need not on it."""
        if unread := self._unread(memory, facts):
            self._lines.setdefault(memory, {}).update(await asyncio.to_thread(self._lines_of, unread))

    async def added(self, memory: UserMemory) -> None:
        """As `changed`, where no fact was deleted: nobody is told that anything is gone, so nothing is waited for."""
        with suppress(EngineFailed):  # what the workers did not confirm is dropped later, and served no more
            await self.changed(memory)

    async def ready(self, memory: UserMemory) -> FactChunks:
        """The user's chunks, set up on first touch; every fact is in the index when this returns. Chunks of facts whose
        last day has passed are dropped, with those that were encoded behind them.

        Chunks that are missing (evicted for another user, say) are encoded again in the background, where nobody who is
        active has to give theirs.
        """
        if memory not in self._chunks:
            await self.read(memory, memory.current())
        if memory not in self._chunks or memory.expired() & self._lines[memory].keys():
            await self.added(memory)
        await self.index(memory)
        chunks, user = self._chunks[memory], memory.placement.user
        if self._encoder.idle(user) and not all(map(self._ledger.peek_resident, chunks.ids())):
            await self._encoder.submit(user, chunks, spare_s=SPARE_S)
        return chunks

    async def left(self, user: UserId) -> None:
        """The user is another shard's now. Raises `EngineFailed` where the workers did not confirm that the chunks are
        gone; they are dropped later then."""
        await self._encoder.submit(user, self._no_chunks(user))
        await self._encoder.forget(self._ledger.ids_of(user))

    async def index(self, memory: UserMemory) -> None:
        """Embeds and indexes the facts that are not, once at a time for a user."""
        if not memory.facts_without_embedding():
            return
        async with self._indexing.setdefault(memory, asyncio.Lock()):
            pending = memory.facts_without_embedding()
            if not pending:
                return
            with step("remember", "embed"):
                vectors = await self._embedder.embed([fact.text for fact in pending])
            embeddings = {fact.id: self._stored(vector) for fact, vector in zip(pending, vectors, strict=True)}
            memory.put_embeddings(embeddings)
            with suppress(Unavailable, WrongShard):  # derived: whoever loads this user next computes them again
                await self._store.put_embeddings(memory.placement, embeddings)

    async def embedding(self, text: str) -> bytes:
        """The embedding of a text, as it is kept in Redis."""
        return self._stored((await self._embedder.embed([text]))[0])

    def _stored(self, vector: NDArray[np.float32]) -> bytes:
        return self._embedder.model + vector.tobytes()

    def encoded(self, memory: UserMemory, fact: FactId) -> bool:
        """Whether the fact can be injected now."""
        chunks = self._chunks.get(memory)
        return chunks is not None and fact in self._lines[memory] and self._is_resident(chunks.piece(fact))

    def servable(self, piece: Piece) -> Piece:
        """The piece as it can be served now: without its chunk, where that is not here, but with the reason."""
        if self._is_resident(piece):
            return piece
        evicted = piece.chunk is not None and self._ledger.was_evicted(piece.chunk)
        return Piece(piece.token_ids, unready=Reason.EVICTED if evicted else Reason.NOT_ENCODED)

    def _unread(self, memory: UserMemory, facts: Iterable[Fact]) -> list[Fact]:
        known = self._lines.get(memory, {})
        return [fact for fact in facts if fact.id not in known or known[fact.id][0] != fact.text]

    def _lines_of(self, facts: Iterable[Fact]) -> dict[FactId, tuple[str, Line]]:
        return {fact.id: (fact.text, Line(fact.id, fact.seq, tuple(self._template.fact(fact.text)))) for fact in facts}

    def _no_chunks(self, user: UserId) -> FactChunks:
        return FactChunks(
            user, self._model_digest, self._head, window_facts=self._window_facts, room_tokens=self._room_tokens
        )

    def _is_resident(self, piece: Piece) -> bool:
        return piece.chunk is not None and self._ledger.peek_resident(piece.chunk)
