"""A shard replica: the users it owns, their facts, their index, and the engine that holds their chunks.

A plain class; `cluster/app.py` wraps it with `serve.deployment()`. The gateway calls it through a handle, pinned by
the replica's unique id, which is also the shard's name: a restarted replica is a new shard and owns nobody.

    chat     check the epoch ─► embed and search ─► plan ─► pin ─► generate ─► unpin
    add      check the epoch ─► append to Redis (acknowledged) ─► embed and encode in the background
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, aclosing, contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

from connector.ledger import SHARED
from connector.memory_counts import MemoryCounts
from connector.plan import plan_memory
from connector.port import Engine, EngineDelta
from connector.template import PromptTemplate
from connector.tiers import Tiers
from deployments.arrivals import Arrivals
from deployments.canary import Canary
from deployments.chat_plan import ChatPlan, ChatPlanner
from deployments.copies import Courier
from deployments.distillation import Distillation
from deployments.distiller import ModelDistiller
from deployments.encoder import Encoder
from deployments.heads import Heads
from deployments.janitor import Janitor
from deployments.memory_calls import (
    AddCall,
    ArrivedCall,
    DeleteCall,
    DistilCall,
    DropCopyCall,
    EventCall,
    ExportCall,
    FactCall,
    FeedbackCall,
    ForgetCall,
    HistoryCall,
    ListCall,
    MemoryCall,
    MoveCall,
    OfferCall,
    RebuildCall,
    SearchCall,
    UpdateCall,
)
from deployments.memory_reads import MemoryReads
from deployments.memory_writes import MemoryWrites
from deployments.messages import ChatCall, ChatDelta, ChatEvent, ChatFinished, ChatStarted, MemoryUse
from deployments.mover import Mover
from deployments.ports import Embeds
from deployments.quotas import Quotas
from deployments.rebalancer import Rebalancer
from deployments.rebuilds import Rebuilds
from deployments.resident import Residents
from deployments.resident_use import ResidentUse
from deployments.telemetry import first_token, step
from deployments.usage import UsageNotes
from sharding.directory import Directory
from sharding.errors import Busy, EngineFailed
from sharding.facts import FactStore
from sharding.ids import ShardId, UserId
from sharding.move_turns import MoveTurns
from sharding.rebuilding import RebuildPolicy
from sharding.user_memory import UserTable

T = TypeVar("T")


class Shard:
    """The calls that a gateway makes. `max_requests_in_flight` chats run at once; one more is `Busy`."""

    def __init__(
        self,
        engine: Engine,
        tiers: Tiers,
        encoder: Encoder,
        heads: Heads,
        residents: Residents,
        embedder: Embeds,
        template: PromptTemplate,
        table: UserTable,
        store: FactStore,
        *,
        canary: Canary,
        max_requests_in_flight: int,
        max_fact_tokens: int,
        quotas: Quotas | None = None,
        rebuilding: RebuildPolicy | None = None,
        nccl: bool = False,
    ) -> None:
        self.engine = engine
        self.tiers = tiers
        self.ledger = tiers.device
        self.encoder = encoder
        self.heads = heads
        self.residents = residents
        self.embedder = embedder
        self.template = template
        self.table = table
        self.usage = UsageNotes(self._bytes_of)
        self.users = ResidentUse(table, residents, self.usage)
        self.store = store
        self.canary = canary
        self.planner = ChatPlanner(engine, template, embedder, heads, residents, canary)
        self.requests_in_flight = 0
        self.counters = {"chats_inject": 0, "chats_prompt": 0, "chats_off": 0}
        self.memory_counts = MemoryCounts()
        self._max_requests_in_flight = max_requests_in_flight
        self.reads = reads = MemoryReads(self.users, residents, store, embedder)
        self.writes = writes = MemoryWrites(
            self.users,
            residents,
            store,
            template,
            reads,
            quotas or Quotas(None, None),
            max_fact_tokens=max_fact_tokens,
        )
        self.rebuilds = Rebuilds(table, self.users, residents, rebuilding or RebuildPolicy())
        self.courier = Courier(engine, tiers, self.usage.rates, nccl=nccl)
        self.mover = Mover(tiers, residents, self.users, table, self.courier)
        self.arrivals = Arrivals(engine, tiers, encoder, residents, table, self.usage.rates, nccl=nccl)
        self.distillation = Distillation(
            self.users, residents, store, reads, writes, embedder, ModelDistiller(engine, template, encoder.salts)
        )
        self._answers: dict[type, Callable[[Any], Awaitable[Any]]] = {
            AddCall: writes.add,
            UpdateCall: writes.update,
            DeleteCall: writes.delete,
            ForgetCall: writes.forget,
            FeedbackCall: writes.feedback,
            ListCall: reads.list_facts,
            SearchCall: reads.search,
            FactCall: reads.get_fact,
            HistoryCall: reads.history,
            ExportCall: reads.export,
            MoveCall: self.mover.move,
            RebuildCall: self.rebuilds.on_demand,
            OfferCall: self.arrivals.offer,
            ArrivedCall: self.arrivals.arrived,
            DropCopyCall: self.arrivals.drop,
            DistilCall: self.distillation.begin,
            EventCall: self.distillation.event,
        }

    def _bytes_of(self, user: UserId) -> int:
        return self.ledger.bytes_of(user)

    async def warm_up(self) -> None:
        """Runs each path once: the default head is encoded and injected, a sentence embedded."""
        await self.tiers.open()
        await self.embedder.embed(["What do you know about me?"])
        head = await self.heads.piece(self.template.default_head())
        await self.heads.encoded()
        tail = self.template.split([{"role": "user", "content": "Hello"}])[1]
        limits = {"max_model_len": self.engine.max_model_len, "max_tokens": 2}
        plan = plan_memory(self.residents.servable(head), [], tail, "", inject=True, **limits)
        async for _ in self.engine.generate("warm-up", plan, self.engine.sampling(2)):
            pass

    def janitor(self, me: ShardId, directory: Directory) -> Janitor:
        """Who removes files of users that are not this shard's."""
        return Janitor(me, self.tiers, self.residents, self.table, directory, self.store)

    def rebalancer(self, me: ShardId, turns: MoveTurns, *, settle_s: float, active_s: float) -> Rebalancer:
        """Who moves users away where this shard carries too much."""
        return Rebalancer(me, self.mover, self.usage.rates, turns, settle_s=settle_s, active_s=active_s)

    async def flush(self, deadline_s: float) -> None:
        """Returns when what is in memory is in files, or the deadline has passed: what is not is encoded again."""
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self.tiers.writer.written()

    def close(self) -> None:
        """Ends the engine and what runs beside it."""
        self.arrivals.close()
        self.distillation.close()
        self.canary.close()
        self.rebuilds.close()
        self.encoder.close()
        self.tiers.close()
        self.embedder.close()
        self.engine.shutdown()

    # -- chat -------------------------------------------------------------------------------------------------------

    async def chat(self, call: ChatCall) -> AsyncGenerator[ChatEvent, None]:
        """The events of one completion. Closing the generator aborts the generation and releases its chunks.

        Raises `Busy`, `WrongShard`, `Unavailable`, `InvalidRequest`, `ContextTooLong` before the first event, and
        `EngineFailed` at any time.
        """
        with self._admitted(), ExitStack() as waiting:
            waiting.enter_context(self.encoder.pace.chat_waits())
            with step("chat", "plan"):
                plan = await self._plan(call)
            with self.ledger.pinned(call.asker or SHARED, [id_ for id_, _ in plan.prompt.load]):
                sampling = self.engine.sampling(plan.max_tokens, call.sampling.stop, **call.sampling.given())
                # Both are closed before the pins end: until it is aborted, a request may still read its chunks.
                async with (
                    aclosing(self.engine.generate(call.request_id, plan.prompt, sampling)) as deltas,
                    aclosing(self._events(plan, deltas)) as events,
                ):
                    async for event in events:
                        waiting.close()
                        yield event

    async def _plan(self, call: ChatCall) -> ChatPlan:
        if call.mode == "off" or call.top_k == 0:
            return await self.planner.plain(call, MemoryUse("off"))
        if call.placement is None:
            return await self.planner.plain(call, MemoryUse(call.mode))
        async with self.users.use(call.placement) as memory:
            return await self.planner.with_memory(call, memory)

    async def _events(self, plan: ChatPlan, deltas: AsyncIterator[EngineDelta]) -> AsyncGenerator[ChatEvent, None]:
        use = plan.use
        self.counters[f"chats_{use.mode}"] += 1
        began, began_ns = time.perf_counter(), time.time_ns()
        completion_tokens = 0
        started = False
        async for delta in deltas:
            completion_tokens += len(delta.token_ids)
            use = replace(
                use,
                injected_tokens=delta.injected_tokens,
                prefix_cached_tokens=delta.cached_tokens,
                fallback=use.fallback or delta.fallback or plan.prompt.unready,
                engine_ttft_s=use.engine_ttft_s or time.perf_counter() - began,
            )
            if not started:
                started = True
                first_token(began_ns, use)
                yield ChatStarted(len(plan.prompt.token_ids), use)
            if delta.text:
                yield ChatDelta(delta.text)
            if delta.finish_reason is not None:
                self.memory_counts.add(plan.prompt, delta)
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

    async def ask(self, call: MemoryCall[T]) -> T:
        """Answers a call about one owner's memory; see `memory_reads.py` and `memory_writes.py` for what each does and
        raises."""
        answer: T = await self._answers[type(call)](call)
        return answer
