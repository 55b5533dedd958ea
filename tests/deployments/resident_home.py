"""One resident user with everything that follows the facts: template, embeddings, encoder, ledger. Only the engine, the
embedder and the store are stand-ins."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from slow_engine import STEP_TOKENS, SlowEngine

from connector.ledger import ChunkLedger
from connector.template import PromptTemplate
from connector.tiers import Tiers
from deployments.canary import Canary
from deployments.encode_pace import EncodePace
from deployments.encoder import Encoder
from deployments.resident import Residents
from deployments.trial import Trial
from sharding.facts import Fact, text_hash
from sharding.ids import FactId, Placement, ShardId, UserId
from sharding.user_memory import UserMemory

BUDGET = 10_000
WINDOW = 2
DIM = 2
PLACEMENT = Placement(UserId("alice"), ShardId("here"), 1)


class LetterTokenizer:
    """A token a character, and a chat template of one line."""

    chat_template = "yes"

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        return "".join(f"[{message['role']}] {message['content']}\n" for message in messages) + "[assistant]"

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(letter) for letter in text]


class LengthEmbedder:
    """Embeds a text by its length; counts what it was asked."""

    model = b"length"

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.asked.append(list(texts))
        await self.gate.wait()
        angles = np.array([len(text) for text in texts], np.float32)
        return np.stack([np.cos(angles), np.sin(angles)], axis=1)


class Shelf:
    """The part of `FactStore` that keeps embeddings."""

    def __init__(self) -> None:
        self.kept: dict[FactId, bytes] = {}
        self.fails_with: Exception | None = None

    async def put_embeddings(self, placement: Placement, embeddings: Mapping[FactId, bytes]) -> None:
        if self.fails_with is not None:
            raise self.fails_with
        assert placement == PLACEMENT
        self.kept.update(embeddings)


class Nobody:
    """Knows of no verdict, and keeps none."""

    async def verdict(self, name: str) -> str | None:
        return None

    async def keep_verdict(self, name: str, told: str) -> None: ...


class Home:
    """`Residents` and everything around them; the encoder, the ledger and the memory are the real ones."""

    def __init__(self, budget: int = BUDGET, *, keep_stale: bool = False) -> None:
        self.engine = SlowEngine(budget)
        self.now = 0.0
        self.ledger = ChunkLedger(budget, self.engine.token_bytes, clock=lambda: self.now)
        self.tiers = Tiers(self.engine, self.ledger)  # type: ignore[arg-type]
        self.encoder = Encoder(self.engine, self.ledger, EncodePace(STEP_TOKENS), self.tiers)  # type: ignore[arg-type]
        self.embedder = LengthEmbedder()
        self.shelf = Shelf()
        self.template = PromptTemplate(LetterTokenizer())
        parts: Any = (self.engine, self.template, self.embedder, self.encoder, self.tiers)
        self.residents = Residents(
            self.shelf,  # type: ignore[arg-type]
            self.embedder,  # type: ignore[arg-type]
            self.encoder,
            self.tiers,
            self.template,
            model_digest="model",
            window_facts=WINDOW,
            room_tokens=1_000,
            keep_stale=keep_stale,
        )
        self.canary = Canary(Trial(*parts, priority=1), Nobody(), window_facts=WINDOW, fixed=0)
        self.memory = UserMemory(PLACEMENT, DIM, embedding_model=LengthEmbedder.model)

    async def tell(self, *seqs: int) -> None:
        self.memory.add(fact(seq) for seq in seqs)
        await self.residents.changed(self.memory)

    async def correct(self, seq: int, text: str) -> None:
        held = self.memory.get(fact(seq).id)
        assert held is not None
        self.memory.replace(replace(held, text=text, text_hash=text_hash(text), version=held.version + 1), None)
        await self.residents.changed(self.memory)

    async def delete(self, seq: int) -> None:
        assert self.memory.remove(fact(seq).id)
        await self.residents.changed(self.memory)

    async def settled(self) -> None:
        await self.encoder.settled(PLACEMENT.user)

    def encoded(self) -> set[int]:
        return {f.seq for f in self.memory.facts if self.residents.encoded(self.memory, f.id)}

    def worker_texts(self) -> list[str]:
        return sorted("".join(map(chr, tokens)) for tokens in self.engine.chunks.values())


def fact(seq: int) -> Fact:
    text = f"fact {seq}"
    return Fact(FactId(f"f{seq}"), PLACEMENT.user, text, text_hash(text), "t", seq, 1, "now", "now")
