"""From chunks to what a paged cache wants: few gathers for all layers, then per layer one rotation and one write.

    chunks         [layers, parts, tokens_c, kv_heads, head_dim] each, keys rotated at their own positions
      gather  ->   [group, parts, T, kv_heads, head_dim]     one concatenation a group of layers
      layer l ->   keys   [T, kv_heads, head_dim]            rotated in place to where they are served
                   values [T, kv_heads, head_dim]            as they are
      write(l, keys, values)                                 the backend's own cache update

Imports torch only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from connector.chunk import Chunk
from connector.rotation import RotateKeys, Rotation, rotate_keys

GATHER_BYTES = 8 << 20
"""What is gathered at once, but at least one layer: one buffer that every group of layers is gathered into.

All layers of a long memory at once would be tens of megabytes of fresh pages on each request, and faulting them in cost
a third of the whole composition on a CPU.
"""

WriteLayer = Callable[[int, torch.Tensor, torch.Tensor], None]
"""`(layer, keys, values)`, each `[tokens, kv_heads, head_dim]`, contiguous, used again once this returns. Where a chunk
has one part only, both are that part."""


class Composition(Protocol):
    """Lays `chunks` out one behind another from position 0 on and writes positions `skip`, `skip + 1`, … into `slots`
    (int64 `[tokens]`, on the caches' device) of every layer's paged cache. The chunks hold that many tokens."""

    def __call__(self, chunks: Sequence[Chunk], slots: torch.Tensor, skip: int) -> None: ...


def compose(
    chunks: Sequence[Chunk],
    rotations: Sequence[Rotation],
    write: WriteLayer,
    *,
    skip: int = 0,
    stop: int | None = None,
    rotate: RotateKeys = rotate_keys,
) -> int:
    """Lays the chunks out one behind another from position 0 on and writes positions `skip` up to `stop`.

    `rotations` has one for each layer, all of one `first`. Tokens that are served where they were encoded are copied
    bit for bit. Returns the number of tokens written.
    """
    end = sum(chunk.tokens for chunk in chunks) if stop is None else stop
    if end <= skip:
        return 0
    parts, distances = _parts(chunks, skip, end)
    moved = bool(distances.any())
    lengths = torch.tensor([part.shape[2] for part in parts])
    layers, kinds, _, heads, dim = parts[0].shape
    group = max(1, GATHER_BYTES // (kinds * (end - skip) * heads * dim * parts[0].element_size()))
    gathered = parts[0].new_empty((min(group, layers), kinds, end - skip, heads, dim))
    distinct = {id(rotation): rotation for rotation in rotations} if moved else {}
    tables = {
        id_: rotation.table(distances).repeat_interleave(lengths, dim=0).to(gathered.device)
        for id_, rotation in distinct.items()
    }
    for layer, rotation in enumerate(rotations):
        place = layer % group
        if place == 0:
            last = min(layer + group, layers)
            torch.cat([part[layer:last] for part in parts], dim=2, out=gathered[: last - layer])
        keys, values = gathered[place, 0], gathered[place, -1]
        if moved:
            rotate(keys[..., rotation.first :], tables[id(rotation)], rotation.neox)
        write(layer, keys, values)
    return end - skip


def _parts(chunks: Sequence[Chunk], skip: int, stop: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The chunks' tokens from `skip` up to `stop` as views, and int64 `[parts]` distances: by how many positions each
    part's tokens move from where they were encoded to where they are served.
    """
    parts: list[torch.Tensor] = []
    distances: list[int] = []
    start = 0
    for chunk in chunks:
        first, last = max(skip - start, 0), min(stop - start, chunk.tokens)
        if first < last:
            parts.append(chunk.kv[:, :, first:last])
            distances.append(start - chunk.position)
        start += chunk.tokens
    return parts, torch.tensor(distances, dtype=torch.int64)
