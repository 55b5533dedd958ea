"""Asking an engine about a memory, as text and injected under one setting or another: what the canary and the quality
benchmark have in common. Chunks are made and counted as those of users are.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from connector.chunk import chunk_id
from connector.ledger import SHARED
from connector.plan import Piece, PromptPlan, plan_memory
from connector.port import Engine
from connector.template import PromptTemplate
from connector.tiers import Tiers
from connector.windows import FactChunks, Line
from deployments.encoder import Encoder
from deployments.heads import Heads
from deployments.ports import Embeds
from sharding.ids import FactId


@dataclass(frozen=True, slots=True)
class Setting:
    """How memory is injected: facts that stand before a fact while it is encoded, how many of those nearest to a
    question are prefilled as text, and how many facts at most are all of them."""

    window_facts: int
    prefill_nearest: int
    text_facts: int

    def __str__(self) -> str:
        return f"window {self.window_facts}, r = {self.prefill_nearest}, text up to {self.text_facts}"

    def prefilled(self, facts: int) -> int:
        """Of so many facts those that are prefilled."""
        return facts if facts <= self.text_facts else self.prefill_nearest


@dataclass(frozen=True, slots=True)
class Told:
    """What the engine answered. `ttft_s` is from handing it the prompt to the first token."""

    text: str
    ttft_s: float
    prompt_tokens: int
    injected_tokens: int
    cached_tokens: int


class Trial:
    """A shard's engine with what it needs to answer about memories that belong to nobody."""

    def __init__(
        self,
        engine: Engine,
        template: PromptTemplate,
        embedder: Embeds,
        encoder: Encoder,
        tiers: Tiers,
        *,
        priority: int,
    ) -> None:
        self.engine = engine
        self.tiers = tiers
        self.encoder = encoder
        self._template = template
        self._embedder = embedder
        self._priority = priority
        self.head = tuple(template.default_head())

    def lines(self, facts: Sequence[str]) -> list[Line]:
        """The facts, in the order of telling, as they stand in a prompt; each is named by its place."""
        return [Line(FactId(str(seq)), seq, tuple(self._template.fact(text))) for seq, text in enumerate(facts)]

    async def encode(self, owner: str, facts: Sequence[str], window_facts: int) -> list[Piece] | None:
        """The facts as pieces whose chunks are here when this returns; None where they could not all be encoded."""
        digest, room = self.engine.model_digest, self.engine.max_model_len - 1
        chunks = FactChunks(owner, digest, self.head, window_facts=window_facts, room_tokens=room)
        lines = self.lines(facts)
        chunks.update(lines)
        await self.encoder.submit(owner, chunks)
        await self.encoder.settled(owner)
        if not all(map(self.tiers.device.peek_resident, chunks.ids())):
            return None
        return [chunks.piece(line.fact) for line in lines]

    async def encode_head(self) -> None:
        """Returns when the default head is here, if there is room for it."""
        heads = Heads(self.engine.model_digest, self.encoder, self.tiers.device, self.head)
        await heads.piece(self.head)
        await heads.encoded()

    async def forget(self, owner: str) -> None:
        """Drops the owner's chunks."""
        await self.encoder.forget(sorted(self.tiers.ids_of(owner)))

    async def ranked(self, facts: Sequence[str], questions: Sequence[str]) -> NDArray[np.int64]:
        """`[len(questions), len(facts)]`: places of the facts, the nearest to the question first."""
        told, asked = await self._embedder.embed(facts), await self._embedder.embed(questions)
        return np.argsort(-(asked @ told.T), axis=1, kind="stable")

    def plan(
        self,
        owner: str,
        question: str,
        facts: Sequence[Piece],
        prefill_nearest: int | None,
        max_tokens: int,
        begins: str = "",
    ) -> PromptPlan:
        """The prompt with `facts`, nearest first, and how the answer begins; with `prefill_nearest` None all of it is
        text."""
        head, tail = self._template.split([{"role": "user", "content": question}])
        tail += self._template.answer(begins)
        return plan_memory(
            Piece(tuple(head), chunk_id(self.engine.model_digest, SHARED, (), head)),
            facts,
            tail,
            owner,
            inject=prefill_nearest is not None,
            max_model_len=self.engine.max_model_len,
            max_tokens=max_tokens,
            prefill_nearest=prefill_nearest or 0,
        )

    async def ask(self, plan: PromptPlan, max_tokens: int) -> Told:
        """The engine's greedy answer. Raises `EngineFailed`."""
        text, first, injected, cached = "", 0.0, 0, 0
        sampling = self.engine.sampling(max_tokens, temperature=0.0)
        began = time.perf_counter()
        request = f"trial-{uuid.uuid4().hex}"
        async with aclosing(self.engine.generate(request, plan, sampling, priority=self._priority)) as deltas:
            async for delta in deltas:
                first = first or time.perf_counter() - began
                text += delta.text
                injected, cached = delta.injected_tokens, delta.cached_tokens
        return Told(text, first, len(plan.token_ids), injected, cached)
