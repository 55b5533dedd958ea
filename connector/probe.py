"""Is this model one whose keys can be moved exactly? Asked once, at start-up, of the loaded model itself.

The frequencies come from the model's own rotary module. They are then proved against it: keys that the module
rotates at p and we rotate on by v - p must be those that it rotates at v. What fails the proof, and what was never
proved by our tests, is refused with one sentence; no model is ever served wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.layers.rotary_embedding.phi3_long_rope_scaled_rope import Phi3LongRoPEScaledRotaryEmbedding
from vllm.v1.attention.backend import AttentionType

from connector.cache_update import CacheUpdate, LatentUpdate, PlainUpdate
from connector.rotation import Rotation, rotate_keys

PROVED_ARCHITECTURES = frozenset(
    {
        "CohereForCausalLM",
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "GPTJForCausalLM",
        "Glm4ForCausalLM",
        "GraniteForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Phi3ForCausalLM",
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


def read_updates(
    layers: Mapping[str, Any], caches: Mapping[str, torch.Tensor], architectures: Sequence[str]
) -> list[CacheUpdate]:
    """The cache update of each layer, in the order of `layers`.

    Raises `Refused` for attention whose cache cannot be captured or written through its own update method.
    """
    unknown = [name for name in architectures if name not in PROVED_ARCHITECTURES]
    if unknown or not architectures:
        known = ", ".join(sorted(PROVED_ARCHITECTURES))
        raise Refused(f"the architecture {', '.join(unknown) or '(none named)'} is not among those proved ({known})")
    if not layers:
        raise Refused("the model has no attention layer with a paged cache")
    updates: list[CacheUpdate] = []
    for name, layer in layers.items():
        if isinstance(layer, MLAAttention):
            _check_latent(name, layer)
            updates.append(LatentUpdate(layer, caches[name]))
        elif isinstance(layer, Attention):
            _check_plain(name, layer)
            updates.append(PlainUpdate(layer, caches[name]))
        else:
            raise Refused(f"{name} is not attention that is known here but {type(layer).__name__}")
    shapes = {(update.parts, update.kv_heads, update.head_dim, update.rotated_from, update.dtype) for update in updates}
    if len(shapes) > 1:
        raise Refused("its attention layers differ in heads, head size or dtype")
    return updates


def _check_plain(name: str, layer: Attention) -> None:
    if layer.attn_type != AttentionType.DECODER:
        raise Refused(f"{name} is not decoder self-attention")
    if layer.kv_sharing_target_layer_name is not None:
        raise Refused(f"{name} shares the cache of {layer.kv_sharing_target_layer_name}")
    if layer.head_size_v != layer.head_size:
        raise Refused(f"{name} has values of another width than its keys")
    if layer.attn_backend.forward_includes_kv_cache_update or not hasattr(layer.impl, "do_kv_cache_update"):
        raise Refused(f"the attention backend {layer.attn_backend.get_name()} does not update its cache apart")


def _check_latent(name: str, layer: MLAAttention) -> None:
    if layer.use_sparse or layer.sliding_window is not None or layer.hisparse_cache is not None:
        raise Refused(f"{name} does not attend to all of its cache")
    if layer.kv_cache_dtype != "auto":
        raise Refused(f"{name} caches its latent as {layer.kv_cache_dtype}")
    if layer.attn_backend.get_name() == "CPU_MLA":
        # It gathers earlier tokens with a kernel that CPUs do not have, so vLLM turns chunked prefill and prefix
        # caching off beside it; injected memory would be such tokens.
        raise Refused("the attention backend CPU_MLA cannot attend to tokens of an earlier step (AMX_MLA can)")
    if not hasattr(layer.impl, "do_kv_cache_update"):
        raise Refused(f"the attention backend {layer.attn_backend.get_name()} does not update its cache apart")


def read_rotations(model: torch.nn.Module, layers: Sequence[str], first: int = 0) -> list[Rotation]:
    """The rotation of each of the attention `layers` (qualified names), out of the rotary module beside it.

    `first` is where in a cached key its rotated elements begin. Layers that share a module share the `Rotation`. Raises
    `Refused` for a layer without a plain one.
    """
    read: dict[int, Rotation] = {}
    rotations: list[Rotation] = []
    for name in layers:
        module = getattr(model.get_submodule(name.rpartition(".")[0]), "rotary_emb", None)
        if not isinstance(module, RotaryEmbeddingBase | Phi3LongRoPEScaledRotaryEmbedding):
            kind = "no rotary module" if module is None else type(module).__name__
            raise Refused(f"the positions of {name} are not plainly rotary ({kind})")
        if id(module) not in read:
            read[id(module)] = _rotation_of(module, first)
            _prove(module, read[id(module)])
        rotations.append(read[id(module)])
    return rotations


def _rotation_of(module: Any, first: int) -> Rotation:
    table = _table_of(module).to(torch.float64)
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
    return Rotation(frequencies.to(torch.float32), neox=getattr(module, "is_neox_style", True), first=first)


def _table_of(module: Any) -> torch.Tensor:
    """float32 `[positions, rotary_dim]`, cosines first: one row for each position, before any rounding.

    It is fixed when the model is loaded, also where the scaling was meant to depend on the length: vLLM computes
    dynamic NTK for the longest context, and chooses LongRoPE's factors by `max_model_len`.
    """
    if isinstance(module, Phi3LongRoPEScaledRotaryEmbedding):
        chosen = (
            (module.max_position_embeddings, module.long_factor, module.long_mscale)
            if module.use_long_rope
            else (module.original_max_position_embeddings, module.short_factor, module.short_mscale)
        )
        return module._compute_cos_sin_cache(*chosen)
    return module._compute_cos_sin_cache()


def _prove(module: Any, rotation: Rotation) -> None:
    """Raises `Refused` where the module disagrees with moving its keys by `rotation`."""
    cache = next(module.buffers())
    dtype, device, head = cache.dtype, cache.device, module.head_size
    longest = len(_table_of(module)) - 1
    generator = torch.Generator().manual_seed(0)
    here = torch.tensor([0, 1, 7, longest // 3, longest // 2, longest], dtype=torch.int64)
    there = torch.tensor([longest, 0, longest // 2, 1, longest // 2, 3], dtype=torch.int64)
    keys = torch.randn(len(here), 2, head, generator=generator).to(dtype)

    def rotated(positions: torch.Tensor) -> torch.Tensor:
        query = keys.clone().to(device)
        if not rotation.first:  # latent attention hands its module heads, and vLLM's kernel for CPUs fails at that
            query = query.view(len(here), -1)
        return module(positions.to(device), query, query.clone())[1].view(len(here), 2, head).cpu()

    moved = rotated(here).to(torch.float32)
    rotate_keys(moved, rotation.table(there - here), rotation.neox)
    expected = rotated(there).to(torch.float32)
    # Beside the roundings, the module's table formed its angles in float32: off by up to position * 2^-23 radians.
    allowed = (ROUNDINGS * torch.finfo(dtype).eps + longest * 2**-23) * expected.norm(dim=-1, keepdim=True)
    if bool(((moved.to(dtype).to(torch.float32) - expected).abs() > allowed).any()):
        raise Refused(f"{type(module).__name__} does not agree with keys moved by their distance")
