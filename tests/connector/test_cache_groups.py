"""Which of vLLM's caches can take injected memory, asked of the groups that vLLM forms where a connector is set."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec

from connector.memory_connector import _refusal

SHAPE: dict[str, Any] = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
GLOBAL = FullAttentionSpec(**SHAPE)
SLIDING = SlidingWindowSpec(**SHAPE, sliding_window=64)
LOCAL = ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64)


def refusal(*layers: KVCacheSpec) -> str | None:
    config = VllmConfig()
    config.scheduler_config.disable_hybrid_kv_cache_manager = True  # as vLLM does for a connector like ours
    groups = get_kv_cache_groups(config, {f"layers.{n}.attn": spec for n, spec in enumerate(layers)})
    caches: Any = SimpleNamespace(kv_cache_groups=groups)
    return _refusal(caches)


@pytest.mark.parametrize("layers", [[GLOBAL, GLOBAL], [SLIDING, GLOBAL, SLIDING]])
def test_global_layers_and_sliding_ones_beside_them_are_served(layers: list[KVCacheSpec]) -> None:
    assert refusal(*layers) is None


@pytest.mark.parametrize("layers", [[SLIDING], [SLIDING, SLIDING], [LOCAL, LOCAL]])
def test_layers_that_all_forget_are_refused(layers: list[KVCacheSpec]) -> None:
    assert "every layer has a sliding window" in str(refusal(*layers))


def test_groups_of_caches_are_refused() -> None:
    two: Any = SimpleNamespace(kv_cache_groups=[None, None])
    assert "do not form one group" in str(_refusal(two))
