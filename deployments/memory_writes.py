"""What changes one owner's memory on a shard: Redis first, then everything here that follows it, then the answer.

    add      append (acknowledged) ─► embed, index and encode in the background
    update   embed ─► record, embedding and history in one step ─► index ─► the old text's chunk dropped, what was
             encoded behind it stale until it is rebuilt
    delete   records, history, embeddings, turns ─► index ─► chunks dropped ─► the registry

Each runs to its end under the owner's write lock, also where the caller has gone away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from connector.template import PromptTemplate
from deployments.memory_calls import (
    AddCall,
    AddedFact,
    DeleteCall,
    FactView,
    FeedbackCall,
    ForgetCall,
    UpdateCall,
)
from deployments.memory_reads import MemoryReads, held
from deployments.quotas import Quotas
from deployments.resident import Residents
from deployments.resident_use import ResidentUse
from deployments.telemetry import step
from sharding.errors import InvalidRequest, TooLarge
from sharding.facts import AddEvent, Fact, FactStore, Told, text_hash
from sharding.filters import Compare, Filter, matches
from sharding.ids import FactId, Placement
from sharding.memory import UserMemory
from sharding.scopes import FIELDS, entities, entity_of, tenant_of
from sharding.sealing import Unreadable
from sharding.turns import Turn


class MemoryWrites:
    """Writes of resident memories."""

    def __init__(
        self,
        users: ResidentUse,
        residents: Residents,
        store: FactStore,
        template: PromptTemplate,
        reads: MemoryReads,
        quotas: Quotas,
        *,
        max_fact_tokens: int,
    ) -> None:
        self._users = users
        self._residents = residents
        self._store = store
        self._template = template
        self._quotas = quotas
        self._view = reads.view
        self._max_fact_tokens = max_fact_tokens
        self.facts_added = 0

    async def add(self, call: AddCall) -> tuple[AddedFact, ...]:
        """Stores facts; they are durable when this returns, and found by the next chat.

        Raises `TooLarge` for a fact of too many tokens, `InvalidRequest` for a blank one; then nothing is stored.
        """
        await asyncio.to_thread(self._check, call.texts, "messages")  # up to a megabyte
        return await self._users.to_its_end(self._add(call))

    async def _add(self, call: AddCall) -> tuple[AddedFact, ...]:
        async with self._users.use(call.placement) as memory, memory.write_lock:
            added = await self.append(memory, call)
            return tuple(AddedFact(self._view(memory, fact), event) for fact, event in added)

    async def append(self, memory: UserMemory, call: AddCall) -> list[tuple[Fact, AddEvent]]:
        """What `add` does, for who holds the memory's write lock and has checked the texts."""
        now = moment(call.told_at)
        await self._remove(memory, told_again(memory, call.texts))
        await self._store.registry.register(call.placement.user, scopes_of(call.placement, [call]), now)
        texts = told_in(call)
        known = {fact.text_hash for fact in memory.facts}
        await self._quotas.admit(memory, [told for told in texts if text_hash(told.text) not in known])
        with step("remember", "append"):
            added = await self._store.append(call.placement, texts, call.request_id, now)
        await self._residents.read(memory, [fact for fact, _ in added])
        memory.add(fact for fact, _ in added)
        await self._residents.added(memory)
        self.facts_added += sum(event == "ADD" for _, event in added)
        self._users.soon("Indexing is left to the next chat", self._index(call.placement))
        return added

    async def update(self, call: UpdateCall) -> FactView:
        """The new version. When this returns, no request sees the old one: text, index and chunk have changed.

        Raises `NotFound`, `Conflict`, and what `add` raises.
        """
        if call.text is not None:
            await asyncio.to_thread(self._check, [call.text], "text")
        return await self._users.to_its_end(self._update(call))

    async def _update(self, call: UpdateCall) -> FactView:
        async with self._users.use(call.placement) as memory, memory.write_lock:
            return self._view(memory, await self.change(memory, call))

    async def change(self, memory: UserMemory, call: UpdateCall) -> Fact:
        """What `update` does, for who holds the memory's write lock and has checked the text."""
        fact = held(memory, call.fact_id)
        wanted = {"text": call.text, "metadata": call.metadata, "expires_on": call.expires_on}
        changes: dict[str, Any] = {name: value for name, value in wanted.items() if value is not None}
        if call.never_expires:
            changes["expires_on"] = None
        changes = {name: value for name, value in changes.items() if getattr(fact, name) != value}
        if changes:
            embedding = await self._residents.embedding(changes["text"]) if "text" in changes else None
            now = moment(call.told_at)
            await self._quotas.admit(memory, [replace(fact, **changes)], [fact])
            async with self._residents.indexing(memory):
                fact = await self._store.update(call.placement, fact, now=now, embedding=embedding, **changes)
                memory.replace(fact, embedding)
        await self._residents.changed(memory)  # also a repeated call: perhaps the workers did not confirm the first
        return fact

    async def delete(self, call: DeleteCall) -> None:
        """When this returns the fact is gone: from Redis, the index, and every chunk that was encoded from it or behind
        it on this shard. Raises `NotFound`."""
        await self._users.to_its_end(self._delete(call))

    async def _delete(self, call: DeleteCall) -> None:
        await self._users.moved(call.placement.user)
        async with self._users.use(call.placement) as memory, memory.write_lock:
            known = call.fact_id in memory
            if not await self._remove(memory, [call.fact_id]) and not known:
                held(memory, call.fact_id)

    async def forget(self, call: ForgetCall) -> int:
        """Deletes an owner's facts, those that match or all, as `delete` does; how many there were."""
        return await self._users.to_its_end(self._forget(call))

    async def _forget(self, call: ForgetCall) -> int:
        await self._users.moved(call.placement.user)
        try:
            return await self._forget_read(call)
        except Unreadable:  # sealed with a key that is lost: whoever it was may be forgotten all the same
            if call.filters is not None:
                raise
            return await self._forget_unread(call.placement)

    async def _forget_unread(self, placement: Placement) -> int:
        owner, registry = placement.user, self._store.registry
        count = await self._store.delete_all(placement)
        await self._residents.gone(owner)
        await self._quotas.deleted(UserMemory(placement, 1))
        named = {entity_of(owner), *(seen.entity for seen in await registry.entities(tenant_of(owner)))}
        await registry.unregister(owner, named, empty=True)
        return count

    async def _forget_read(self, call: ForgetCall) -> int:
        async with self._users.use(call.placement) as memory, memory.write_lock:
            if call.filters is not None:
                count = await self._remove(memory, [f.id for f in memory.facts if matches(call.filters, f)])
                await self._forget_turns(memory, call.filters)
                return count
            gone: list[Fact | Turn] = [*memory.facts, *(await self._turns(memory))]
            count = await self._store.delete_all(call.placement)
            memory.clear()
            await self._residents.changed(memory)
            await self._residents.purge(memory)
            await self._quotas.deleted(memory)
            await self._unregister(memory, gone)
            return count

    async def feedback(self, call: FeedbackCall) -> None:
        """Keeps what a reader said of a fact, as long as the fact. Raises `NotFound`."""
        async with self._users.use(call.placement) as memory, memory.write_lock:
            fact = held(memory, call.fact_id)
            said = None if call.verdict is None else {"feedback": call.verdict, "reason": call.reason}
            await self._store.put_feedback(call.placement, fact.id, said)

    async def _remove(self, memory: UserMemory, ids: Sequence[FactId]) -> int:
        """Deletes facts; how many Redis had. Ids that nobody has are passed over, but what the workers did not confirm
        to have dropped is dropped again: an earlier attempt may have failed there."""
        if not ids:
            return 0
        gone = [fact for id in ids if (fact := memory.get(id)) is not None]
        count = await self._store.delete(memory.placement, ids)
        for id in ids:
            memory.remove(id)
        await self._residents.changed(memory)
        await self._residents.purge(memory)
        await self._quotas.deleted(memory)
        await self._unregister(memory, gone)
        return count

    async def _unregister(self, memory: UserMemory, gone: Sequence[Fact | Turn]) -> None:
        unused = scopes_of(memory.placement, gone)
        stays: Sequence[Fact | Turn] = memory.facts
        if stays:
            unused -= scopes_of(memory.placement, stays)
        if unused and (stays := [*stays, *(await self._turns(memory))]):
            unused -= scopes_of(memory.placement, stays)
        if unused:
            await self._store.registry.unregister(memory.placement.user, unused, empty=not stays)

    async def _forget_turns(self, memory: UserMemory, filters: Filter) -> None:
        """Where all of an entity is to be deleted: what was told under it, also where no fact came of that."""
        if isinstance(filters, Compare) and filters.field in FIELDS and filters.operator == "eq":
            turns = await self._store.turns.turns(memory.placement.user)
            gone = {id: turn for id, turn in turns.items() if turn.scopes.get(filters.field) == filters.operand}
            if gone:
                await self._store.turns.forget(memory.placement, list(gone))
                self._store.log.deleted()
                await self._unregister(memory, list(gone.values()))

    async def _turns(self, memory: UserMemory) -> list[Turn]:
        """Those that are kept, also where nothing was distilled from them."""
        return list((await self._store.turns.turns(memory.placement.user)).values())

    def fits(self, text: str) -> bool:
        """Whether a text may be a fact, by its length."""
        return len(self._template.fact(text)) <= self._max_fact_tokens

    def _check(self, texts: Sequence[str], field: str) -> None:
        check_texts(self._template, texts, field, self._max_fact_tokens)

    async def _index(self, placement: Placement) -> None:
        async with self._users.use(placement) as memory:
            await self._residents.index(memory)


