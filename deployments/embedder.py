"""The embedding model: all-MiniLM-L6-v2 or any encoder of its kind, through plain transformers.

Sentences are mean-pooled over their tokens and normalised (Reimers and Gurevych 2019, Sentence-BERT, section 3).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModel, AutoTokenizer

BATCH = 8  # so that a question waits behind at most so many facts: some tens of milliseconds on a CPU core
MAX_TOKENS = 256  # what MiniLM was trained for; longer texts are cut


class Embedder:
    """Runs on one thread of its own, a batch at a time, so that the event loop goes on and questions come between."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._model = AutoModel.from_pretrained(model).eval()
        self.dim = int(self._model.config.hidden_size)
        self.model = _fingerprint(self._model)
        self._thread = ThreadPoolExecutor(1, "embedder")

    async def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Unit vectors, float32 `[len(texts), dim]`."""
        loop = asyncio.get_running_loop()
        batches = [list(texts[i : i + BATCH]) for i in range(0, len(texts), BATCH)]
        parts = [await loop.run_in_executor(self._thread, self._embed_batch, batch) for batch in batches]
        return np.concatenate(parts) if parts else np.empty((0, self.dim), np.float32)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _embed_batch(self, texts: list[str]) -> NDArray[np.float32]:
        tokens = self._tokenizer(texts, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
        with torch.inference_mode():
            hidden = self._model(**tokens).last_hidden_state
        mask = tokens["attention_mask"].unsqueeze(-1)
        pooled = (hidden * mask).sum(1) / mask.sum(1)
        vectors: NDArray[np.float32] = torch.nn.functional.normalize(pooled.float(), dim=-1).numpy()
        return vectors


def _fingerprint(model: torch.nn.Module) -> bytes:
    """Eight bytes of a digest of its weights' names, shapes and a sample of their values, and of how we use it: vectors
    of two models say nothing of each other."""
    digest = hashlib.blake2b(f"mean pooling of {MAX_TOKENS} tokens".encode(), digest_size=8)
    for name, weight in model.named_parameters():
        sample = weight.detach().flatten()[:: max(1, weight.numel() // 64)].float()
        digest.update(f"{name}{tuple(weight.shape)}".encode() + sample.numpy().tobytes())
    return digest.digest()
