"""Keys moved by their distance are the keys of the new position: RoPE rotations compose."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.rotation import Rotation, rotate_keys

HEADS, HEAD_DIM = 2, 12

TOLERANCE = 2e-6
"""For keys of at most about 4: the table holds cosine and sine rounded to float32 (half of 2^-24 each), and a rotation
is two products and a sum, so one rotation errs by at most about 4 * 3 * 2^-24 = 7e-7; here at most two are compared
with a float64 reference, which itself is rounded once."""


@st.composite
def rotations(draw: st.DrawFn) -> Rotation:
    rotary_dim = draw(st.sampled_from([2, 8, HEAD_DIM]))  # the last two of 12 elements stay, or none
    base = draw(st.sampled_from([10_000.0, 500_000.0]))
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    return Rotation((base**-exponents).to(torch.float32), neox=draw(st.booleans()))


def some_keys(tokens: int, seed: int) -> torch.Tensor:
    return torch.randn(tokens, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(seed)).clamp(-4, 4)


def moved(keys: torch.Tensor, rotation: Rotation, distances: torch.Tensor) -> torch.Tensor:
    result = keys.clone()
    rotate_keys(result, rotation.table(distances), rotation.neox)
    return result


def by_definition(keys: torch.Tensor, rotation: Rotation, positions: list[int]) -> torch.Tensor:
    """RoFormer's equation (15), one pair of numbers at a time, in float64."""
    result = keys.to(torch.float64).clone()
    half = rotation.rotary_dim // 2
    for token, position in enumerate(positions):
        for head in range(keys.shape[1]):
            for i in range(half):
                x, y = (i, i + half) if rotation.neox else (2 * i, 2 * i + 1)
                angle = position * float(rotation.frequencies[i])
                a, b = float(keys[token, head, x]), float(keys[token, head, y])
                result[token, head, x] = a * math.cos(angle) - b * math.sin(angle)
                result[token, head, y] = a * math.sin(angle) + b * math.cos(angle)
    return result


positions = st.integers(0, 131_072)
seeds = st.integers(0, 2**31)


@settings(max_examples=40)
@given(rotations(), st.lists(positions, min_size=1, max_size=4), seeds)
def test_a_rotation_is_the_definition_with_halves_or_neighbours_as_pairs(
    rotation: Rotation, at: list[int], seed: int
) -> None:
    keys = some_keys(len(at), seed)
    rotated = moved(keys, rotation, torch.tensor(at))
    torch.testing.assert_close(rotated.double(), by_definition(keys, rotation, at), rtol=0, atol=TOLERANCE)


@settings(max_examples=40)
@given(rotations(), st.lists(st.tuples(positions, positions), min_size=1, max_size=4), seeds)
def test_keys_rotated_at_one_position_and_moved_are_those_rotated_at_the_other(
    rotation: Rotation, moves: list[tuple[int, int]], seed: int
) -> None:
    keys = some_keys(len(moves), seed)
    encoded, served = (torch.tensor(side) for side in zip(*moves, strict=True))
    cached = by_definition(keys, rotation, encoded.tolist()).float()
    expected = by_definition(keys, rotation, served.tolist())
    torch.testing.assert_close(moved(cached, rotation, served - encoded).double(), expected, rtol=0, atol=TOLERANCE)


@given(rotations(), st.integers(-9_000, 9_000), st.integers(-9_000, 9_000), seeds)
def test_moving_by_a_and_then_by_b_is_moving_by_both(rotation: Rotation, a: int, b: int, seed: int) -> None:
    keys = some_keys(3, seed)

    def by(distance: int, of: torch.Tensor) -> torch.Tensor:
        return moved(of, rotation, torch.full((3,), distance))

    torch.testing.assert_close(by(b, by(a, keys)), by(a + b, keys), rtol=0, atol=2 * TOLERANCE)


@given(rotations(), st.integers(1, 9_000), seeds)
def test_there_and_back_is_where_it_was_and_lengths_stay(rotation: Rotation, distance: int, seed: int) -> None:
    keys = some_keys(2, seed)
    there = moved(keys, rotation, torch.full((2,), distance))
    back = moved(there, rotation, torch.full((2,), -distance))
    torch.testing.assert_close(back, keys, rtol=0, atol=2 * TOLERANCE)
    torch.testing.assert_close(there.norm(dim=-1), keys.norm(dim=-1), rtol=1e-6, atol=TOLERANCE)


@given(rotations(), seeds)
def test_a_distance_of_zero_changes_no_bit_even_beside_keys_that_move(rotation: Rotation, seed: int) -> None:
    keys = some_keys(3, seed)
    result = moved(keys, rotation, torch.tensor([0, 123, 0]))
    assert torch.equal(result[[0, 2]].view(torch.int32), keys[[0, 2]].view(torch.int32))


@given(rotations(), seeds)
def test_elements_past_the_rotated_part_keep_their_bits(rotation: Rotation, seed: int) -> None:
    keys = some_keys(3, seed)
    rest = slice(rotation.rotary_dim, None)
    result = moved(keys, rotation, torch.tensor([5, -77, 40_000]))
    assert torch.equal(result[..., rest], keys[..., rest])


@pytest.mark.parametrize("distance", [8_191, 131_071, -131_071])
def test_angles_are_as_exact_at_a_great_distance_as_at_a_small_one(distance: int) -> None:
    frequency = torch.tensor([0.7318], dtype=torch.float32)
    table = Rotation(frequency, neox=True).table(torch.tensor([distance]))[0]
    angle = distance * float(frequency[0])
    assert table.tolist() == pytest.approx([math.cos(angle), math.sin(angle)], abs=1e-7)
