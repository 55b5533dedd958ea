"""The architectures that we say something about, as tiny random models. The README's table is made from this list.

`python -m tests.connector.architectures` prints that table; a test holds the README to it, and the engine tests hold
the list to the truth.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import AutoConfig, PretrainedConfig

BASE: dict[str, Any] = {
    "vocab_size": 49_152,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
PLAIN = {"rope_theta": 10_000.0, "rope_type": "default"}
ROUGH = 0.5
"""The noise of four layers in bfloat16, where vLLM has no float32 kernel: transformers in bfloat16 is off from itself
in float32 by 0.2 there. Moved keys that are not rotated are off by 7."""


@dataclass(frozen=True)
class Case:
    """One row of the table. `refused` is part of the sentence that start-up refuses with, None for a served model."""

    name: str
    model_type: str
    options: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    refused: str | None = None
    same_in_transformers: bool = True  # whether transformers computes the same function, so that it can be the oracle
    noise: float = 1e-3  # what a log-probability may be off by: see `test_engine_exact.py`, and ROUGH
    amx: bool = False  # whether vLLM runs it usefully only on a CPU with AMX
    always: bool = False  # whether `make test` has it, not `make test-models` only

    def config(self) -> PretrainedConfig:
        return AutoConfig.for_model(self.model_type, **{**BASE, "rope_parameters": PLAIN, **self.options})


def _rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10_000.0, **parameters}}


LATENT: dict[str, Any] = {
    "kv_lora_rank": 512,  # with the 64 below: what vLLM's kernels on CPUs are made for
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 4,  # no experts
    "n_routed_experts": 4,
    "moe_intermediate_size": 64,
    **_rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=512, mscale=1.0, mscale_all_dim=1.0),
}
AMX: dict[str, Any] = {"engine": {"dtype": "bfloat16"}, "noise": ROUGH, "amx": True}

CASES = [
    Case("Llama, one key head (multi-query)", "llama", {"num_key_value_heads": 1}),
    Case("Llama, as many key heads as heads", "llama", {"num_key_value_heads": 4}),
    Case(
        "Llama, llama3 scaling",
        "llama",
        _rope(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=256,
        ),
        always=True,
    ),
    Case("Llama, linear scaling", "llama", _rope(rope_type="linear", factor=4.0)),
    Case("Llama, dynamic NTK (a fixed table in vLLM)", "llama", _rope(rope_type="dynamic", factor=4.0)),
    Case(
        "Llama, YaRN with its amplitude",
        "llama",
        _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=512),
    ),
    Case("Llama, without prefix caching", "llama", engine={"prefix_caching": False}),
    Case("Llama, compiled", "llama", engine={"eager": False}),
    Case("Mistral", "mistral", {"sliding_window": None}),
    Case(
        "Mistral with a sliding window in every layer",
        "mistral",
        {"sliding_window": 64},
        refused="every layer has a sliding window",
    ),
    Case("Qwen2 (biases)", "qwen2"),
    Case("Qwen3 (normalised keys)", "qwen3", always=True),
    Case("StableLM (partial rotary)", "stablelm", {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}}),
    Case(
        "Cohere Command R (interleaved rotary)",
        "cohere",
        {"logit_scale": 1.0, "tie_word_embeddings": True},
        always=True,
    ),
    Case(
        "GPT-J (interleaved, partial rotary)",
        "gptj",
        {
            "n_embd": 128,
            "n_layer": 4,
            "n_head": 4,
            "num_key_value_heads": 4,
            "n_inner": 256,
            "n_positions": 2048,
            "rotary_dim": 16,
        },
    ),
    Case("GLM-4 (interleaved, partial rotary)", "glm4", {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}}),
    Case("Granite (scaled residuals)", "granite", {"residual_multiplier": 0.5, "attention_multiplier": 0.2}),
    Case("Phi-3 (fused projections)", "phi3", {"sliding_window": None}),
    Case(
        "Phi-3, LongRoPE",
        "phi3",
        {
            "sliding_window": None,
            "original_max_position_embeddings": 8,  # transformers takes the long factors from there on, vLLM always
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": [1.0] * 16,
                "long_factor": [2.0 + n / 4 for n in range(16)],
                "original_max_position_embeddings": 8,
            },
        },
        engine={"max_model_len": 2048},
    ),
    Case(
        "GLM, Phi, GPT-NeoX and others that vLLM runs through transformers",
        "glm",
        refused="not among those proved",
        always=True,
    ),
    Case(
        "Gemma 3 (sliding and global layers that rotate differently)",
        "gemma3_text",
        {
            "sliding_window": 64,
            "query_pre_attn_scalar": 32,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
        always=True,
    ),
    Case(
        "Gemma 2 (sliding and global layers, capped logits)",
        "gemma2",
        {"query_pre_attn_scalar": 32, "tie_word_embeddings": True, "sliding_window": 64},
    ),
    Case("DeepSeek-V2 (multi-head latent attention; on CPUs with AMX)", "deepseek_v2", LATENT, **AMX, always=True),
    Case("DeepSeek-V3 (the same)", "deepseek_v3", {**LATENT, "q_lora_rank": 64}, **AMX),
    Case(
        "DeepSeek-V2 without YaRN (vLLM's kernel for CPUs rotates it wrongly)",
        "deepseek_v2",
        {**LATENT, "rope_parameters": PLAIN},
        **AMX,
        refused="does not agree with keys moved by their distance",
    ),
    Case("GPT-2 (learned positions)", "gpt2", refused="not among those proved"),
    Case("Llama, fp8 KV cache", "llama", engine={"kv_cache_dtype": "fp8"}, same_in_transformers=False, always=True),
    # Last: its workers are bound by an environment variable, beside which no other engine may start.
    Case("Llama, tensor parallel over 2 workers", "llama", engine={"tensor_parallel": 2}, always=True),
]


def table() -> str:
    """The README's rows."""
    lines = ["| model | memory |", "|---|---|", "| Llama (grouped-query attention) | injected |"]
    for case in CASES:
        outcome = "injected" if case.refused is None else f"refused: {case.refused}"
        lines.append(f"| {case.name} | {outcome} |")
    return "\n".join(lines)


if __name__ == "__main__":
    import sys

    sys.stdout.write(table() + "\n")
