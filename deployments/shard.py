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
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, TypeVar

import torch
from transformers import AutoTokenizer
from vllm import SamplingParams

from connector.engine import EngineDelta, EngineSettings, MemoryEngine
from connector.ledger import ChunkLedger
from connector.plan import PromptPlan, plan_memory, plan_plain
from connector.template import PromptTemplate
from deployments.embedder import Embedder
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
    Sampling,
)
from deployments.resident import Residents
from deployments.settings import ShardSettings
from sharding.directory import Directory
from sharding.errors import Busy, EngineFailed, InvalidRequest, NotFound, TooLarge, WrongShard
from sharding.facts import Fact, FactStore
from sharding.ids import FactId, Placement, ShardId, UserId
from sharding.lease import Lease
from sharding.user_memory import UserMemory, UserTable

DEFAULT_MAX_TOKENS = 256

T = TypeVar("T")

log = logging.getLogger(__name__)


class Shard:
    """The calls that a gateway makes. `max_requests_in_flight` chats run at once; one more is `Busy`."""

    def __init__(
        self,
        engine: MemoryEngine,
        ledger: ChunkLedger,
        encoder: Encoder,
        heads: Heads,
        residents: Residents,
        embedder: Embedder,
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
        async for _ in self.engine.generate("warm-up", plan, SamplingParams(max_tokens=2)):
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
            plan, use = await self._plan(call)
            owner = call.placement.user if call.placement is not None else ""
            with self.ledger.pinned(owner, [id_ for id_, _ in plan.load]):
                deltas = self.engine.generate(call.request_id, plan, _sampling(call.sampling, self._max_tokens(call)))
                async with aclosing(self._events(plan, use, deltas)) as events:
                    async for event in events:
                        yield event

    async def _plan(self, call: ChatCall) -> tuple[PromptPlan, MemoryUse]:
        """Retrieval and the prompt's layout, before the engine is asked for anything."""
        limits = {"max_model_len": self.engine.max_model_len, "max_tokens": self._max_tokens(call)}
        placement = call.placement
        if placement is None or call.mode == "off" or call.top_k == 0:
            owner = placement.user if placement is not None else None
            plan = plan_plain(self.template.plain(call.messages), owner, **limits)
            return plan, MemoryUse("off")
        async with self._use(placement) as memory:
            chunks = await self.residents.ready(memory)
            began = time.perf_counter()
            vector = (await self.embedder.embed([_question(call.messages)]))[0]
            embedded = time.perf_counter()
            facts = memory.search(vector, call.top_k)
            found = time.perf_counter()
            use = MemoryUse(call.mode, embed_s=embedded - began, search_s=found - embedded)
            if not facts:
                return plan_plain(self.template.plain(call.messages), placement.user, **limits), use
            head, tail = self.template.split(call.messages)
            plan = plan_memory(
                self.residents.servable(await self.heads.piece(head)),
                [self.residents.servable(chunks.piece(fact.id)) for fact in facts],
                tail,
                placement.user,
                inject=call.mode == "inject",
                **limits,
            )
            kept = tuple(fact.id for fact in facts[: plan.kept])
            return plan, replace(use, fact_ids=kept, memory_tokens=plan.memory_tokens, left_out=plan.left_out)

    async def _events(
        self, plan: PromptPlan, use: MemoryUse, deltas: AsyncIterator[EngineDelta]
    ) -> AsyncGenerator[ChatEvent, None]:
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
                yield ChatStarted(len(plan.token_ids), use)
            if delta.text:
                yield ChatDelta(delta.text)
            if delta.finish_reason is not None:
                self.counters["injected_tokens"] += use.injected_tokens
                self.counters["prefix_cached_tokens"] += use.prefix_cached_tokens
                self.counters["fallbacks"] += use.fallback is not None
                if delta.finish_reason not in ("stop", "length"):
                    raise EngineFailed(f"The engine ended this request early ({delta.finish_reason}).")
                yield ChatFinished("length" if delta.finish_reason == "length" else "stop", completion_tokens, use)

    def _max_tokens(self, call: ChatCall) -> int:
        asked = call.sampling.max_tokens
        return asked if asked is not None else min(DEFAULT_MAX_TOKENS, self.engine.max_model_len // 4)

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
            await self.residents.changed(memory)
            self.counters["facts_added"] += sum(event == "ADD" for _, event in added)
            self._index_soon(call.placement)
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
            known = memory.get(call.fact_id) is not None
            if not await self.store.delete(call.placement, call.fact_id) and not known:
                raise _no_fact(call.fact_id)
            memory.remove(call.fact_id)
            await self.residents.changed(memory)

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
            raise

    async def _to_its_end(self, write: Coroutine[Any, Any, T]) -> T:
        """A write goes on where its caller has gone away: what is done in Redis has to be done here, too."""
        task = asyncio.create_task(write)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return await asyncio.shield(task)

    def _index_soon(self, placement: Placement) -> None:
        async def index() -> None:
            async with self._use(placement) as memory:
                await self.residents.index(memory)

        task = asyncio.create_task(index())
        self._background.add(task)
        task.add_done_callback(self._indexed)

    def _indexed(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("Indexing is left to the next chat: %s", error)

    def _view(self, memory: UserMemory, fact: Fact) -> FactView:
        encoded = self.residents.encoded(memory, fact.id)
        return FactView(fact.id, UserId(fact.user), fact.text, fact.created_at, fact.updated_at, encoded)


def _question(messages: Iterable[dict[str, str]]) -> str:
    """What memory is searched for: the last thing that the user said."""
    users = [message["content"] for message in messages if message["role"] == "user"]
    return users[-1] if users else ""


def _no_fact(fact_id: FactId) -> NotFound:
    return NotFound(f"This user has no memory with the id {fact_id}.", field="memory_id")


def _sampling(sampling: Sampling, max_tokens: int) -> SamplingParams:
    given = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }
    return SamplingParams(
        max_tokens=max_tokens,
        stop=list(sampling.stop),
        **{name: value for name, value in given.items() if value is not None},
    )


async def open_shard(
    settings: ShardSettings, me: ShardId, directory: Directory, store: FactStore, lease: Lease
) -> Shard:
    """Starts the engine and puts a shard together around it, warm: the first chat pays for nothing. Raises
    `StartupError`."""
    torch.set_num_threads(1)
    engine = await MemoryEngine.start(
        EngineSettings(
            settings.model_path,
            chunk_budget_bytes=settings.chunk_device_bytes,
            max_model_len=settings.max_model_len,
            kv_cache_bytes=settings.kv_cache_bytes,
            eager=not torch.cuda.is_available(),
        )
    )
    template = PromptTemplate(AutoTokenizer.from_pretrained(settings.model_path))
    embedder = Embedder(settings.embedding_path)
    ledger = ChunkLedger(settings.chunk_device_bytes, engine.token_bytes)
    encoder = Encoder(engine, ledger)
    heads = Heads(engine.model_digest, encoder, ledger)
    residents = Residents(
        store,
        embedder,
        encoder,
        ledger,
        template,
        model_digest=engine.model_digest,
        window_facts=settings.window_facts,
        room_tokens=engine.max_model_len - 1,
    )
    shard = Shard(
        engine,
        ledger,
        encoder,
        heads,
        residents,
        embedder,
        template,
        UserTable(me, directory, store, lease, dim=embedder.dim, capacity=settings.resident_users),
        store,
        max_requests_in_flight=settings.max_requests_in_flight,
        max_fact_tokens=settings.max_fact_tokens,
    )
    await shard.warm_up()
    return shard
