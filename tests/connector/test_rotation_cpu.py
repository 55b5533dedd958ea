"""Keys in bfloat16 are rotated by the CPU's kernel as by plain torch, but for one rounding."""

from __future__ import annotations

import pytest
import torch

from connector.rotation import Rotation, rotate_keys
from connector.rotation_cpu import rotate_bfloat16

ULP = float(torch.finfo(torch.bfloat16).eps)


def some_keys(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def some_rotation(rotary_dim: int, neox: bool) -> Rotation:
    return Rotation((10_000.0 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)).to(torch.float32), neox)


@pytest.mark.parametrize("neox", [True, False], ids=["halves", "neighbours"])
@pytest.mark.parametrize(("rotary_dim", "head_dim"), [(64, 64), (16, 24), (2, 2)])
def test_keys_are_moved_as_plain_torch_moves_them(rotary_dim: int, head_dim: int, neox: bool) -> None:
    keys, rotation = some_keys(1, 40, 3, head_dim), some_rotation(rotary_dim, neox)
    table = rotation.table(torch.arange(40) * 311 - 6_000)
    fast, plain = keys.clone(), keys.clone()
    rotate_bfloat16(fast, table, neox)
    rotate_keys(plain, table, neox)
    assert not torch.equal(plain, keys)
    torch.testing.assert_close(fast.float(), plain.float(), rtol=ULP, atol=1e-5)
    assert (fast != plain).float().mean() < 0.001, "one in thousands lies so near to a tie that an addition decides"


def test_only_a_part_of_each_row_may_be_given() -> None:
    """As with latent rows, of which the last elements alone are rotated."""
    rows, rotation = some_keys(2, 9, 1, 30), some_rotation(8, neox=False)
    table = rotation.table(torch.full((9,), -77))
    expected = rows[..., 22:].clone()
    rotate_keys(expected, table, rotation.neox)
    moved = rows.clone()
    rotate_bfloat16(moved[..., 22:], table, rotation.neox)
    assert torch.equal(moved[..., :22], rows[..., :22])
    torch.testing.assert_close(moved[..., 22:].float(), expected.float(), rtol=ULP, atol=1e-5)


def test_a_distance_of_zero_changes_no_bit() -> None:
    keys, rotation = some_keys(3, 5, 2, 16), some_rotation(16, neox=True)
    moved = keys.clone()
    rotate_bfloat16(moved, rotation.table(torch.tensor([0, 9, 0, 0, -9])), rotation.neox)
    assert torch.equal(moved[[0, 2, 3]].view(torch.int16), keys[[0, 2, 3]].view(torch.int16))


def test_ties_are_rounded_to_even() -> None:
    """1 + 2^-8 and 1 + 3 * 2^-8 lie midway between two numbers; a quarter turn and cosines of such a size make them."""
    keys = torch.tensor([[[1.0, 0.0]], [[1.0, 0.0]]], dtype=torch.bfloat16)
    rotate_bfloat16(keys, torch.tensor([[1 + 2**-8, 0.0], [1 + 3 * 2**-8, 0.0]]), neox=True)
    assert keys[:, 0, 0].tolist() == [1.0, 1 + 2**-6]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_keys_of_another_dtype_are_left_to_plain_torch(dtype: torch.dtype) -> None:
    with pytest.raises(RuntimeError, match=str(dtype)):
        rotate_bfloat16(torch.ones(1, 1, 2, dtype=dtype), torch.ones(1, 2), neox=True)
