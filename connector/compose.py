"""From chunks to what a paged cache wants: one gather for all layers, then per layer one rotation and one write.

    chunks         [tokens_c, layers, 2, kv_heads, head_dim] each, keys rotated at their own positions
      gather  ->   [T, layers, 2, kv_heads, head_dim]        one concatenation, all layers at once
      layer l ->   keys   [T, kv_heads, head_dim]            rotated in float32 to where they are served
                   values [T, kv_heads, head_dim]            as they are
      write(l, keys, values)                                 the backend's own cache update

Imports torch only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from connector.chunk import Chunk
from connector.rotation import RotateKeys, Rotation, rotate_keys

WriteLayer = Callable[[int, torch.Tensor, torch.Tensor], None]
"""`(layer, keys, values)`, each `[tokens, kv_heads, head_dim]`, contiguous, reused for the next layer."""


def compose(
    chunks: Sequence[Chunk],
    rotation: Rotation,
    write: WriteLayer,
    *,
    skip: int = 0,
    stop: int | None = None,
    rotate: RotateKeys = rotate_keys,
) -> int:
    """Lays the chunks out one behind another from position 0 on and writes positions `skip` up to `stop`.

    Tokens that are served where they were encoded are copied bit for bit. Returns the number of tokens written.
    """
    gathered, distances = gather(chunks, skip, stop)
    tokens = int(gathered.shape[0])
    if tokens == 0:
        return 0
    moved = bool(distances.any())
    table = rotation.table(distances).to(gathered.device) if moved else None
    layers = gathered.shape[1]
    keys, values = torch.empty_like(gathered[:, 0, 0]), torch.empty_like(gathered[:, 0, 1])
    keys32 = torch.empty_like(keys, dtype=torch.float32) if moved else None
    for layer in range(layers):
        if keys32 is not None and table is not None:
            keys32.copy_(gathered[:, layer, 0])
            rotate(keys32, table, rotation.neox)
            keys.copy_(keys32)
        else:
            keys.copy_(gathered[:, layer, 0])
        values.copy_(gathered[:, layer, 1])
        write(layer, keys, values)
    return tokens


def gather(chunks: Sequence[Chunk], skip: int, stop: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The chunks' tokens from `skip` up to `stop` in one tensor `[T, layers, 2, kv_heads, head_dim]`, and int64 `[T]`
    distances: by how many positions each token moves from where it was encoded to where it is served.
    """
    pieces: list[torch.Tensor] = []
    distances: list[torch.Tensor] = []
    start = 0
    end = sum(chunk.tokens for chunk in chunks) if stop is None else stop
    for chunk in chunks:
        first, last = max(skip - start, 0), min(end - start, chunk.tokens)
        if first < last:
            pieces.append(chunk.kv[first:last])
            distances.append(torch.full((last - first,), start - chunk.position, dtype=torch.int64))
        start += chunk.tokens
    if not pieces:
        empty = chunks[0].kv[:0] if chunks else torch.empty(0)
        return empty, torch.empty(0, dtype=torch.int64)
    return torch.cat(pieces), torch.cat(distances)
