"""Composition on a CUDA device. Imports nothing that needs vLLM, so it runs where only torch is installed.

Not run by us yet: no machine at hand had a GPU.
"""

from __future__ import annotations

import pytest
import torch

from connector.chunk import Chunk, ChunkId
from connector.compose import compose
from connector.rotation import Rotation

LAYERS, HEADS, HEAD_DIM = 4, 8, 128
ROTATION = Rotation(500_000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM), neox=True)


def composed(chunks: list[Chunk], device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    written: list[tuple[torch.Tensor, torch.Tensor]] = []
    there = [Chunk(chunk.id, chunk.position, chunk.kv.to(device)) for chunk in chunks]
    compose(there, [ROTATION] * LAYERS, lambda _, keys, values: written.append((keys.cpu(), values.cpu())))
    return written


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_composition_on_the_device_is_the_cpus_within_one_rounding() -> None:
    """The float32 rotation may differ in its last bits, and so round to the neighbouring bfloat16: 2^-8 of the key."""
    chunks = [
        Chunk(ChunkId(str(n)), 300 * n, torch.randn(LAYERS, 2, 25, HEADS, HEAD_DIM).to(torch.bfloat16))
        for n in range(50)
    ]
    for (keys, values), (expected_keys, expected_values) in zip(
        composed(chunks, "cuda"), composed(chunks, "cpu"), strict=True
    ):
        assert torch.equal(values, expected_values)
        torch.testing.assert_close(keys.float(), expected_keys.float(), rtol=2**-7, atol=2**-9)
