"""Keys in bfloat16 moved on a CPU in one pass over them, where plain torch takes three: widen, rotate, round.

Compiled by Numba (which vLLM brings along) when it is first called; one thread, as many heads as there are. Finite keys
are taken for granted: torch would round a NaN to one, this to any number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch


def rotate_bfloat16(keys: torch.Tensor, table: torch.Tensor, neox: bool) -> None:
    """The `RotateKeys` for bfloat16 keys on a CPU, rounded to nearest, ties to even, as torch does. Raises RuntimeError
    for others."""
    if keys.dtype != torch.bfloat16 or keys.device.type != "cpu":
        raise RuntimeError(f"keys of {keys.dtype} on {keys.device.type}")
    _kernel(table.shape[-1] // 2, neox)(keys.view(torch.uint16).numpy(), table.numpy())


@numba.njit(error_model="numpy", inline="always")  # type: ignore[untyped-decorator]
def widened(bits: Any) -> Any:
    """The float32 that a bfloat16's bits stand for."""
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@numba.njit(error_model="numpy", inline="always")  # type: ignore[untyped-decorator]
def rounded(number: Any) -> Any:
    """The bits of the bfloat16 that is nearest to a float32."""
    bits = np.float32(number).view(np.uint32)
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16(np.uint32(np.uint32(bits + np.uint32(0x7FFF)) + odd) >> np.uint32(16))


@functools.cache
def _kernel(half: int, neox: bool) -> Callable[[Any, Any], None]:
    """`half` and `neox` are constants to the compiler: it unrolls and vectorises the loop over pairs."""

    @numba.njit(error_model="numpy", fastmath={"contract"})  # type: ignore[untyped-decorator]
    def rotate(keys: Any, table: Any) -> None:
        for token in range(keys.shape[0]):
            for head in range(keys.shape[1]):
                for pair in range(half):
                    first = pair if neox else 2 * pair
                    second = half + pair if neox else 2 * pair + 1
                    a, b = widened(keys[token, head, first]), widened(keys[token, head, second])
                    cos, sin = table[token, pair], table[token, half + pair]
                    keys[token, head, first] = rounded(a * cos - b * sin)
                    keys[token, head, second] = rounded(b * cos + a * sin)

    compiled: Callable[[Any, Any], None] = rotate
    return compiled
