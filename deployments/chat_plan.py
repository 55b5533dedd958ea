"""A chat's prompt, from retrieval to layout, before the engine is asked for anything.

    without memory   the messages through the model's chat template
    with memory      cut the template ─► embed the question ─► search ─► head, facts, tail
                     of facts that were corrected since others were encoded behind them, text nearest to the question

Refused: messages that the context has no room for. A prompt that fits without memory is served without it, and what was
left out is reported. Tokenising runs beside the event loop: the messages of one request may be a megabyte.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from connector.plan import PromptPlan, plan_memory, plan_plain
from connector.port import Engine
from connector.template import PromptTemplate
from deployments.canary import Canary
from deployments.heads import Heads
from deployments.messages import ChatCall, MemoryUse
from deployments.ports import Embeds
from deployments.resident import Residents
from deployments.telemetry import step
from sharding.facts import Fact
from sharding.user_memory import UserMemory

DEFAULT_MAX_TOKENS = 256


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """The prompt, what it took from memory, and how many tokens the answer may have."""

    prompt: PromptPlan
    use: MemoryUse
    max_tokens: int


class ChatPlanner:
    """Plans chats of one shard."""

    def __init__(
        self,
        engine: Engine,
        template: PromptTemplate,
        embedder: Embeds,
        heads: Heads,
        residents: Residents,
        canary: Canary,
    ) -> None:
        self._engine = engine
        self._template = template
        self._embedder = embedder
        self._heads = heads
        self._residents = residents
        self._canary = canary

    async def plain(self, call: ChatCall, use: MemoryUse) -> ChatPlan:
        """A prompt without memory. Raises `InvalidRequest`, `ContextTooLong`."""
        token_ids = await asyncio.to_thread(self._template.plain, call.messages)
        room = self._engine.max_model_len
        max_tokens = self._max_tokens(call, len(token_ids))
        asker = None if call.asker is None else self._residents.cached_as(call.asker)
        return ChatPlan(plan_plain(token_ids, asker, max_model_len=room, max_tokens=max_tokens), use, max_tokens)

    async def with_memory(self, call: ChatCall, memory: UserMemory) -> ChatPlan:
        """A prompt with what `memory` holds about the last question. Raises `InvalidRequest`, `ContextTooLong`."""
        question = _question(call.messages)
        use = MemoryUse(call.mode)
        if not question or not len(memory):
            return await self.plain(call, use)
        with step("chat", "facts"):
            chunks = await self._residents.ready(memory)
        room = self._engine.max_model_len
        head, tail = await asyncio.to_thread(self._template.split, call.messages)
        max_tokens = self._max_tokens(call, len(head) + len(tail))
        if len(head) + len(tail) + max_tokens > room:
            return await self.plain(call, replace(use, left_out=min(call.top_k, len(memory))))
        began = time.perf_counter()
        with step("chat", "embed"):
            vector = (await self._embedder.embed([question]))[0]
        embed_s = time.perf_counter() - began
        head_piece = await self._heads.piece(head)
        began = time.perf_counter()
        with step("chat", "search"):
            facts = memory.search(vector, call.top_k)
        use = replace(use, embed_s=embed_s, search_s=time.perf_counter() - began)
        if call.mode == "inject" and await self._residents.fetch(memory, facts):
            facts = memory.search(vector, call.top_k)
        # Nothing is awaited from the last search to the plan: a fact could be deleted meanwhile.
        prefill_nearest = self._prefill_nearest(call, len(facts))
        corrected: list[Fact] = []
        if prefill_nearest is not None and prefill_nearest < len(facts):
            corrected = [fact for fact in facts if chunks.corrected(fact.id)]
            facts = corrected + [fact for fact in facts if not chunks.corrected(fact.id)]
        plan = plan_memory(
            self._residents.servable(head_piece),
            [
                *(self._residents.correction(fact, self._canary.verdict.phrasing) for fact in corrected),
                *(self._residents.fact(chunks, fact.id) for fact in facts[len(corrected) :]),
            ],
            tail,
            self._residents.cached_as(memory.placement.user),
            inject=prefill_nearest is not None,
            prefill_nearest=(prefill_nearest or 0) + len(corrected),
            max_model_len=room,
            max_tokens=max_tokens,
        )
        stale = len(chunks.stale_ids().intersection(id_ for id_, _ in plan.load))
        use = replace(use, memory_tokens=plan.memory_tokens, left_out=plan.left_out, stale_facts=stale)
        if not plan.kept:
            return await self.plain(call, use)
        if call.mode == "inject" and prefill_nearest is None:
            use = replace(use, fallback=self._canary.verdict.reason)
        return ChatPlan(plan, replace(use, fact_ids=tuple(fact.id for fact in facts[: plan.kept])), max_tokens)

    def _prefill_nearest(self, call: ChatCall, facts: int) -> int | None:
        """How many of the facts, the nearest ones, are prefilled; None: all, nothing is injected. The caller's wish
        goes before the canary's verdict."""
        if call.mode != "inject":
            return None
        return self._canary.verdict.prefilled(facts) if call.prefill_nearest is None else call.prefill_nearest

    def _max_tokens(self, call: ChatCall, prompt_tokens: int) -> int:
        if (asked := call.sampling.max_tokens) is not None:
            return asked
        return max(1, min(DEFAULT_MAX_TOKENS, self._engine.max_model_len - prompt_tokens))


def _question(messages: Iterable[dict[str, str]]) -> str:
    """What memory is searched for: the last thing that the user said; "" where the user said nothing."""
    users = [message["content"] for message in messages if message["role"] == "user"]
    return users[-1].strip() if users else ""
