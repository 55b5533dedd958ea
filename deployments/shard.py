"""A shard replica: the users it owns, their facts, their index, and the engine that holds their chunks.

A plain class; `cluster/app.py` wraps it with `serve.deployment()`. The gateway calls it through a handle, pinned by
the replica's unique id, which is also the shard's name: a restarted replica is a new shard and owns nobody.

    chat     check the epoch ─► embed and search ─► plan ─► pin ─► generate ─► unpin
    add      check the epoch ─► append to Redis (acknowledged) ─► embed and encode in the background
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, TypeVar

from connector.ledger import SHARED, ChunkLedger
from connector.plan import plan_memory
from connector.port import Engine, EngineDelta
from connector.template import PromptTemplate
from deployments.chat_plan import ChatPlan, ChatPlanner
from deployments.encoder import Encoder
from deployments.heads import Heads
from deployments.messages import (
    AddCall,
    AddedFact,
    ChatCall,
    ChatDelta,
    ChatEvent,
    ChatFinished,
    ChatStarted,
    FactCall,
    FactPage,
    FactView,
    ForgetCall,
    ListCall,
    MemoryUse,
)
from deployments.ports import Embeds
from deployments.resident import Residents
from sharding.errors import Busy, EngineFailed, InvalidRequest, NotFound, TooLarge, WrongShard
from sharding.facts import Fact, FactStore
from sharding.ids import FactId, Placement, UserId
from sharding.user_memory import UserMemory, UserTable

T = TypeVar("T")
log = logging.getLogger(__name__)


class Shard:
    """The calls that a gateway makes. `max_requests_in_flight` chats run at once; one more is `Busy`."""

    def __init__(
        self,
        engine: Engine,
        ledger: ChunkLedger,
        encoder: Encoder,
        heads: Heads,
        residents: Residents,
        embedder: Embeds,
        template: PromptTemplate,
        table: UserTable,
        store: FactStore,
        *,
        max_requests_in_flight: int,
        max_fact_tokens: int,
    ) -> None:
        self.engine = engine
        self.ledger = ledger
        self.encoder = encoder
        self.heads = heads
        self.residents = residents
        self.embedder = embedder
        self.template = template
        self.table = table
        self.store = store
        self.planner = ChatPlanner(engine, template, embedder, heads, residents)
        self.requests_in_flight = 0
        self.counters = {"chats_inject": 0, "chats_prompt": 0, "chats_off": 0, "facts_added": 0}
        self.counters |= {"injected_tokens": 0, "prefix_cached_tokens": 0, "fallbacks": 0}
        self._max_requests_in_flight = max_requests_in_flight
        self._max_fact_tokens = max_fact_tokens
        self._background: set[asyncio.Task[Any]] = set()

    async def warm_up(self) -> None:
        """Runs each path once: the default head is encoded and injected, a sentence embedded."""
        await self.embedder.embed(["What do you know about me?"])
        head = await self.heads.piece(self.template.default_head())
        await self.heads.encoded()
        tail = self.template.split([{"role": "user", "content": "Hello"}])[1]
        limits = {"max_model_len": self.engine.max_model_len, "max_tokens": 2}
        plan = plan_memory(self.residents.servable(head), [], tail, "", inject=True, **limits)
        async for _ in self.engine.generate("warm-up", plan, self.engine.sampling(2)):
            pass

    def close(self) -> None:
        """Ends the engine and what runs beside it."""
        self.encoder.close()
        self.embedder.close()
        self.engine.shutdown()

    # -- chat -------------------------------------------------------------------------------------------------------

    async def chat(self, call: ChatCall) -> AsyncGenerator[ChatEvent, None]:
        """The events of one completion. Closing the generator aborts the generation and releases its chunks.

        Raises `Busy`, `WrongShard`, `Unavailable`, `InvalidRequest`, `ContextTooLong` before the first event, and
        `EngineFailed` at any time.
        """
        with self._admitted():
            plan = await self._plan(call)
            with self.ledger.pinned(call.asker or SHARED, [id_ for id_, _ in plan.prompt.load]):
                sampling = self.engine.sampling(plan.max_tokens, call.sampling.stop, **call.sampling.given())
                # Both are closed before the pins end: until it is aborted, a request may still read its chunks.
                async with (
                    aclosing(self.engine.generate(call.request_id, plan.prompt, sampling)) as deltas,
                    aclosing(self._events(plan, deltas)) as events,
                ):
                    async for event in events:
                        yield event

    async def _plan(self, call: ChatCall) -> ChatPlan:
        if call.mode == "off" or call.top_k == 0:
            return await self.planner.plain(call, MemoryUse("off"))
        if call.placement is None:
            return await self.planner.plain(call, MemoryUse(call.mode))
        async with self._use(call.placement) as memory:
            return await self.planner.with_memory(call, memory)

    async def _events(self, plan: ChatPlan, deltas: AsyncIterator[EngineDelta]) -> AsyncGenerator[ChatEvent, None]:
        use = plan.use
        self.counters[f"chats_{use.mode}"] += 1
        began = time.perf_counter()
        completion_tokens = 0
        started = False
        async for delta in deltas:
            completion_tokens += len(delta.token_ids)
            use = replace(
                use,
                injected_tokens=delta.injected_tokens,
                prefix_cached_tokens=delta.cached_tokens,
                fallback=delta.fallback,
                engine_ttft_s=use.engine_ttft_s or time.perf_counter() - began,
            )
            if not started:
                started = True
                yield ChatStarted(len(plan.prompt.token_ids), use)
            if delta.text:
                yield ChatDelta(delta.text)
            if delta.finish_reason is not None:
                self.counters["injected_tokens"] += use.injected_tokens
                self.counters["prefix_cached_tokens"] += use.prefix_cached_tokens
                self.counters["fallbacks"] += use.fallback is not None
                if delta.finish_reason not in ("stop", "length"):
                    raise EngineFailed(f"The engine ended this request early ({delta.finish_reason}).")
                yield ChatFinished("length" if delta.finish_reason == "length" else "stop", completion_tokens, use)

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        if self.requests_in_flight >= self._max_requests_in_flight:
            raise Busy("This shard is answering as many chats as it can; retry shortly.", retry_after_s=1.0)
        self.requests_in_flight += 1
        try:
            yield
        finally:
            self.requests_in_flight -= 1

    # -- memories ---------------------------------------------------------------------------------------------------

    async def add(self, call: AddCall) -> tuple[AddedFact, ...]:
        """Stores facts; they are durable when this returns, and found by the next chat.

        Raises `TooLarge` for a fact of too many tokens, `InvalidRequest` for a blank one; then nothing is stored.
        """
        for text in call.texts:
            if not text.strip():
                raise InvalidRequest("A fact's text is blank.", field="messages")
            tokens = len(self.template.fact(text))
            if tokens > self._max_fact_tokens:
                raise TooLarge(
                    f"A fact takes {tokens} tokens; at most {self._max_fact_tokens} are allowed. Split it.",
                    field="messages",
                )
        return await self._to_its_end(self._add(call))

    async def _add(self, call: AddCall) -> tuple[AddedFact, ...]:
        async with self._use(call.placement) as memory, memory.write_lock:
            added = await self.store.append(call.placement, call.texts, call.request_id, datetime.now(UTC))
            memory.add(fact for fact, _ in added)
            await self.residents.added(memory)
            self.counters["facts_added"] += sum(event == "ADD" for _, event in added)
            self._soon("Indexing is left to the next chat", self._index(call.placement))
            return tuple(AddedFact(self._view(memory, fact), event) for fact, event in added)

    async def list_facts(self, call: ListCall) -> FactPage:
        """One page, oldest first."""
        async with self._use(call.placement) as memory:
            await self.residents.ready(memory)
            start = (call.page - 1) * call.page_size
            facts = memory.facts[start : start + call.page_size]
            return FactPage(len(memory), tuple(self._view(memory, fact) for fact in facts))

    async def get_fact(self, call: FactCall) -> FactView:
        """Raises `NotFound`."""
        async with self._use(call.placement) as memory:
            await self.residents.ready(memory)
            fact = memory.get(call.fact_id)
            if fact is None:
                raise _no_fact(call.fact_id)
            return self._view(memory, fact)

    async def delete_fact(self, call: FactCall) -> None:
        """When this returns the fact is gone: from Redis, the index, and every chunk that was encoded from it or behind
        it on this shard. Raises `NotFound`."""
        await self._to_its_end(self._delete_fact(call))

    async def _delete_fact(self, call: FactCall) -> None:
        async with self._use(call.placement) as memory, memory.write_lock:
            deleted = await self.store.delete(call.placement, call.fact_id)
            known = memory.remove(call.fact_id)
            await self.residents.changed(memory)  # also where it is gone already: from the workers perhaps it is not
            if not deleted and not known:
                raise _no_fact(call.fact_id)

    async def forget(self, call: ForgetCall) -> int:
        """Deletes all of a user's facts, as `delete_fact` does; how many there were."""
        return await self._to_its_end(self._forget(call))

    async def _forget(self, call: ForgetCall) -> int:
        async with self._use(call.placement) as memory, memory.write_lock:
            count = await self.store.delete_all(call.placement)
            memory.clear()
            await self.residents.changed(memory)
            return count

    @asynccontextmanager
    async def _use(self, placement: Placement) -> AsyncIterator[UserMemory]:
        """The user's memory, kept while in use; a user that turns out to be another shard's is forgotten here."""
        try:
            async with self.table.use(placement) as memory:
                yield memory
        except WrongShard:
            self.table.drop(placement)
            if placement.user not in self.table:  # may be held under another placement
                self._soon("Chunks of a user who left are dropped later", self.residents.left(placement.user))
            raise

    async def _to_its_end(self, write: Coroutine[Any, Any, T]) -> T:
        """A write goes on where its caller has gone away: what is done in Redis has to be done here, too."""
        task = asyncio.create_task(write)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return await asyncio.shield(task)

    async def _index(self, placement: Placement) -> None:
        async with self._use(placement) as memory:
            await self.residents.index(memory)

    def _soon(self, else_: str, work: Coroutine[Any, Any, None]) -> None:
        """Work that nobody waits for; `else_` says what its failure means."""

        def done(task: asyncio.Task[None]) -> None:
            self._background.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.warning("%s: %s", else_, error)

        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(done)

    def _view(self, memory: UserMemory, fact: Fact) -> FactView:
        encoded = self.residents.encoded(memory, fact.id)
        return FactView(fact.id, UserId(fact.user), fact.text, fact.created_at, fact.updated_at, encoded)


def _no_fact(fact_id: FactId) -> NotFound:
    return NotFound(f"This user has no memory with the id {fact_id}.", field="memory_id")
