"""Which models are served from chunks: those whose keys can be moved exactly, read from their own rotary modules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from toy_model import ARCHITECTURES, ToyAttention, ToyImpl, model_around, rotary
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT, get_rope

from connector.probe import PROVED_ARCHITECTURES, Refused, read_rotations, read_updates
from connector.rotation import Rotation

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
EXACT: dict[str, dict[str, Any]] = {
    "plain": {},
    "llama3": LLAMA3,
    "yarn, with its amplitude": YARN,
    "linear": {"rope_type": "linear", "factor": 2.0},
    "partial": {"partial_rotary_factor": 0.5},
    "another base": {"rope_theta": 1_000_000.0},
}


def read_rotation(module: torch.nn.Module) -> Rotation:
    """The rotation of a model of one layer."""
    (rotation,) = read_rotations(model_around({"layer.attn": torch.nn.Linear(2, 2)}, module), ["layer.attn"])
    return rotation


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", EXACT)
def test_a_rotation_that_grows_linearly_with_the_position_is_read_from_the_module_and_proved(
    kind: str, dtype: torch.dtype, neox: bool
) -> None:
    module = rotary(dtype, neox, head_dim=64, **EXACT[kind])
    rotation = read_rotation(module)
    assert rotation.neox == neox
    assert rotation.rotary_dim == (32 if kind == "partial" else 64)


def test_the_frequencies_of_a_plain_rotation_are_powers_of_its_base() -> None:
    expected = 10_000.0 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    read = read_rotation(rotary(head_dim=64)).frequencies
    torch.testing.assert_close(read.double(), expected, rtol=1e-6, atol=1e-9)


def test_each_layer_has_the_rotation_of_the_module_beside_it() -> None:
    shared, other = rotary(), rotary(rope_theta=20_000.0)
    tree = torch.nn.ModuleDict(
        {
            str(n): model_around({"self_attn.attn": torch.nn.Linear(2, 2)}, module)
            for n, module in enumerate([shared, other, shared])
        }
    )
    first, second, third = read_rotations(tree, [f"{n}.self_attn.attn" for n in range(3)])
    assert first is third
    assert not torch.equal(first.frequencies, second.frequencies)


def test_a_layer_without_a_plain_rotary_module_beside_it_is_refused() -> None:
    with pytest.raises(Refused, match=r"not plainly rotary \(Linear\)"):
        read_rotation(torch.nn.Linear(2, 2))
    with pytest.raises(Refused, match=r"not plainly rotary \(no rotary module\)"):
        read_rotations(torch.nn.ModuleDict({"attn": torch.nn.Linear(2, 2)}), ["attn"])


def test_angles_that_do_not_grow_linearly_are_refused() -> None:
    """As a scaling that sets in at some length does."""
    module = rotary(positions=300)
    table = module._compute_cos_sin_cache()
    table[200:] = table[: len(table) - 200]
    module._compute_cos_sin_cache = lambda: table
    try:
        with pytest.raises(Refused, match="do not grow linearly"):
            read_rotation(module)
    finally:
        del module._compute_cos_sin_cache  # vLLM shares equal modules


def test_a_module_that_does_something_else_than_its_table_says_is_refused() -> None:
    module = rotary(positions=301)
    plain = module.forward
    module.forward = lambda positions, query, key: plain(positions // 2, query, key)
    try:
        with pytest.raises(Refused, match="does not agree with keys moved"):
            read_rotation(module)
    finally:
        del module.forward


# -- attention --------------------------------------------------------------------------------------------------------


def check(layers: list[torch.nn.Module], architectures: list[str]) -> None:
    named = dict(zip("abc", layers, strict=False))
    read_updates(named, dict.fromkeys(named, torch.zeros(1, 1, 1, 1)), architectures)


def test_plain_attention_of_a_proved_architecture_is_accepted() -> None:
    for architecture in PROVED_ARCHITECTURES:
        check([ToyAttention(), ToyAttention()], [architecture])


@pytest.mark.parametrize("architectures", [[], ["GPT2LMHeadModel"], [*ARCHITECTURES, "GPT2LMHeadModel"]])
def test_an_architecture_that_was_never_proved_is_refused_and_the_proved_ones_named(architectures: list[str]) -> None:
    with pytest.raises(Refused, match=r"not among those proved .*LlamaForCausalLM"):
        check([ToyAttention()], architectures)


class FusedBackend:
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "FUSED"


@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [
        ("attn_type", "encoder_only", "not decoder self-attention"),
        ("kv_sharing_target_layer_name", "model.layers.0", "shares the cache of model.layers.0"),
        ("head_size_v", 4, "values of another width"),
        ("attn_backend", FusedBackend, "FUSED does not update its cache apart"),
        ("impl", object(), "TOY does not update its cache apart"),
        ("num_kv_heads", 1, "differ in heads"),
        ("dtype", torch.bfloat16, "differ in heads, head size or dtype"),
    ],
)
def test_attention_whose_cache_cannot_be_read_and_written_is_refused(
    attribute: str, value: object, reason: str
) -> None:
    odd = ToyAttention()
    setattr(odd, attribute, value)
    with pytest.raises(Refused, match=reason):
        check([ToyAttention(), odd], ARCHITECTURES)


def test_what_is_no_attention_or_not_there_is_refused() -> None:
    with pytest.raises(Refused, match="b is not attention that is known here but Linear"):
        check([ToyAttention(), torch.nn.Linear(2, 2)], ARCHITECTURES)
    with pytest.raises(Refused, match="no attention layer"):
        check([], ARCHITECTURES)


# -- latent attention -------------------------------------------------------------------------------------------------


class LatentBackend:
    @staticmethod
    def get_name() -> str:
        return "AMX_MLA"


class SlowLatentBackend:
    @staticmethod
    def get_name() -> str:
        return "CPU_MLA"


class ToyLatent(MLAAttention):
    """Has what is asked of a latent attention layer, and computes nothing."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self.use_sparse = False
        self.sliding_window: int | None = None
        self.hisparse_cache = None
        self.kv_cache_dtype = "auto"
        self.head_size, self.kv_lora_rank = 12, 8
        self.attn_backend: Any = LatentBackend
        self.impl: Any = ToyImpl()


