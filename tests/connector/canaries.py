"""A real engine's canary, for the tests that have one running."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from cluster.models import embedding_model
from cluster.settings import Settings
from connector.engine import MemoryEngine
from connector.ledger import ChunkLedger
from connector.port import ENCODE_PRIORITY
from connector.template import PromptTemplate
from connector.tiers import Tiers
from deployments.canary import OWNER, Canary
from deployments.embedder import Embedder
from deployments.encode_pace import CPU_STEP_TOKENS, EncodePace
from deployments.encoder import Encoder
from deployments.messages import Verdict
from deployments.trial import Trial


class Nowhere:
    """Where no verdict is kept."""

    async def verdict(self, name: str) -> str | None:
        return None

    async def keep_verdict(self, name: str, told: str) -> None: ...


async def ask_canary(engine: MemoryEngine, tokenizer: Path, budget_bytes: int) -> Verdict:
    """The verdict on the engine's model; of its questions nothing is left."""
    template = PromptTemplate(AutoTokenizer.from_pretrained(tokenizer))
    ledger = ChunkLedger(budget_bytes, engine.token_bytes)
    tiers = Tiers(engine, ledger)
    encoder = Encoder(engine, ledger, EncodePace(CPU_STEP_TOKENS), tiers)
    embedder = Embedder(embedding_model(Settings.from_environment()))
    trial = Trial(engine, template, embedder, encoder, tiers, priority=ENCODE_PRIORITY)
    try:
        await trial.encode_head()
        verdict = await Canary(trial, Nowhere(), window_facts=20, fixed=None).prove()
        assert ledger.ids_of(OWNER) == []
        await encoder.forget(ledger.ids_of(""))
    finally:
        encoder.close()
        tiers.close()
        embedder.close()
    return verdict
