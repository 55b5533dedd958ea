"""The fused composition writes what the portable one writes, whatever the layout of the cache and the rotation.

On a CUDA device the kernel itself runs (`make test-gpu`), elsewhere Triton's interpreter runs its logic
(`make test-kernels`). Needs torch and Triton only.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
pytest.importorskip("triton", reason="Triton is not installed here; `make test-kernels` runs these tests with it")

from paged_caches import by_index, caches, random_chunks

from connector.chunk import KVShape
from connector.fused import FusedComposition
from connector.paged import fastest, paged_views, writes_alike
from connector.rotation import Rotation

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
BLOCKS = 7
COMPILED = Path(__file__).with_name("compiled_kernel.py")


def rotation(rotary_dim: int, neox: bool, base: float = 10_000.0) -> Rotation:
    return Rotation((base ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)).to(torch.float32), neox)


def fused(shape: KVShape, of: list[torch.Tensor], rotations: list[Rotation]) -> FusedComposition:
    return FusedComposition(shape, *paged_views(shape, of), rotations)


def assert_same(ours: list[torch.Tensor], expected: list[torch.Tensor], shape: KVShape) -> None:
    """Values bit for bit; keys within one rounding, since a float32 sum of products may be fused or not."""
    rounding = torch.finfo(shape.dtype).eps
    for our, their in zip(ours, expected, strict=True):
        assert torch.equal(our[..., shape.head_dim :], their[..., shape.head_dim :])
        torch.testing.assert_close(our.float(), their.float(), rtol=rounding, atol=1e-5)


@st.composite
def compositions(draw: st.DrawFn) -> tuple[KVShape, int, bool, list[Rotation], list[tuple[int, int]], int, list[int]]:
    """A model, its cache's block size and layout, its rotations, chunks (tokens, position), skip, and slots."""
    dim = draw(st.sampled_from([16, 24, 64]))
    shape = KVShape(draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 8])), dim, draw(st.sampled_from(DTYPES)))
    block_tokens = draw(st.sampled_from([4, 16]))
    kinds = [rotation(draw(st.sampled_from([dim, dim // 2])), neox) for neox in (True, False)]
    rotations = [draw(st.sampled_from(kinds)) for _ in range(shape.layers)]
    tokens = st.tuples(st.integers(1, 12), st.just(0) | st.integers(0, 3_000))
    chunks = draw(st.lists(tokens, min_size=1, max_size=3))
    total = min(sum(length for length, _ in chunks), BLOCKS * block_tokens)
    skip = draw(st.integers(0, total - 1))
    slots = draw(st.permutations(range(BLOCKS * block_tokens)))[: total - skip]
    return shape, block_tokens, draw(st.booleans()), rotations, chunks, skip, list(slots)


@settings(max_examples=30)
@given(compositions(), st.integers(0, 2**31))
def test_it_writes_what_the_portable_composition_writes_and_nowhere_else(
    case: tuple[KVShape, int, bool, list[Rotation], list[tuple[int, int]], int, list[int]], seed: int
) -> None:
    shape, block_tokens, heads_first, rotations, lengths, skip, at = case
    ours, expected = (caches(shape, BLOCKS, block_tokens, heads_first=heads_first, device=DEVICE) for _ in range(2))
    chunks = random_chunks(shape, lengths, seed, DEVICE)
    slots = torch.tensor(at, dtype=torch.int64, device=DEVICE)
    by_index(shape, expected, rotations)(chunks, slots, skip)
    fused(shape, ours, rotations)(chunks, slots, skip)
    assert_same(ours, expected, shape)


@pytest.mark.parametrize(
    ("capability", "neox", "rotary"), [(80, True, 128), (90, True, 128), (90, True, 64), (90, False, 128)]
)
def test_it_compiles_for_a_gpu_and_moves_16_bytes_at_a_time(
    capability: int, neox: bool, rotary: int, tmp_path: Path
) -> None:
    """For one that need not be there. Keys whose pairs are neighbours are moved by the element, values never are."""
    command = (sys.executable, str(COMPILED), str(capability), str(int(neox)), str(rotary))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {
        "PYTHONPATH": os.pathsep.join((str(COMPILED.parents[2]), *sys.path)),
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    instructions = set(done.stdout.split())
    assert {"ld.global.v4.b32", "st.global.v4.b32"} <= instructions
    assert any(name.endswith((".b8", ".b16")) for name in instructions) == (not neox), instructions


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_served_where_they_were_encoded_keep_every_bit_even_the_sign_of_a_zero(dtype: torch.dtype) -> None:
    shape = KVShape(2, 2, 16, dtype)
    (chunk,) = random_chunks(shape, [(9, 0)], device=DEVICE)
    chunk.kv[:, :, 3] = -0.0
    ours = caches(shape, 2, 16, device=DEVICE)
    fused(shape, ours, [rotation(16, True)] * 2)([chunk], torch.arange(9, device=DEVICE), 0)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    for layer, cache in enumerate(ours):
        for plane, written in enumerate(cache[0, :, :9].transpose(0, 1).split(16, dim=-1)):
            assert torch.equal(written.contiguous().view(bits), chunk.kv[layer, plane].contiguous().view(bits))


@pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter truncates to bfloat16; a compiled kernel rounds")
def test_a_moved_key_is_rounded_once_and_to_the_nearest() -> None:
    """bfloat16 has 8 significant bits: rounded to the nearest, a number errs by at most 2^-8 of itself."""
    shape = KVShape(1, 4, 64, torch.bfloat16)
    (chunk,) = random_chunks(shape, [(16, 1_000)], device=DEVICE)
    exact = KVShape(1, 4, 64, torch.float32)
    (wide,) = random_chunks(exact, [(16, 1_000)], device=DEVICE)
    wide.kv.copy_(chunk.kv)
    ours, theirs = caches(shape, 1, 16, device=DEVICE), caches(exact, 1, 16, device=DEVICE)
    rotations, slots = [rotation(64, True)], torch.arange(16, device=DEVICE)
    fused(shape, ours, rotations)([chunk], slots, 0)
    by_index(exact, theirs, rotations)([wide], slots, 0)
    error = (ours[0].float() - theirs[0]).abs()
    assert bool((error <= theirs[0].abs() * 2**-8 + 1e-6).all())


def test_the_proof_at_start_up_accepts_it_and_leaves_the_caches_as_they_were() -> None:
    shape = KVShape(2, 3, 16, torch.bfloat16)
    of = caches(shape, 4, 16, heads_first=False, device=DEVICE)
    for cache in of:
        cache.fill_(7.0)
    rotations = [rotation(16, True), rotation(8, False)]
    assert writes_alike(by_index(shape, of, rotations), fused(shape, of, rotations), shape, of)
    assert all(bool((cache == 7.0).all()) for cache in of)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_it_is_what_a_worker_uses_on_a_cuda_device() -> None:
    shape = KVShape(2, 8, 128, torch.bfloat16)
    of, rotations = caches(shape, 8, 16, device=DEVICE), [rotation(128, True)] * 2
    assert isinstance(fastest(by_index(shape, of, rotations), shape, of, rotations), FusedComposition)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (KVShape(1, 2, 16, torch.float16), "do not hold"),
        (KVShape(1, 4, 16, torch.bfloat16), "not one of blocks"),
        (KVShape(1, 2, 24, torch.bfloat16), "not one of blocks"),
    ],
)
def test_caches_of_another_shape_are_refused(other: KVShape, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        fused(KVShape(1, 2, 16, torch.bfloat16), caches(other, 2, 16, device=DEVICE), [rotation(16, True)])


def test_latent_attention_is_refused() -> None:
    shape = KVShape(1, 2, 16, torch.bfloat16)
    inner = Rotation(torch.ones(4), neox=True, first=8)
    with pytest.raises(ValueError, match="from their first element on"):
        fused(shape, caches(shape, 2, 16, device=DEVICE), [inner])


def test_layers_whose_caches_are_laid_out_differently_are_refused() -> None:
    shape = KVShape(1, 2, 16, torch.bfloat16)
    of = [*caches(shape, 2, 16, device=DEVICE), *caches(shape, 2, 16, heads_first=False, device=DEVICE)]
    with pytest.raises(ValueError, match="not laid out alike"):
        fused(shape, of, [rotation(16, True)] * 2)