def test_latent_attention_is_accepted_as_one_part_whose_end_is_rotated() -> None:
    updates = read_updates(
        {"a": ToyLatent(), "b": ToyLatent()}, dict.fromkeys("ab", torch.zeros(3, 1, 4, 12)), ["DeepseekV2ForCausalLM"]
    )
    assert [(u.parts, u.kv_heads, u.head_dim, u.rotated_from) for u in updates] == [(1, 1, 12, 8)] * 2


@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [
        ("use_sparse", True, "does not attend to all of its cache"),
        ("sliding_window", 64, "does not attend to all of its cache"),
        ("kv_cache_dtype", "fp8_ds_mla", "caches its latent as fp8_ds_mla"),
        ("attn_backend", SlowLatentBackend, "CPU_MLA cannot attend to tokens of an earlier step"),
        ("impl", object(), "AMX_MLA does not update its cache apart"),
    ],
)
def test_latent_attention_whose_cache_cannot_be_read_and_written_is_refused(
    attribute: str, value: object, reason: str
) -> None:
    odd = ToyLatent()
    setattr(odd, attribute, value)
    with pytest.raises(Refused, match=reason):
        check([ToyLatent(), odd], ["DeepseekV2ForCausalLM"])


def test_layers_of_both_kinds_are_refused() -> None:
    with pytest.raises(Refused, match="differ in heads"):
        check([ToyAttention(), ToyLatent()], ARCHITECTURES)


# -- scaling that was meant to depend on the length -------------------------------------------------------------------


@pytest.mark.parametrize("scaling", [{"rope_type": "dynamic", "factor": 4.0}, {"rope_type": "dynamic", "alpha": 3.0}])
def test_dynamic_ntk_is_served_because_vllms_table_is_fixed(scaling: dict[str, Any]) -> None:
    module = rotary(positions=700, head_dim=64, max_trained_positions=300, **scaling)
    rotation = read_rotation(module)
    for seen in (10, 699, 10):  # whatever length it has seen
        module(torch.arange(seen), torch.randn(seen, 64), torch.randn(seen, 64))
        assert torch.equal(read_rotation(module).frequencies, rotation.frequencies)


@pytest.mark.parametrize(("max_model_len", "factor"), [(64, 1.5), (65, 3.0)])
def test_longrope_is_served_with_the_factors_that_vllm_chose_at_start_up(max_model_len: int, factor: float) -> None:
    scaling = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 64}
    factors = {"short_factor": [1.5] * 4, "long_factor": [3.0] * 4}
    config: Any = VllmConfig()
    config.model_config = SimpleNamespace(max_model_len=max_model_len)
    _ROPE_DICT.clear()  # vLLM shares equal modules, whatever the configuration was
    with set_current_vllm_config(config):
        module = get_rope(8, 512, True, {**scaling, **factors}, torch.float32)
    plain = 10_000.0 ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    torch.testing.assert_close(read_rotation(module).frequencies.double(), plain / factor, rtol=1e-6, atol=1e-9)
