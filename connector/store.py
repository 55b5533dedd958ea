"""The chunks that a worker holds in memory, in bytes counted exactly. One store a tier; it decides nothing.

Which chunks to keep is decided in the shard's process (`ledger.py`); the store only refuses to go over its budget.
A chunk becomes visible when all of it is there, never before: its tokens were captured (`arrived`), or it was copied
from another tier as a whole (`publish`).

Imports torch only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from connector.chunk import Chunk, ChunkId, KVShape


class ChunkStore:
    """Complete chunks by id, and those whose tokens are still arriving.

    `budget_bytes` bounds both together. `pinned` memory of the host can be copied to a GPU without a detour;
    it was never made beside one.
    """

    def __init__(self, shape: KVShape, device: torch.device, budget_bytes: int, *, pinned: bool = False) -> None:
        self.shape = shape
        self.device = device
        self.budget_bytes = budget_bytes
        self.pinned = pinned
        self.bytes = 0
        self._chunks: dict[ChunkId, Chunk] = {}
        self._arriving: dict[ChunkId, tuple[Chunk, torch.Tensor]] = {}  # with a bool [tokens]: which came

    def __len__(self) -> int:
        return len(self._chunks)

    def get(self, id_: ChunkId) -> Chunk | None:
        """A complete chunk, or None."""
        return self._chunks.get(id_)

    def arriving(self, id_: ChunkId, tokens: int, position: int) -> torch.Tensor | None:
        """Room `[layers, parts, tokens, kv_heads, head_dim]` for a chunk that is being captured.

        None where the chunk is complete already or the budget leaves no room: then nothing is captured.
        """
        if id_ in self._chunks:
            return None
        if id_ not in self._arriving:
            size = tokens * self.shape.token_bytes
            if self.bytes + size > self.budget_bytes:
                return None
            kv = torch.empty(self.shape.of(tokens), dtype=self.shape.dtype, device=self.device, pin_memory=self.pinned)
            self._arriving[id_] = (Chunk(id_, position, kv), torch.zeros(tokens, dtype=torch.bool))
            self.bytes += size
        return self._arriving[id_][0].kv

    def arrived(self, id_: ChunkId, rows: torch.Tensor) -> None:
        """Marks tokens (int64 indices into the chunk) as captured in every layer; a complete chunk is published.

        A chunk that is not arriving is passed over: two requests of one step may have captured it.
        """
        if id_ not in self._arriving:
            return
        chunk, came = self._arriving[id_]
        came[rows] = True
        if bool(came.all()):
            del self._arriving[id_]
            self._chunks[id_] = chunk

    def publish(self, id_: ChunkId, position: int) -> None:
        """All of a chunk is in its room. One that was dropped meanwhile is passed over."""
        if (half := self._arriving.pop(id_, None)) is not None:
            self._chunks[id_] = replace(half[0], position=position)

    def settle(self, ids: Iterable[ChunkId]) -> set[ChunkId]:
        """After a capture's request ended: drops what stayed incomplete, returns the ids that are complete."""
        complete: set[ChunkId] = set()
        for id_ in ids:
            if id_ in self._chunks:
                complete.add(id_)
            elif (half := self._arriving.pop(id_, None)) is not None:
                self.bytes -= half[0].tokens * self.shape.token_bytes
        return complete

    def drop(self, ids: Iterable[ChunkId]) -> None:
        """Forgets chunks, arriving ones too; unknown ids are ignored."""
        for id_ in ids:
            half = self._arriving.pop(id_, None)
            chunk = half[0] if half is not None else self._chunks.pop(id_, None)
            if chunk is not None:
                self.bytes -= chunk.tokens * self.shape.token_bytes

    def check_integrity(self) -> None:
        """Raises AssertionError where the counted bytes are not the bytes held, or exceed the budget."""
        chunks = [*self._chunks.values(), *(chunk for chunk, _ in self._arriving.values())]
        held = sum(chunk.kv.numel() * chunk.kv.element_size() for chunk in chunks)
        assert held == self.bytes <= self.budget_bytes, (held, self.bytes, self.budget_bytes)
