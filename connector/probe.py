"""Is this model one whose keys can be moved exactly? Asked once, at start-up, of the loaded model itself.

The frequencies come from the model's own rotary module. They are then proved against it: keys that the module
rotates at p and we rotate on by v - p must be those that it rotates at v. What fails the proof, and what was never
proved by our tests, is refused with one sentence; no model is ever served wrongly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.v1.attention.backend import AttentionType

from connector.rotation import Rotation, rotate_keys

PROVED_ARCHITECTURES = frozenset(
    {
        "CohereForCausalLM",
        "Gemma3ForCausalLM",
        "GlmForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "StableLmForCausalLM",
    }
)
"""Architectures whose equivalence with plain prefill our tests show, moved chunks included.

The proof by module cannot see everything (layers that leave the rotation out, say), hence the list.
"""

ROUNDINGS = 4
"""How many roundings of the model's dtype the proof allows: the module rounds its cosine and sine, its key at p, we
round the moved key, and the module rounds its key at v."""


class Refused(Exception):
    """This model cannot be served from chunks; the message is the reason, one sentence."""


def check_attention(layers: dict[str, Attention], architectures: list[str]) -> None:
    """Raises `Refused` for attention whose cache cannot be captured or written through its own update method."""
    unknown = [name for name in architectures if name not in PROVED_ARCHITECTURES]
    if unknown or not architectures:
        known = ", ".join(sorted(PROVED_ARCHITECTURES))
        raise Refused(f"the architecture {', '.join(unknown) or '(none named)'} is not among those proved ({known})")
    if not layers:
        raise Refused("the model has no attention layer with a paged cache")
    for name, layer in layers.items():
        if not isinstance(layer, Attention):
            raise Refused(f"{name} is not plain attention but {type(layer).__name__}")
        if layer.attn_type != AttentionType.DECODER:
            raise Refused(f"{name} is not decoder self-attention")
        if layer.kv_sharing_target_layer_name is not None:
            raise Refused(f"{name} shares the cache of {layer.kv_sharing_target_layer_name}")
        if layer.head_size_v != layer.head_size:
            raise Refused(f"{name} has values of another width than its keys")
        if layer.attn_backend.forward_includes_kv_cache_update or not hasattr(layer.impl, "do_kv_cache_update"):
            raise Refused(f"the attention backend {layer.attn_backend.get_name()} does not update its cache apart")
    shapes = {(layer.num_kv_heads, layer.head_size, layer.dtype) for layer in layers.values()}
    if len(shapes) > 1:
        raise Refused("its attention layers differ in heads, head size or dtype")


def read_rotations(model: torch.nn.Module, layers: Sequence[str]) -> list[Rotation]:
    """The rotation of each of the attention `layers` (qualified names), out of the rotary module beside it.

    Layers that share a module share the `Rotation`. Raises `Refused` for a layer without a plain one.
    """
    read: dict[int, Rotation] = {}
    rotations: list[Rotation] = []
    for name in layers:
        module = getattr(model.get_submodule(name.rpartition(".")[0]), "rotary_emb", None)
        if not isinstance(module, RotaryEmbeddingBase):
            kind = "no rotary module" if module is None else type(module).__name__
            raise Refused(f"the positions of {name} are not plainly rotary ({kind})")
        if id(module) not in read:
            read[id(module)] = _rotation_of(module)
            _prove(module, read[id(module)])
        rotations.append(read[id(module)])
    return rotations


def _rotation_of(module: Any) -> Rotation:
    table = module._compute_cos_sin_cache().to(torch.float64)
    if table.dim() != 2 or table.shape[0] < 2:
        raise Refused(f"the table of {type(module).__name__} is not one row a position")
    cos, sin = table.chunk(2, dim=-1)
    frequencies = torch.atan2(sin[1], cos[1])
    amplitude = torch.hypot(sin[1], cos[1])
    positions = torch.arange(table.shape[0], dtype=torch.float64)[:, None]
    # float32 forms its angles as position * frequency with a relative error of 2^-23 each, in the table and in row 1.
    allowed = 1e-5 + positions * frequencies.abs() * 2**-22 * amplitude
    off = torch.maximum(
        ((positions * frequencies).cos() * amplitude - cos).abs(),
        ((positions * frequencies).sin() * amplitude - sin).abs(),
    )
    if bool((off > allowed).any()):
        raise Refused(f"the angles of {type(module).__name__} do not grow linearly with the position")
    return Rotation(frequencies.to(torch.float32), neox=bool(module.is_neox_style))


def _prove(module: Any, rotation: Rotation) -> None:
    """Raises `Refused` where the module disagrees with moving its keys by `rotation`."""
    dtype, head = module.dtype, module.head_size
    longest = int(module.cos_sin_cache.shape[0]) - 1
    device = module.cos_sin_cache.device
    generator = torch.Generator().manual_seed(0)
    here = torch.tensor([0, 1, 7, longest // 3, longest // 2, longest], dtype=torch.int64)
    there = torch.tensor([longest, 0, longest // 2, 1, longest // 2, 3], dtype=torch.int64)
    keys = torch.randn(len(here), 2, head, generator=generator).to(dtype)

    def rotated(positions: torch.Tensor) -> torch.Tensor:
        query = keys.clone().to(device).view(len(here), -1)
        return module(positions.to(device), query, query.clone())[1].view(len(here), 2, head).cpu()

    moved = rotated(here).to(torch.float32)
    rotate_keys(moved, rotation.table(there - here), rotation.neox)
    expected = rotated(there).to(torch.float32)
    # Beside the roundings, the module's table formed its angles in float32: off by up to position * 2^-23 radians.
    allowed = (ROUNDINGS * torch.finfo(dtype).eps + longest * 2**-23) * expected.norm(dim=-1, keepdim=True)
    if bool(((moved.to(dtype).to(torch.float32) - expected).abs() > allowed).any()):
        raise Refused(f"{type(module).__name__} does not agree with keys moved by their distance")
