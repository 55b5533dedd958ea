"""Composition equals moving and writing one token of one layer after another, and writes each layer once."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from connector.chunk import Chunk, ChunkId
from connector.compose import compose
from connector.rotation import Rotation, rotate_keys

LAYERS, HEADS, HEAD_DIM = 3, 2, 8
ROTATION = Rotation(torch.tensor([1.0, 0.1, 0.01], dtype=torch.float32), neox=True)  # 6 of 8 elements
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@dataclass
class Cache:
    """What a paged cache would have been told: copies, since the tensors are used again for the next layer."""

    written: list[tuple[int, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        assert keys.is_contiguous()
        assert values.is_contiguous()
        self.written.append((layer, keys.clone(), values.clone()))

    def laid_out(self) -> torch.Tensor:
        """`[layers, 2, tokens, heads, head_dim]`"""
        return torch.stack([torch.stack((keys, values)) for _, keys, values in self.written])


@st.composite
def some_chunks(draw: st.DrawFn, moves: bool = True) -> list[Chunk]:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from(DTYPES))
    chunks, start = [], 0
    for number in range(draw(st.integers(1, 4))):
        tokens = draw(st.integers(1, 5))
        kv = torch.randn(LAYERS, 2, tokens, HEADS, HEAD_DIM, generator=generator).to(dtype)
        position = draw(st.just(start) | st.integers(0, 5_000)) if moves else start
        chunks.append(Chunk(ChunkId(str(number)), position, kv))
        start += tokens
    return chunks


def one_by_one(chunks: list[Chunk]) -> torch.Tensor:
    """Every token of every layer, moved apart from all others."""
    served, start = [], 0
    for chunk in chunks:
        for token in chunk.kv.unbind(2):
            moved = token.clone()
            for layer in range(LAYERS):
                keys = moved[layer, 0].to(torch.float32)[None]
                rotate_keys(keys, ROTATION.table(torch.tensor([start - chunk.position])), ROTATION.neox)
                moved[layer, 0] = keys[0].to(token.dtype)
            served.append(moved)
        start += chunk.tokens
    return torch.stack(served, dim=2)


@given(some_chunks())
def test_a_composition_is_its_tokens_moved_one_by_one(chunks: list[Chunk]) -> None:
    cache = Cache()
    assert compose(chunks, [ROTATION] * LAYERS, cache.write) == sum(chunk.tokens for chunk in chunks)
    assert torch.equal(cache.laid_out(), one_by_one(chunks))


@given(some_chunks())
def test_each_layer_is_written_once_in_order(chunks: list[Chunk]) -> None:
    cache = Cache()
    compose(chunks, [ROTATION] * LAYERS, cache.write)
    assert [layer for layer, _, _ in cache.written] == list(range(LAYERS))


@given(some_chunks(), st.data())
def test_any_part_of_a_composition_is_that_part_of_the_whole(chunks: list[Chunk], data: st.DataObject) -> None:
    total = sum(chunk.tokens for chunk in chunks)
    skip = data.draw(st.integers(0, total - 1))
    stop = data.draw(st.integers(skip + 1, total))
    cache = Cache()
    assert compose(chunks, [ROTATION] * LAYERS, cache.write, skip=skip, stop=stop) == stop - skip
    assert torch.equal(cache.laid_out(), one_by_one(chunks)[:, :, skip:stop])


def test_every_offset_of_a_composition_can_be_where_it_starts_or_stops() -> None:
    chunks = [Chunk(ChunkId(str(n)), 40 * n + 7, torch.randn(LAYERS, 2, n, HEADS, HEAD_DIM)) for n in (3, 1, 4)]
    whole = one_by_one(chunks)
    for skip in range(9):
        for stop in range(skip, 9):
            cache = Cache()
            assert compose(chunks, [ROTATION] * LAYERS, cache.write, skip=skip, stop=stop) == stop - skip
            if skip == stop:
                assert cache.written == []
            else:
                assert torch.equal(cache.laid_out(), whole[:, :, skip:stop])


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_served_where_they_were_encoded_keep_every_bit_even_beside_tokens_that_move(dtype: torch.dtype) -> None:
    stays = Chunk(ChunkId("stays"), 0, torch.randn(LAYERS, 2, 4, HEADS, HEAD_DIM).to(dtype))
    moves = Chunk(ChunkId("moves"), 90, torch.randn(LAYERS, 2, 2, HEADS, HEAD_DIM).to(dtype))
    cache = Cache()
    compose([stays, moves], [ROTATION] * LAYERS, cache.write)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    laid_out = cache.laid_out()
    assert torch.equal(laid_out[:, :, :4].contiguous().view(bits), stays.kv.view(bits))
    assert torch.equal(laid_out[:, 1, 4:].contiguous().view(bits), moves.kv[:, 1].contiguous().view(bits)), (
        "values carry no position"
    )
    assert not torch.equal(laid_out[:, 0, 4:], moves.kv[:, 0])


@given(some_chunks(moves=False))
def test_nothing_is_rotated_where_nothing_moves(chunks: list[Chunk]) -> None:
    def must_not_be_called(keys: torch.Tensor, table: torch.Tensor, neox: bool) -> None:
        raise AssertionError

    cache = Cache()
    compose(chunks, [ROTATION] * LAYERS, cache.write, rotate=must_not_be_called)
    assert torch.equal(cache.laid_out(), torch.cat([chunk.kv for chunk in chunks], dim=2))


@given(some_chunks())
def test_composing_leaves_the_chunks_as_they_were(chunks: list[Chunk]) -> None:
    before = [chunk.kv.clone() for chunk in chunks]
    compose(chunks, [ROTATION] * LAYERS, Cache().write)
    assert all(torch.equal(chunk.kv, kv) for chunk, kv in zip(chunks, before, strict=True))


def test_a_moved_key_is_rounded_once_from_float32() -> None:
    """bfloat16 has 8 significant bits: one rounding errs by at most 2^-8 of the number, two would by more."""
    kv = torch.randn(LAYERS, 2, 5, HEADS, HEAD_DIM).to(torch.bfloat16)
    cache = Cache()
    compose([Chunk(ChunkId("moves"), 1_000, kv)], [ROTATION] * LAYERS, cache.write)
    exact = kv[:, 0].to(torch.float32).transpose(0, 1).flatten(1, 2)
    rotate_keys(exact, ROTATION.table(torch.full((5,), -1_000)), ROTATION.neox)
    error = (cache.laid_out()[:, 0].float().transpose(0, 1).flatten(1, 2) - exact).abs()
    assert bool((error <= exact.abs() * 2**-8).all())


@given(some_chunks(), st.integers(0, 3))
def test_the_number_of_layers_gathered_at_once_changes_nothing(chunks: list[Chunk], layers: int) -> None:
    layer_bytes = chunks[0].kv[0].nbytes * sum(chunk.tokens for chunk in chunks) // chunks[0].tokens
    cache = Cache()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("connector.compose.GATHER_BYTES", layers * layer_bytes)
        compose(chunks, [ROTATION] * LAYERS, cache.write)
    assert torch.equal(cache.laid_out(), one_by_one(chunks))


@given(some_chunks())
def test_each_layer_is_rotated_as_it_rotates(chunks: list[Chunk]) -> None:
    other = Rotation(torch.tensor([0.5, 0.05], dtype=torch.float32), neox=False)
    cache, plain, swapped = Cache(), Cache(), Cache()
    compose(chunks, [ROTATION, other, ROTATION], cache.write)
    compose(chunks, [ROTATION] * LAYERS, plain.write)
    compose(chunks, [other] * LAYERS, swapped.write)
    assert torch.equal(cache.laid_out()[[0, 2]], plain.laid_out()[[0, 2]])
    assert torch.equal(cache.laid_out()[1], swapped.laid_out()[1])


def test_no_chunks_are_nothing_to_write() -> None:
    cache = Cache()
    assert compose([], [ROTATION] * LAYERS, cache.write) == 0
    assert cache.written == []


def test_of_a_latent_row_only_what_lies_behind_the_latent_is_rotated() -> None:
    """As multi-head latent attention has it: one part, out of which keys and values are computed again."""
    latent = 5
    rotation = Rotation(torch.tensor([1.0, 0.01], dtype=torch.float32), neox=False, first=latent)
    kv = torch.randn(LAYERS, 1, 6, 1, latent + 4, generator=torch.Generator().manual_seed(1))
    chunks = [Chunk(ChunkId("a"), 40, kv[:, :, :2].contiguous()), Chunk(ChunkId("b"), 2, kv[:, :, 2:].contiguous())]
    cache = Cache()
    assert compose(chunks, [rotation] * LAYERS, cache.write) == 6
    distances = torch.tensor([-40, -40, 0, 0, 0, 0])
    for layer, rows, same in cache.written:
        assert torch.equal(rows, same)
        expected = kv[layer, 0].clone()
        tail = expected[..., latent:].contiguous()
        rotate_keys(tail, rotation.table(distances), rotation.neox)
        assert torch.equal(rows[..., :latent], expected[..., :latent])
        assert torch.equal(rows[..., latent:], tail)
