"""Turn a GGUF checkpoint into the directory that vLLM serves: `python -m cluster.convert SOURCE TARGET`.

A program of its own, so that torch and transformers (700 MB) are gone again when the server starts. Writes bf16
safetensors, the configuration, and the tokenizer with its chat template; an existing directory is filled, and
`cluster/models.py` publishes it. Fails with a last line on stderr that says why.
"""

from __future__ import annotations

import sys
from pathlib import Path


def convert(source: Path, target: Path) -> None:
    """Dequantise the GGUF file `source` into `target` (bf16, Hugging Face layout)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    if tokenizer.chat_template is None:
        raise ValueError(f"{source.name} has no chat template")
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
