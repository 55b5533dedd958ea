"""Composition on a CUDA device: one launch gathers, rotates and writes every layer of every chunk.

    tiles    int64 [n, 5]     a few tokens of one chunk each: where their keys of layer 0 lie in memory, elements from
                              one plane (K or V of a layer) to the next, their first slot's index, how many, table row
    table    float32 [c, r]   cosines and sines of each chunk's distance (r is the rotary width)
    program  (tile, layer)    keys are rotated in float32 and rounded once, values are copied bit for bit

Writes caches that are `[blocks, block_tokens, kv_heads, head_dim]` by any strides, in the chunks' dtype. Whether the
engine's caches are such is not believed but proved at start-up (`paged.py`). Imports torch and Triton only.

Has never run on a GPU: no machine at hand had one. Its logic is tested with Triton's interpreter, and that it compiles
for one is tested, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from connector.chunk import Chunk, KVShape
from connector.rotation import Rotation

ROWS = 64
"""Rows (one head of one token) that a program moves; half of one is 32 elements a thread in registers."""

ALIGNED_BYTES = 16
"""What the kernel reads and writes at once, as the compiler is told."""

_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class FusedComposition:
    """A `Composition` over one key and one value cache a layer, each `[blocks, block_tokens, kv_heads, head_dim]`.

    All layers' caches have the same strides. Raises ValueError where the kernel cannot write such caches.
    """

    def __init__(
        self,
        shape: KVShape,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        rotations: Sequence[Rotation],
    ) -> None:
        if shape.parts != 2 or any(rotation.first for rotation in rotations):
            raise ValueError("the kernel moves keys and values that are rotated from their first element on")
        layouts = {(cache.shape, cache.stride(), cache.dtype, cache.device) for cache in (*keys, *values)}
        if len(layouts) != 1:
            raise ValueError("the layers' caches are not laid out alike")
        ((_, self._block_tokens, heads, dim), self._strides, dtype, self._device) = layouts.pop()
        if (heads, dim, dtype) != (shape.kv_heads, shape.head_dim, shape.dtype) or self._strides[3] != 1:
            raise ValueError("the caches do not hold the model's heads as they are")
        if shape.kv_heads > ROWS:
            raise ValueError(f"the kernel moves at most {ROWS} heads of a token at once")
        steps = [dim * dtype.itemsize, *(stride * dtype.itemsize for stride in self._strides[:3])]
        if any(number % ALIGNED_BYTES for number in (*steps, *(cache.data_ptr() for cache in (*keys, *values)))):
            raise ValueError(f"the caches' heads do not start at multiples of {ALIGNED_BYTES} bytes")
        self._shape = shape
        self._caches = (*keys, *values)  # their addresses are kept below
        self._keys = self._addresses(keys)
        self._values = self._addresses(values)
        self._groups: list[tuple[Rotation, torch.Tensor]] = []
        for rotation in {id(rotation): rotation for rotation in rotations}.values():
            layers = [layer for layer, its in enumerate(rotations) if its is rotation]
            self._groups.append((rotation, torch.tensor(layers, dtype=torch.int64, device=self._device)))

    def __call__(self, chunks: Sequence[Chunk], slots: torch.Tensor, skip: int) -> None:
        shape = self._shape
        tiles, distances = _tiles(chunks, skip, skip + len(slots), ROWS // shape.kv_heads)
        there = torch.tensor(tiles, dtype=torch.int64).to(self._device, non_blocking=True)
        moved = torch.tensor(distances, dtype=torch.int64)
        for rotation, layers in self._groups:
            half = rotation.rotary_dim // 2
            rest = shape.head_dim - 2 * half
            _move[(len(tiles), len(layers))](
                there,
                rotation.table(moved).to(self._device, non_blocking=True),
                moved.to(self._device, non_blocking=True),
                slots,
                layers,
                self._keys,
                self._values,
                *self._strides[:3],
                BLOCK_TOKENS=self._block_tokens,
                HEADS=shape.kv_heads,
                HEAD_DIM=shape.head_dim,
                HALF=half,
                NEOX=rotation.neox,
                DTYPE=_DTYPES[shape.dtype],
                ROWS=ROWS,
                DIM_ROOM=triton.next_power_of_2(shape.head_dim),
                HALF_ROOM=triton.next_power_of_2(half),
                REST_ROOM=triton.next_power_of_2(rest) if rest else 0,
            )

    def _addresses(self, caches: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.int64, device=self._device)


def _tiles(chunks: Sequence[Chunk], skip: int, stop: int, tokens: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """The chunks' tokens at positions `skip` up to `stop` in tiles of at most `tokens`, and each chunk's distance."""
    tiles: list[tuple[int, ...]] = []
    distances: list[int] = []
    start = 0
    for row, chunk in enumerate(chunks):
        _, _, length, heads, dim = chunk.kv.shape
        distances.append(start - chunk.position)
        first, last = max(skip - start, 0), min(stop - start, length)
        for token in range(first, last, tokens):
            address = chunk.kv.data_ptr() + token * heads * dim * chunk.kv.element_size()
            tiles.append((address, length * heads * dim, start + token - skip, min(tokens, last - token), row))
        start += length
    return tiles, distances


@triton.jit  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]
    tiles,
    table,
    distances,
    slots,
    layers,
    key_caches,
    value_caches,
    block_stride,
    slot_stride,
    head_stride,
    BLOCK_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    NEOX: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM_ROOM: tl.constexpr,
    HALF_ROOM: tl.constexpr,
    REST_ROOM: tl.constexpr,
):
    tile = tiles + tl.program_id(0) * 5
    plane, first, tokens, chunk = tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)
    layer = tl.load(layers + tl.program_id(1))
    # The compiler sees no pointer behind an address: told that these are multiples of 16 bytes, it moves 16 at a time.
    keys = tl.multiple_of(tl.load(tile).to(tl.pointer_type(DTYPE)) + 2 * layer * plane, 16)
    values = tl.multiple_of(keys + plane, 16)
    key_cache = tl.multiple_of(tl.load(key_caches + layer).to(tl.pointer_type(DTYPE)), 16)
    value_cache = tl.multiple_of(tl.load(value_caches + layer).to(tl.pointer_type(DTYPE)), 16)

    row = tl.arange(0, ROWS)
    real = (row < tokens * HEADS)[:, None]
    slot = tl.load(slots + first + row // HEADS, mask=row < tokens * HEADS, other=0)
    target = (slot // BLOCK_TOKENS * block_stride + slot % BLOCK_TOKENS * slot_stride + row % HEADS * head_stride)[
        :, None
    ]
    source = (row * HEAD_DIM)[:, None]

    element = tl.arange(0, DIM_ROOM)[None, :]
    here = real & (element < HEAD_DIM)
    tl.store(value_cache + target + element, tl.load(values + source + element, mask=here), mask=here)

    pair = tl.arange(0, HALF_ROOM)
    if NEOX:
        a, b = pair[None, :], pair[None, :] + HALF
    else:
        a, b = 2 * pair[None, :], 2 * pair[None, :] + 1
    here = real & (pair < HALF)[None, :]
    x, y = tl.load(keys + source + a, mask=here), tl.load(keys + source + b, mask=here)
    cos = tl.load(table + chunk * 2 * HALF + pair, mask=pair < HALF)[None, :]
    sin = tl.load(table + chunk * 2 * HALF + HALF + pair, mask=pair < HALF)[None, :]
    x32, y32 = x.to(tl.float32), y.to(tl.float32)
    moves = tl.load(distances + chunk) != 0  # where not, not even the sign of a zero may change
    tl.store(key_cache + target + a, tl.where(moves, (x32 * cos - y32 * sin).to(DTYPE), x), mask=here)
    tl.store(key_cache + target + b, tl.where(moves, (x32 * sin + y32 * cos).to(DTYPE), y), mask=here)

    if REST_ROOM > 0:
        element = 2 * HALF + tl.arange(0, REST_ROOM)[None, :]
        here = real & (element < HEAD_DIM)
        tl.store(key_cache + target + element, tl.load(keys + source + element, mask=here), mask=here)
