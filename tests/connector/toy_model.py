"""A model's attention layers and rotary module without the model: what the worker's half sees of vLLM, made by hand.

`ToyImpl` keeps a cache of plain slots, `[slots, 2, kv_heads, head_dim]`, so that a test can look at what was written.
The rotary modules are vLLM's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.v1.attention.backend import AttentionType

from connector.worker_side import WorkerSide

LAYERS, HEADS, HEAD_DIM, SLOTS = 3, 2, 8, 64
ARCHITECTURES = ["LlamaForCausalLM"]


class ToyBackend:
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "TOY"


class ToyImpl:
    """Writes rows with a slot of at least 0; `broken_slot` makes a write to it fail, as a lost device would."""

    def __init__(self) -> None:
        self.broken_slot: int | None = None

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        if self.broken_slot in slot_mapping.tolist():
            raise RuntimeError("the device is lost")
        real = slot_mapping >= 0
        kv_cache[slot_mapping[real], 0] = key[real]
        kv_cache[slot_mapping[real], 1] = value[real]


class ToyAttention(Attention):
    """Has what is asked of an attention layer, and computes nothing."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.nn.Module.__init__(self)  # not Attention's: that one chooses a backend and needs a whole engine
        self.attn_type = AttentionType.DECODER
        self.sliding_window: int | None = None
        self.kv_sharing_target_layer_name: str | None = None
        self.num_kv_heads = HEADS
        self.head_size = self.head_size_v = HEAD_DIM
        self.dtype = dtype
        self.attn_backend: Any = ToyBackend
        self.impl: Any = ToyImpl()


def rotary(dtype: torch.dtype = torch.float32, neox: bool = True, positions: int = 512, **parameters: Any) -> Any:
    """One of vLLM's rotary modules, by the parameters of a model's `rope_scaling`."""
    head_dim = parameters.pop("head_dim", HEAD_DIM)
    with set_current_vllm_config(VllmConfig()):
        return get_rope(head_dim, positions, neox, {"rope_theta": 10_000.0, **parameters}, dtype)


def model_around(layers: dict[str, torch.nn.Module], rotary_emb: torch.nn.Module) -> torch.nn.Module:
    """A module tree in which each layer stands under its name, with the rotary module beside it."""
    root = torch.nn.Module()
    for name, layer in layers.items():
        place = root
        *path, last = name.split(".")
        for part in path:
            if part not in dict(place.named_children()):
                place.add_module(part, torch.nn.Module())
            place = place.get_submodule(part)
        place.add_module(last, layer)
        place.add_module("rotary_emb", rotary_emb)
    return root


class ToyModel:
    """A worker's half with its layers, caches and rotation."""

    def __init__(self, budget_bytes: int = 1 << 20, dtype: torch.dtype = torch.float32) -> None:
        # 10 sorts before 2 as text: layers are ordered by number.
        self.layers = {f"model.layers.{n}.self_attn.attn": ToyAttention(dtype) for n in (10, 2, 1)}
        self.caches = {name: torch.zeros(SLOTS, 2, HEADS, HEAD_DIM, dtype=dtype) for name in self.layers}
        self.rotary = rotary(dtype)
        self.worker = WorkerSide(budget_bytes, host_budget_bytes=1 << 20)
        self.worker.register(self.layers, self.caches, ARCHITECTURES)
        self.worker.prove(model_around(self.layers, self.rotary))

    def forward(self, kv: torch.Tensor, slots: Sequence[int]) -> None:
        """A forward pass whose tokens have these keys and values `[tokens, layers, 2, kv_heads, head_dim]`."""
        mapping = torch.tensor(slots, dtype=torch.int64)
        for index, name in enumerate(sorted(self.layers, key=lambda name: int(name.split(".")[2]))):
            layer = self.layers[name]
            layer.impl.do_kv_cache_update(layer, kv[:, index, 0], kv[:, index, 1], self.caches[name], mapping)

    def read(self, slots: Sequence[int]) -> torch.Tensor:
        """What the cache holds there, `[tokens, layers, 2, kv_heads, head_dim]`."""
        names = sorted(self.layers, key=lambda name: int(name.split(".")[2]))
        return torch.stack([self.caches[name][list(slots)] for name in names], dim=1)
