"""Adds while no shard lives: the gateway stores them itself, and whichever shard comes next finds them.

    no shard lives ─► the user is claimed for `NOBODY`, under the next epoch ─► append under it, as a shard would
    a shard lives  ─► it claims the user from `NOBODY`, under the next epoch ─► loads the facts, embeds, encodes

Any gateway may append under `NOBODY`'s epoch: an append is one script that needs nothing held in memory, so several of
them at once do no harm. From the moment that a shard is the owner they are refused like any stale owner, and the
gateway asks that shard. Bytes that a user may have are checked as a shard checks them, but without a lock: two adds at
once may exceed them by one of the two.

Refused: whatever needs more than Redis, which is every other call. Those wait for a shard (`owner_calls.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from connector.template import PromptTemplate
from deployments.memory_calls import AddCall, AddedFact, DistilCall, EventView, MemoryCall
from deployments.memory_reads import view_of
from deployments.memory_writes import check_texts, moment, scopes_of, told_again, told_in
from deployments.quotas import Quotas
from sharding.errors import Unavailable
from sharding.fact_records import instant, text_hash
from sharding.facts import FactStore
from sharding.ids import Placement
from sharding.memory import UserMemory
from sharding.turns import Event


class Unattended:
    """Answers adds for users whom nobody owns."""

    def __init__(
        self, store: FactStore, open_template: Callable[[], PromptTemplate], quotas: Quotas, *, max_fact_tokens: int
    ) -> None:
        """`open_template`: reads the model's tokenizer; called in a thread, with the first add."""
        self._store = store
        self._open_template = open_template
        self._quotas = quotas
        self._max_fact_tokens = max_fact_tokens
        self._template: PromptTemplate | None = None
        self._opening = asyncio.Lock()

    async def ask(self, call: MemoryCall[Any]) -> Any:
        """The answer to an `AddCall` or a `DistilCall`. Raises what a shard raises for it, and `Unavailable` where this
        process cannot read the model's tokenizer."""
        if isinstance(call, AddCall):
            return await self._add(call)
        assert isinstance(call, DistilCall)
        return await self._keep_turn(call)

    async def _add(self, call: AddCall) -> tuple[AddedFact, ...]:
        template = await self._tokenizer()
        await asyncio.to_thread(check_texts, template, call.texts, "messages", self._max_fact_tokens)
        now = moment(call.told_at)
        memory = await self._memory(call.placement)
        if again := told_again(memory, call.texts):
            await self._store.delete(call.placement, again)
            for id in again:
                memory.remove(id)
        await self._store.registry.register(call.placement.user, scopes_of(call.placement, [call]), now)
        told = told_in(call)
        known = {fact.text_hash for fact in memory.facts}
        await self._quotas.admit(memory, [one for one in told if text_hash(one.text) not in known])
        added = await self._store.append(call.placement, told, call.request_id, now)
        return tuple(AddedFact(view_of(fact, encoded=False), event) for fact, event in added)

    async def _keep_turn(self, call: DistilCall) -> EventView:
        owner, now = call.placement.user, datetime.now(UTC)
        await self._store.registry.register(owner, scopes_of(call.placement, [call.turn]), now)
        event = await self._store.turns.event(owner, call.request_id)
        if event is None:
            event = Event("PENDING", instant(now), instant(now))
            await self._store.turns.begin(call.placement, call.request_id, call.turn, event)
        return EventView(call.request_id, event.status, event.created_at, event.updated_at)

    async def _memory(self, placement: Placement) -> UserMemory:
        """The facts as they are now, without an index."""
        facts = [replace(fact, embedding=None) for fact in await self._store.load(placement.user)]
        return UserMemory(placement, 1, facts)

    async def _tokenizer(self) -> PromptTemplate:
        async with self._opening:
            if self._template is None:
                try:
                    self._template = await asyncio.to_thread(self._open_template)
                except Exception as error:  # whatever a tokenizer's files or library come up with
                    raise Unavailable(
                        "No shard runs, and this gateway cannot read the model's tokenizer; retry shortly.",
                        retry_after_s=5.0,
                    ) from error
            return self._template
