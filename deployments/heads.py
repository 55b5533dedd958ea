"""Prompts' heads as chunks: everything that stands before the memory, the same for all users of a system prompt.

A head is encoded once, at position 0, where it is always served: injecting it is exact. A system prompt that was never
seen before is served as text, memory included, and encoded in the background.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from connector.chunk import ChunkId, chunk_id
from connector.ledger import SHARED, ChunkLedger
from connector.metadata import CaptureRange
from connector.plan import Piece
from connector.windows import EncodeJob
from deployments.encoder import Encoder

HEADS_KEPT = 64


class Heads:
    """The heads seen last, at most `HEADS_KEPT`."""

    def __init__(self, model_digest: str, encoder: Encoder, ledger: ChunkLedger) -> None:
        self._digest = model_digest
        self._encoder = encoder
        self._ledger = ledger
        self._pieces: OrderedDict[ChunkId, Piece] = OrderedDict()  # least recently used first

    async def piece(self, token_ids: Sequence[int]) -> Piece:
        """The head as a piece of prompt; on first sight its encoding is begun."""
        id_ = chunk_id(self._digest, SHARED, (), token_ids)
        known = self._pieces.get(id_)
        if known is not None:
            self._pieces.move_to_end(id_)
            return known
        piece = self._pieces[id_] = Piece(tuple(token_ids), id_)
        await self._encoder.submit(SHARED, self._jobs)
        if len(self._pieces) > HEADS_KEPT:
            oldest, _ = self._pieces.popitem(last=False)
            await self._encoder.forget([oldest])
        return piece

    async def encoded(self) -> None:
        """Returns when every head seen so far was encoded, or could not be."""
        await self._encoder.settled(SHARED)

    def _jobs(self) -> Iterator[EncodeJob]:
        for id_, piece in list(self._pieces.items()):
            if not self._ledger.peek_resident(id_):
                yield EncodeJob(piece.token_ids, (CaptureRange(id_, 0, len(piece.token_ids)),))
