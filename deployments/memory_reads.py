"""What a shard answers about one owner's memory without changing it."""

from __future__ import annotations

from functools import partial

from deployments.memory_calls import (
    ExportCall,
    FactCall,
    FactExport,
    FactPage,
    FactView,
    FoundFact,
    HistoryCall,
    ListCall,
    OwnerExport,
    SearchCall,
)
from deployments.ports import Embeds
from deployments.resident import Residents
from deployments.resident_use import ResidentUse
from sharding.errors import NotFound
from sharding.facts import Fact, FactStore
from sharding.filters import matches
from sharding.ids import FactId
from sharding.memory import UserMemory
from sharding.scopes import entity_of


class MemoryReads:
    """Reads of resident memories."""

    def __init__(self, users: ResidentUse, residents: Residents, store: FactStore, embedder: Embeds) -> None:
        self._users = users
        self._residents = residents
        self._store = store
        self._embedder = embedder

    async def list_facts(self, call: ListCall) -> FactPage:
        """One page, oldest first."""
        async with self._users.use(call.placement) as memory:
            await self._residents.ready(memory)
            facts = list(memory.facts) if call.with_expired else memory.current()
            if call.filters is not None:
                facts = [fact for fact in facts if matches(call.filters, fact)]
            start = (call.page - 1) * call.page_size
            page = facts[start : start + call.page_size]
            return FactPage(len(facts), tuple(self.view(memory, fact) for fact in page))

    async def search(self, call: SearchCall) -> tuple[FoundFact, ...]:
        """The nearest facts that match, also one that was told a moment ago."""
        vector = (await self._embedder.embed([call.query]))[0]
        async with self._users.use(call.placement) as memory:
            await self._residents.ready(memory)
            passes = None if call.filters is None else partial(matches, call.filters)
            found = memory.search_scored(vector, call.top_k, passes, with_expired=call.with_expired)
            return tuple(FoundFact(self.view(memory, fact), score) for fact, score in found if score >= call.threshold)

    async def get_fact(self, call: FactCall) -> FactView:
        """One fact, expired or not. Raises `NotFound`."""
        async with self._users.use(call.placement) as memory:
            await self._residents.ready(memory)
            return self.view(memory, held(memory, call.fact_id))

    async def history(self, call: HistoryCall) -> tuple[FactView, ...]:
        """The fact's versions. Raises `NotFound`, also for a fact that was deleted: its history went with it."""
        async with self._users.use(call.placement) as memory, memory.write_lock:
            return await self._versions(memory, held(memory, call.fact_id))

    async def export(self, call: ExportCall) -> OwnerExport:
        """Everything that is kept of the owner."""
        async with self._users.use(call.placement) as memory, memory.write_lock:
            said = await self._store.feedback(call.placement.user)
            facts = [FactExport(await self._versions(memory, fact), said.get(fact.id)) for fact in tuple(memory.facts)]
            turns = await self._store.turns.turns(call.placement.user)
            return OwnerExport(entity_of(call.placement.user), tuple(facts), tuple(turns.values()))

    def view(self, memory: UserMemory, fact: Fact) -> FactView:
        """`fact` as clients see it."""
        return view_of(fact, self._residents.encoded(memory, fact.id))

    async def _versions(self, memory: UserMemory, fact: Fact) -> tuple[FactView, ...]:
        return tuple(self.view(memory, version) for version in [*await self._store.history(fact), fact])


def view_of(fact: Fact, encoded: bool) -> FactView:
    """`fact` as clients see it."""
    return FactView(
        id=fact.id,
        user=fact.user,
        text=fact.text,
        created_at=fact.created_at,
        updated_at=fact.updated_at,
        encoded=encoded,
        version=fact.version,
        text_hash=fact.text_hash,
        role=fact.role,
        scopes=fact.scopes,
        metadata=fact.metadata,
        expires_on=fact.expires_on,
    )


def held(memory: UserMemory, fact_id: FactId) -> Fact:
    """The fact with this id. Raises `NotFound`."""
    if (fact := memory.get(fact_id)) is None:
        raise NotFound(f"This user has no memory with the id {fact_id}.", field="memory_id")
    return fact
