"""A faster composition is used where it leaves in the engine's caches what the portable one leaves, and only there."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from paged_caches import by_index, caches

from connector.chunk import Chunk, KVShape
from connector.compose import Composition
from connector.paged import fastest, paged_views, writes_alike
from connector.rotation import Rotation

SHAPE = KVShape(2, 2, 8, torch.bfloat16)
ROTATION = Rotation(torch.tensor([1.0, 0.1, 0.01, 0.001]), neox=True)
PORTABLE_ROTATIONS = [ROTATION] * SHAPE.layers


@pytest.fixture
def of() -> list[torch.Tensor]:
    """Caches that hold something."""
    made = caches(SHAPE, 5, 16)
    for cache in made:
        cache.copy_(torch.randn(cache.shape))
    return made


def proof(of: list[torch.Tensor], other: Composition) -> bool:
    return writes_alike(by_index(SHAPE, of, PORTABLE_ROTATIONS), other, SHAPE, of)


def test_the_same_composition_is_alike_and_the_caches_are_as_they_were(of: list[torch.Tensor]) -> None:
    before = [cache.clone() for cache in of]
    assert proof(of, by_index(SHAPE, of, PORTABLE_ROTATIONS))
    assert all(torch.equal(cache, content) for cache, content in zip(of, before, strict=True))


def test_one_that_rotates_otherwise_is_not(of: list[torch.Tensor]) -> None:
    neighbours = Rotation(ROTATION.frequencies, neox=False)
    assert not proof(of, by_index(SHAPE, of, [ROTATION, neighbours]))


def test_one_that_lays_keys_and_values_out_otherwise_is_not(of: list[torch.Tensor]) -> None:
    """The same shape, packed: each head's keys of a block, then its values."""
    packed = [cache.view(5, 2, 2, 16, 8).permute(0, 1, 3, 2, 4).reshape(5, 2, 16, 16) for cache in of]
    for cache, content in zip(of, packed, strict=True):
        cache.copy_(content)
    inner = by_index(SHAPE, packed, PORTABLE_ROTATIONS)

    def other(chunks: Sequence[Chunk], slots: torch.Tensor, skip: int) -> None:
        inner(chunks, slots, skip)
        for cache, content in zip(of, packed, strict=True):
            cache.copy_(content.view(5, 2, 16, 2, 8).permute(0, 1, 3, 2, 4).reshape(5, 2, 16, 16))

    assert not proof(of, other)


def test_one_that_writes_another_slot_or_token_is_not(of: list[torch.Tensor]) -> None:
    portable = by_index(SHAPE, of, PORTABLE_ROTATIONS)
    assert not proof(of, lambda chunks, slots, skip: portable(chunks, slots - 1, skip))
    assert not proof(of, lambda chunks, slots, skip: portable(chunks, slots, skip - 1))


def test_one_that_writes_nothing_or_leaves_out_a_layer_is_not(of: list[torch.Tensor]) -> None:
    assert not proof(of, lambda chunks, slots, skip: None)
    one_layer = KVShape(1, SHAPE.kv_heads, SHAPE.head_dim, SHAPE.dtype)
    first = by_index(one_layer, of[:1], [ROTATION])

    def other(chunks: Sequence[Chunk], slots: torch.Tensor, skip: int) -> None:
        first([Chunk(chunk.id, chunk.position, chunk.kv[:1]) for chunk in chunks], slots, skip)

    assert not proof(of, other)


def test_a_cache_of_one_block_proves_as_well() -> None:
    of = caches(SHAPE, 1, 16)
    assert proof(of, by_index(SHAPE, of, PORTABLE_ROTATIONS))


def test_where_no_fused_composition_can_write_the_caches_the_portable_one_is_used(of: list[torch.Tensor]) -> None:
    portable = by_index(SHAPE, of, PORTABLE_ROTATIONS)
    assert fastest(portable, SHAPE, of, PORTABLE_ROTATIONS) is portable


def test_caches_of_another_shape_have_no_views() -> None:
    with pytest.raises(ValueError, match="not one of blocks"):
        paged_views(SHAPE, [torch.zeros(2, 5, 16, 2, 8)])