def check_texts(template: PromptTemplate, texts: Sequence[str], field: str, limit: int) -> None:
    """Raises `InvalidRequest` for a blank text, `TooLarge` for one of more than `limit` tokens."""
    for text in texts:
        if not text.strip():
            raise InvalidRequest("A fact's text is blank.", field=field)
        if (tokens := len(template.fact(text))) > limit:
            raise TooLarge(f"A fact takes {tokens} tokens; at most {limit} are allowed. Split it.", field=field)


def told_in(call: AddCall) -> list[Told]:
    """What is to be stored."""
    roles = call.roles or (None,) * len(call.texts)
    return [
        Told(text, role, call.scopes, call.metadata, call.expires_on)
        for text, role in zip(call.texts, roles, strict=True)
    ]


def told_again(memory: UserMemory, texts: Sequence[str]) -> list[FactId]:
    """Facts whose last day has passed, and that are told once more: new ones take their place."""
    if not (expired := memory.expired()):
        return []
    hashes = {text_hash(text) for text in texts}
    return [fact.id for fact in memory.facts if fact.id in expired and fact.text_hash in hashes]


def scopes_of(placement: Placement, told: Sequence[Fact | AddCall | Turn]) -> set[Any]:
    """The entities that these were told under, and the one that owns them."""
    return {entity_of(placement.user), *(entity for one in told for entity in entities(one.scopes))}


def moment(told_at: float | None) -> datetime:
    """When something was told: now, where nobody says."""
    return datetime.now(UTC) if told_at is None else datetime.fromtimestamp(told_at, UTC)
