"""Which composition a worker uses: the portable one, or a faster one that a start-up proof has shown to write the same.

Backends of vLLM 0.32 for CUDA (flash_attn, triton_attn, flashinfer, flex_attention) all see a layer's cache as
`[blocks, kv_heads, block_tokens, 2 * head_dim]`, keys in the first half, by strides that differ. Others see the same
shape and pack it otherwise, so the shape proves nothing: both compositions write into the engine's own caches, before
anything is served from them, and must leave the same behind. The layout for CPUs with AMX has a composition of its own
(`fused_cpu.py`). Imports torch only, Triton where there is a GPU, else Numba.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from connector.chunk import Chunk, ChunkId, KVShape
from connector.compose import Composition
from connector.rotation import Rotation

log = logging.getLogger(__name__)

PROOF_BLOCKS = 2


def fastest(
    portable: Composition, shape: KVShape, caches: Sequence[torch.Tensor], rotations: Sequence[Rotation]
) -> Composition:
    """A fused composition where there is one for the caches' device and it writes them as `portable` does."""
    try:
        fused = _fused(shape, caches, rotations)
        if writes_alike(portable, fused, shape, caches):
            return fused
        log.warning("The fused composition does not write this backend's cache as the backend does; it is not used")
    except ValueError as unfit:
        log.info("The fused composition is not used: %s", unfit)
    except Exception:  # no Triton or Numba, or a kernel that does not compile: slower, and right
        log.warning("The fused composition cannot be used", exc_info=True)
    return portable


def _fused(shape: KVShape, caches: Sequence[torch.Tensor], rotations: Sequence[Rotation]) -> Composition:
    """Raises ValueError where none can write these caches."""
    if caches[0].device.type == "cuda":
        from connector.fused import FusedComposition

        return FusedComposition(shape, *paged_views(shape, caches), rotations)
    if not torch.cpu._is_amx_tile_supported():
        raise ValueError("this CPU has no matrix tiles, and its backend another layout")
    from connector.fused_cpu import FusedCPUComposition

    return FusedCPUComposition(shape, caches, rotations)


def paged_views(shape: KVShape, caches: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Each layer's keys and values as `[blocks, block_tokens, kv_heads, head_dim]`. Raises ValueError for caches of
    another shape."""
    keys, values = [], []
    for cache in caches:
        if cache.dim() != 4 or (cache.shape[1], cache.shape[3]) != (shape.kv_heads, 2 * shape.head_dim):
            raise ValueError(f"a cache of {tuple(cache.shape)} is not one of blocks, heads, tokens, keys and values")
        by_slot = cache.transpose(1, 2).split(shape.head_dim, dim=-1)
        keys.append(by_slot[0])
        values.append(by_slot[1])
    return keys, values


@torch.inference_mode()  # type: ignore[untyped-decorator]  # the engine's caches were made in it
def writes_alike(trusted: Composition, other: Composition, shape: KVShape, caches: Sequence[torch.Tensor]) -> bool:
    """Whether both leave the same in the last blocks of `caches` `[blocks, kv_heads, block_tokens, ...]`, but for one
    rounding of a key; the blocks are as they were afterwards.

    The chunks start and end within blocks, stay or move, and go into blocks that do not follow each other.
    """
    blocks, block_tokens = caches[0].shape[0], caches[0].shape[2]
    used = list(range(max(0, blocks - PROOF_BLOCKS), blocks))
    slots = [block * block_tokens + at for block in reversed(used) for at in range(block_tokens)][3:-3]
    chunks = _chunks(shape, len(slots) + 2, caches[0].device)
    where = torch.tensor(slots, dtype=torch.int64, device=caches[0].device)
    before = [cache[used] for cache in caches]
    found = []
    for composition in (trusted, other):
        for cache in caches:
            cache[used] = 0
        composition(chunks, where, 2)
        found.append([cache[used] for cache in caches])
    for cache, content in zip(caches, before, strict=True):
        cache[used] = content
    rounding = float(torch.finfo(shape.dtype).eps)
    return all(
        torch.allclose(theirs.float(), ours.float(), rtol=rounding, atol=1e-5) and bool(theirs.any())
        for theirs, ours in zip(*found, strict=True)
    )


def _chunks(shape: KVShape, tokens: int, device: torch.device) -> list[Chunk]:
    """Random chunks of `tokens` in all: the first two stay and move ahead, the last moves back."""
    first, second = max(1, tokens // 5), max(1, tokens // 3)
    generator = torch.Generator().manual_seed(0)
    chunks = []
    for position, length in ((0, first), (first + 700, second), (0, tokens - first - second)):
        kv = torch.randn(shape.of(length), generator=generator)
        chunks.append(Chunk(ChunkId(str(position)), position, kv.to(shape.dtype).to(device)))
    return chunks
