"""Moving keys to another position: RoPE rotations compose, R(v) = R(v - p) R(p).

A key that was cached at position p is served at position v by rotating it by v - p (RoFormer, Su et al. 2021,
section 3.2). The rotation is done in float32 and rounded once; a distance of zero changes no bit.

A scaling amplitude (YaRN's) multiplies cosine and sine alike; it is in the cached key already and stays there, so
the rotation itself always has amplitude 1.

Imports torch only: how the frequencies are read from a model's own rotary module stands in `probe.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """`frequencies` is float32 `[rotary_dim / 2]`, in radians a token; `neox` pairs element i with i + rotary_dim / 2
    (halves), otherwise neighbours 2i and 2i + 1 are pairs. A key's rotated elements begin at `first`; those before it,
    and those past `rotary_dim` of them, are not rotated.
    """

    frequencies: torch.Tensor
    neox: bool
    first: int = 0

    @property
    def rotary_dim(self) -> int:
        return 2 * int(self.frequencies.shape[0])

    def table(self, distances: torch.Tensor) -> torch.Tensor:
        """Cosines and sines, float32 `[tokens, rotary_dim]` (cosines first), for int64 `distances` `[tokens]`.

        The angle is formed in float64: at a distance of 8,192 float32 would lose half a thousandth of a radian.
        """
        angles = distances.to(torch.float64)[:, None] * self.frequencies.to(torch.float64)[None, :]
        return torch.cat((angles.cos(), angles.sin()), dim=-1).to(torch.float32)


class RotateKeys(Protocol):
    """Rotates keys `[tokens, heads, head_dim]` of any dtype in place, by a table from `Rotation.table` with a row for
    each token: in float32, rounded once."""

    def __call__(self, keys: torch.Tensor, table: torch.Tensor, neox: bool) -> None: ...


def rotate_keys(keys: torch.Tensor, table: torch.Tensor, neox: bool) -> None:
    """The `RotateKeys` in plain torch, on any device."""
    if keys.dtype != torch.float32:
        widened = keys.to(torch.float32)
        rotate_keys(widened, table, neox)
        keys.copy_(widened)
        return
    half = table.shape[-1] // 2
    cos, sin = table[:, None, :half], table[:, None, half:]
    if neox:
        first, second = keys[..., :half], keys[..., half : 2 * half]
    else:
        first, second = keys[..., 0 : 2 * half : 2], keys[..., 1 : 2 * half : 2]
    rotated = first * cos
    rotated.addcmul_(second, sin, value=-1)
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(rotated)
