"""What the tests of `connector` share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def language_model() -> Path:
    """The packaged SmolLM2-135M-Instruct, prepared once a machine."""
    # Here, as tests for a GPU run where little more than torch and Triton is installed.
    from cluster.models import prepare_language_model
    from cluster.settings import Settings

    return prepare_language_model(Settings.from_environment())


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory, language_model: Path) -> Path:
    """A random Llama of 4 layers in float32, 2 KB of keys and values a token."""
    import torch
    from transformers import LlamaConfig

    from tests.connector.engines import save_tiny_model

    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_theta": 10_000.0, "rope_type": "default"},
        tie_word_embeddings=False,
    )
    return save_tiny_model(config, language_model, tmp_path_factory.mktemp("tiny") / "llama", torch.float32)


@pytest.fixture
async def left_as_it_was(engine: Any) -> AsyncIterator[None]:
    """For each test of a module's engine: see `engines.check_integrity`."""
    from tests.connector.engines import check_integrity

    yield
    await check_integrity(engine)
