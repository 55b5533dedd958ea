"""Prompts' heads as chunks: everything that stands before the memory, the same for all users of a system prompt.

A head is encoded once, at position 0, where it is always served: injecting it is exact. Until then the prompt is served
as text, memory included.

A head is encoded when it is seen for the second time: a system prompt with the time of day in it is a new one with each
request, and would cost a prefill and a place for nothing. The default head is encoded at once. How many heads are kept
is the ledger's matter; one that it evicted is encoded again when it is seen again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

from connector.chunk import CaptureRange, ChunkId, chunk_id
from connector.ledger import SHARED, ChunkLedger
from connector.plan import Piece
from connector.windows import EncodeJob
from deployments.encoder import Encoder

HEADS_REMEMBERED = 1024
"""Heads whose first sight is remembered: ids only."""

HEADS_WAITING = 64


class Heads:
    """Names heads, and has those encoded that come again."""

    def __init__(self, model_digest: str, encoder: Encoder, ledger: ChunkLedger, default_head: Sequence[int]) -> None:
        self._digest = model_digest
        self._encoder = encoder
        self._ledger = ledger
        self._default = self._name(default_head)
        self._seen: OrderedDict[ChunkId, None] = OrderedDict()  # least recently seen first
        self._waiting: OrderedDict[ChunkId, Piece] = OrderedDict()  # the one that is encoded now included

    async def piece(self, token_ids: Sequence[int]) -> Piece:
        """The head as a piece of prompt; where it has no chunk and is worth one, its encoding is begun."""
        id_ = self._name(token_ids)
        piece = Piece(tuple(token_ids), id_)
        if self._ledger.peek_resident(id_) or not self._comes_again(id_):
            return piece
        if id_ not in self._waiting or self._encoder.idle(SHARED):  # idle: the encoding of it failed
            self._waiting[id_] = piece
            if len(self._waiting) > HEADS_WAITING:
                self._waiting.popitem(last=False)
            await self._encoder.submit(SHARED, self)
        return piece

    async def encoded(self) -> None:
        """Returns when every head that was to be encoded is, or could not be."""
        await self._encoder.settled(SHARED)

    def ids(self) -> Iterable[ChunkId]:
        """See `encoder.Wishes`."""
        return list(self._waiting)

    def jobs(self, resident: Callable[[ChunkId], bool]) -> Iterator[EncodeJob]:
        """See `encoder.Wishes`. What was tried waits no longer, unless encoding ended with it."""
        for id_, piece in list(self._waiting.items()):
            if not resident(id_):
                yield EncodeJob(piece.token_ids, (CaptureRange(id_, 0, len(piece.token_ids)),))
            self._waiting.pop(id_, None)

    def _comes_again(self, id_: ChunkId) -> bool:
        again = id_ in self._seen or id_ == self._default
        self._seen[id_] = None
        self._seen.move_to_end(id_)
        if len(self._seen) > HEADS_REMEMBERED:
            self._seen.popitem(last=False)
        return again

    def _name(self, token_ids: Sequence[int]) -> ChunkId:
        return chunk_id(self._digest, SHARED, (), token_ids)
