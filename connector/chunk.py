"""What a chunk is: one piece of prompt (a fact, or the prompt's head) as keys and values, and how it is named.

A chunk's id is a digest of everything its bytes depend on: the model, the tokens that stood before it while it
was encoded, and its own tokens. A fact whose text or window changed therefore has another id, and old bytes can
never be found under it. The owner is part of the id too: equal facts of two users are two chunks.

Imports nothing heavy: whoever only names chunks need not load torch.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    import torch

ChunkId = NewType("ChunkId", str)
"""32 hexadecimal digits."""

ChunkRef = tuple[ChunkId, int]
"""A chunk and its length in tokens: all that crosses process borders."""


@dataclass(frozen=True, slots=True)
class CaptureRange:
    """Tokens `start` to `start + tokens` of a prompt become a chunk, encoded at position `start`."""

    id: ChunkId
    start: int
    tokens: int


@dataclass(frozen=True, slots=True)
class KVShape:
    """The keys and values of one token on one worker: `layers`, `parts`, `kv_heads` (its own), `head_dim`.

    `parts` is 2, keys and values, or 1 for multi-head latent attention, whose one row is both (`cache_update.py`). Of a
    key's elements only those from `rotated_from` on are ever rotated.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    parts: int = 2
    rotated_from: int = 0

    @property
    def token_bytes(self) -> int:
        """Bytes that one token's keys and values take."""
        return self.layers * self.parts * self.kv_heads * self.head_dim * int(self.dtype.itemsize)

    def of(self, tokens: int) -> tuple[int, int, int, int, int]:
        """The shape of a chunk's `kv`."""
        return self.layers, self.parts, tokens, self.kv_heads, self.head_dim


@dataclass(frozen=True, slots=True)
class Chunk:
    """`kv` is `[layers, parts, tokens, kv_heads, head_dim]`, contiguous, in the model's dtype.

    Keys are as the model cached them: rotated at `position + i` for token i. Values carry no position. Layers come
    first because a paged cache is written layer by layer: a composition's layer is then contiguous as it is gathered.
    """

    id: ChunkId
    position: int  # of the first token, in tokens from the start of the prompt it was encoded in
    kv: torch.Tensor

    @property
    def tokens(self) -> int:
        return int(self.kv.shape[2])


def chunk_id(model_digest: str, owner: str, prefix: Sequence[int], tokens: Sequence[int]) -> ChunkId:
    """The id of `tokens` encoded right behind `prefix` (head and window) for `owner` ("" for a shared head)."""
    state = hashlib.blake2b(digest_size=16)
    for part in (model_digest.encode(), owner.encode(), array("q", prefix).tobytes(), array("q", tokens).tobytes()):
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return ChunkId(state.hexdigest())


def memory_salt(owner: str, chunks: Sequence[ChunkRef]) -> str:
    """vLLM's `cache_salt` for a prompt that starts with these injected chunks.

    The composition's blocks live in the prefix cache under this salt alone, so that the same tokens sent as plain
    text, by anybody, never meet them, while the same composition hits natively the second time.
    """
    state = hashlib.blake2b(digest_size=16, person=b"memshard-inject")
    state.update(owner.encode() + b"\0" + ",".join(id_ for id_, _ in chunks).encode())
    return state.hexdigest()


def text_salt(owner: str) -> str:
    """vLLM's `cache_salt` for everything of `owner` that is computed exactly from text."""
    return hashlib.blake2b(owner.encode(), digest_size=16, person=b"memshard-text").hexdigest()
