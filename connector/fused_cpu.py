"""Composition on one core of a CPU with AMX: one pass gathers, rotates and writes every layer of every chunk.

vLLM packs a block of its cache for the CPU's matrix tiles, which multiply pairs of bfloat16 numbers. Of each head first
the keys, `[block_tokens / 16, head_dim / 2, 16, 2]`: 16 tokens beside each other, pairs of elements; then the values,
`[head_dim / 16, block_tokens / 2, 16, 2]`: 16 elements beside each other, pairs of tokens. Whether the engine's caches
are such is not believed but proved at start-up (`paged.py`).

Compiled by Numba when it is made. Imports torch and Numba only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numba
import numpy as np
import torch
from numba.extending import intrinsic

from connector.chunk import Chunk, KVShape
from connector.rotation import Rotation
from connector.rotation_cpu import rounded, widened

TILE = 16
"""Tokens of keys, or elements of values, beside each other."""


class FusedCPUComposition:
    """A `Composition` over one cache a layer, `[blocks, kv_heads, block_tokens, 2 * head_dim]`, contiguous.

    Raises ValueError where the kernel cannot write such caches, and where torch has more
    than the one thread that it runs on.
    """

    def __init__(self, shape: KVShape, caches: Sequence[torch.Tensor], rotations: Sequence[Rotation]) -> None:
        if shape.parts != 2 or any(rotation.first for rotation in rotations):
            raise ValueError("the kernel moves keys and values that are rotated from their first element on")
        layouts = {(cache.shape, cache.stride(), cache.dtype) for cache in caches}
        if len(layouts) != 1 or not caches[0].is_contiguous() or caches[0].dim() != 4:
            raise ValueError("the layers' caches are not laid out alike")
        _, heads, block_tokens, width = caches[0].shape
        if (heads, width) != (shape.kv_heads, 2 * shape.head_dim) or {shape.dtype, caches[0].dtype} != {torch.bfloat16}:
            raise ValueError("the caches do not hold the model's heads in bfloat16")
        if block_tokens % TILE or shape.head_dim % TILE:
            raise ValueError(f"blocks or heads cannot be cut into tiles of {TILE}")
        if torch.get_num_threads() != 1:
            raise ValueError("one thread composes, and torch has more")
        self._caches = tuple(caches)  # their addresses are kept below
        self._addresses = np.array([cache.data_ptr() for cache in caches], dtype=np.int64)
        self._groups: list[tuple[Rotation, Any, Callable[..., None]]] = []
        for rotation in {id(rotation): rotation for rotation in rotations}.values():
            layers = np.array([layer for layer, its in enumerate(rotations) if its is rotation], dtype=np.int64)
            kernel = _kernel(block_tokens, heads, shape.head_dim, rotation.rotary_dim // 2, rotation.neox)
            self._groups.append((rotation, layers, kernel))

    def __call__(self, chunks: Sequence[Chunk], slots: torch.Tensor, skip: int) -> None:
        pieces, distances = _pieces(chunks, skip, skip + len(slots))
        rows = np.array(pieces, dtype=np.int64)
        moved = torch.tensor(distances, dtype=torch.int64)
        for rotation, layers, kernel in self._groups:
            table = rotation.table(moved).numpy()
            kernel(rows, table, moved.numpy(), slots.numpy(), layers, self._addresses)


def _pieces(chunks: Sequence[Chunk], skip: int, stop: int) -> tuple[list[tuple[int, int, int, int]], list[int]]:
    """Of each chunk its address, its length, and which of its tokens are at positions `skip` up to `stop`; and by how
    many positions they move."""
    pieces, distances = [], []
    start = 0
    for chunk in chunks:
        first, last = max(skip - start, 0), min(stop - start, chunk.tokens)
        if first < last:
            pieces.append((chunk.kv.data_ptr(), chunk.tokens, first, last))
            distances.append(start - chunk.position)
        start += chunk.tokens
    return pieces, distances


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(typing: Any, address: Any, example: Any) -> Any:
    """The pointer to numbers of the example's type at an integer address."""
    kind = numba.types.CPointer(example)

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(kind))

    return kind(address, example), generate


