"""Plain paged caches as vLLM's CUDA backends see them, and a composition that writes them by indexing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from connector.chunk import Chunk, ChunkId, KVShape
from connector.compose import Composition, compose
from connector.paged import paged_views
from connector.rotation import Rotation


def caches(
    shape: KVShape, blocks: int, block_tokens: int, *, heads_first: bool = True, device: str = "cpu"
) -> list[torch.Tensor]:
    """Zeros, `[blocks, kv_heads, block_tokens, 2 * head_dim]` a layer; `heads_first` in memory, too, or tokens."""
    size = (blocks, shape.kv_heads, block_tokens, 2 * shape.head_dim)
    if heads_first:
        return [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(shape.layers)]
    by_token = (size[0], size[2], size[1], size[3])
    return [torch.zeros(by_token, dtype=shape.dtype, device=device).transpose(1, 2) for _ in range(shape.layers)]


def by_index(shape: KVShape, of: Sequence[torch.Tensor], rotations: Sequence[Rotation]) -> Composition:
    """The portable composition, writing by plain indexing."""
    all_keys, all_values = paged_views(shape, of)

    def composition(chunks: Sequence[Chunk], slots: torch.Tensor, skip: int) -> None:
        def write(layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
            block_tokens = all_keys[layer].shape[1]
            all_keys[layer][slots // block_tokens, slots % block_tokens] = keys
            all_values[layer][slots // block_tokens, slots % block_tokens] = values

        compose(chunks, rotations, write, skip=skip, stop=skip + len(slots))

    return composition


def random_chunks(
    shape: KVShape, lengths_and_positions: Sequence[tuple[int, int]], seed: int = 0, device: str = "cpu"
) -> list[Chunk]:
    generator = torch.Generator().manual_seed(seed)
    chunks = []
    for number, (length, position) in enumerate(lengths_and_positions):
        kv = torch.randn(shape.layers, 2, length, shape.kv_heads, shape.head_dim, generator=generator)
        chunks.append(Chunk(ChunkId(str(number)), position, kv.to(shape.dtype).to(device)))
    return chunks
