"""The fused composition for CPUs writes what the portable one writes, packed as vLLM packs it for matrix tiles."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from paged_caches import by_index, caches, random_chunks

from benchmarks.compose import Model, measure
from connector.chunk import KVShape
from connector.fused_cpu import FusedCPUComposition
from connector.rotation import Rotation

BLOCKS, BLOCK_TOKENS = 4, 32
CHUNKS = [(7, 3_000), (1, 0), (16, 8), (25, 24), (12, 2)]  # tokens and position; the third and fourth stay


@pytest.fixture(autouse=True)
def one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def rotation(rotary_dim: int, neox: bool) -> Rotation:
    return Rotation((10_000.0 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)).to(torch.float32), neox)


def unpacked(packed: Sequence[torch.Tensor], shape: KVShape) -> list[torch.Tensor]:
    """The caches as `[blocks, heads, block_tokens, 2 * head_dim]`, keys first."""
    rows = []
    for cache in packed:
        keys, values = cache.view(BLOCKS, shape.kv_heads, 2, -1).unbind(2)
        by_token = keys.view(BLOCKS, shape.kv_heads, BLOCK_TOKENS // 16, shape.head_dim // 2, 16, 2).transpose(3, 4)
        by_tile = values.view(BLOCKS, shape.kv_heads, shape.head_dim // 16, BLOCK_TOKENS // 2, 16, 2)
        row = (BLOCKS, shape.kv_heads, BLOCK_TOKENS, shape.head_dim)
        rows.append(torch.cat((by_token.reshape(row), by_tile.permute(0, 1, 3, 5, 2, 4).reshape(row)), dim=-1))
    return rows


@pytest.mark.parametrize("skip", [0, 5, 8, 30])
@pytest.mark.parametrize("slots", ["in order", "from an odd one", "backwards", "anywhere"])
@pytest.mark.parametrize(
    ("heads", "dim", "kinds"),
    [(3, 64, [(64, True)]), (2, 32, [(16, True), (32, False)])],
    ids=["halves", "a part in halves, all as neighbours"],
)
def test_it_writes_what_the_portable_composition_writes_and_nowhere_else(
    heads: int, dim: int, kinds: list[tuple[int, bool]], slots: str, skip: int
) -> None:
    shape = KVShape(3, heads, dim, torch.bfloat16)
    made = [rotation(*kind) for kind in kinds]
    rotations = [made[layer % len(made)] for layer in range(shape.layers)]
    chunks = random_chunks(shape, CHUNKS)
    tokens = sum(length for length, _ in CHUNKS) - skip
    room = torch.arange(BLOCKS * BLOCK_TOKENS)
    at = {
        "in order": room[32:],
        "from an odd one": room[17:],
        "backwards": room.flip(0),
        "anywhere": torch.randperm(len(room), generator=torch.Generator().manual_seed(3)),
    }[slots][:tokens]
    expected, ours = (caches(shape, BLOCKS, BLOCK_TOKENS) for _ in range(2))
    by_index(shape, expected, rotations)(chunks, at, skip)
    FusedCPUComposition(shape, ours, rotations)(chunks, at, skip)
    for our, their in zip(unpacked(ours, shape), expected, strict=True):
        assert torch.equal(our[..., dim:], their[..., dim:]), "values are copied bit for bit"
        rounding = float(torch.finfo(torch.bfloat16).eps)
        torch.testing.assert_close(our[..., :dim].float(), their[..., :dim].float(), rtol=rounding, atol=1e-5)


def test_tokens_served_where_they_were_encoded_keep_every_bit_even_the_sign_of_a_zero() -> None:
    shape = KVShape(2, 1, 16, torch.bfloat16)
    (chunk,) = random_chunks(shape, [(9, 0)])
    chunk.kv[:, :, 3] = -0.0
    ours = caches(shape, BLOCKS, BLOCK_TOKENS)
    FusedCPUComposition(shape, ours, [rotation(16, True)] * 2)([chunk], torch.arange(9), 0)
    for layer, rows in enumerate(unpacked(ours, shape)):
        written = rows[0, :, :9].transpose(0, 1)
        for plane, cells in enumerate(written.split(16, dim=-1)):
            assert torch.equal(cells.contiguous().view(torch.int16), chunk.kv[layer, plane].view(torch.int16))


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this CPU has no matrix tiles")
def test_beside_vllms_own_update_it_is_proved_and_taken() -> None:
    model = Model("small", KVShape(2, 3, 64, torch.bfloat16), 10_000.0)
    assert "fused" in measure(model, "cpu", rounds=1)


@pytest.mark.parametrize(
    ("shape", "kind", "why"),
    [
        (KVShape(2, 2, 16, torch.float32), (16, True), "bfloat16"),
        (KVShape(2, 2, 8, torch.bfloat16), (8, True), "tiles"),
        (KVShape(2, 1, 16, torch.bfloat16, parts=1), (16, True), "from their first element on"),
    ],
    ids=["float32", "a head of half a tile", "latent rows"],
)
def test_what_the_kernel_cannot_write_is_refused(shape: KVShape, kind: tuple[int, bool], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        FusedCPUComposition(shape, caches(shape, BLOCKS, BLOCK_TOKENS), [rotation(*kind)] * 2)


def test_where_torch_has_more_threads_they_compose_together() -> None:
    shape = KVShape(1, 1, 16, torch.bfloat16)
    torch.set_num_threads(2)
    with pytest.raises(ValueError, match="one thread"):
        FusedCPUComposition(shape, caches(shape, BLOCKS, BLOCK_TOKENS), [rotation(16, True)])