@functools.cache
def _kernel(block_tokens: int, heads: int, dim: int, half: int, neox: bool) -> Callable[..., None]:
    """All of these are constants to the compiler: it unrolls and vectorises what they bound."""
    cell = block_tokens * dim  # elements of one head's keys, or values, in a block
    pairs = dim // 2
    column = 2 * block_tokens * TILE  # bytes of one tile's values in a block

    @numba.njit(error_model="numpy", fastmath={"contract"})  # type: ignore[untyped-decorator]
    def rotate(address: Any, cos: Any, sin: Any, key: Any) -> None:
        source = numba.carray(_pointer(address, np.uint16(0)), (dim,))
        for pair in range(half):
            one = pair if neox else 2 * pair
            other = half + pair if neox else 2 * pair + 1
            x, y = widened(source[one]), widened(source[other])
            key[one] = rounded(x * cos[pair] - y * sin[pair])
            key[other] = rounded(y * cos[pair] + x * sin[pair])
        for element in range(2 * half, dim):
            key[element] = source[element]

    @numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
    def copy(address: Any, key: Any) -> None:
        source = numba.carray(_pointer(address, np.uint16(0)), (dim,))
        for element in range(dim):
            key[element] = source[element]

    @numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
    def place_pair(value: Any, other: Any, address: Any) -> None:
        """The values of two tokens that share words of the cache."""
        low = numba.carray(_pointer(value, np.uint16(0)), (dim,))
        high = numba.carray(_pointer(other, np.uint16(0)), (dim,))
        for tile in range(dim // TILE):
            words = numba.carray(_pointer(address + tile * column, np.uint32(0)), (TILE,))
            for element in range(TILE):
                above = np.uint32(np.uint32(high[tile * TILE + element]) << np.uint32(16))
                words[element] = np.uint32(low[tile * TILE + element]) | above

    @numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
    def place_one(value: Any, address: Any) -> None:
        """The values of a token whose neighbour is written apart, or not at all."""
        source = numba.carray(_pointer(value, np.uint16(0)), (dim,))
        for tile in range(dim // TILE):
            halves = numba.carray(_pointer(address + tile * column, np.uint16(0)), (2 * TILE,))
            for element in range(TILE):
                halves[2 * element] = source[tile * TILE + element]

    @numba.njit(error_model="numpy")  # type: ignore[untyped-decorator]
    def move(pieces: Any, table: Any, moved: Any, slots: Any, layers: Any, caches: Any) -> None:
        key = np.empty(dim, np.uint16)
        words = key.view(np.uint32)
        for layer in layers:
            at = 0
            for piece in range(pieces.shape[0]):
                address, length, first, last = pieces[piece]
                cos, sin = table[piece, :half], table[piece, half:]
                for token in range(first, last):
                    block, row = slots[at] // block_tokens, slots[at] % block_tokens
                    twin = row % 2 == 0 and token + 1 < last and slots[at + 1] == slots[at] + 1
                    done = row % 2 == 1 and token > first and slots[at - 1] == slots[at] - 1
                    at += 1
                    for head in range(heads):
                        of = address + 2 * ((2 * layer * length + token) * heads + head) * dim
                        to = caches[layer] + 4 * (block * heads + head) * cell
                        if moved[piece] != 0:
                            rotate(of, cos, sin, key)
                        else:
                            copy(of, key)
                        word = to + row // TILE * (2 * TILE * dim) + row % TILE * 4
                        keys = numba.carray(_pointer(word, np.uint32(0)), (pairs * TILE,))
                        for pair in range(pairs):
                            keys[pair * TILE] = words[pair]
                        if done:
                            continue
                        value, word = of + 2 * length * heads * dim, to + 2 * cell + row // 2 * (4 * TILE)
                        if twin:
                            place_pair(value, value + 2 * heads * dim, word)
                        else:
                            place_one(value, word + 2 * (row % 2))

    compiled: Callable[..., None] = move
    return compiled
