"""What the memory routes do, whichever dialect they speak: from what a caller names to the owners' shards and back.

    an entity that owns        one owner, one hop
    filters                    every owner that has memories under the entities they name; answers are merged
    a memory's id, alone       the owner that the id's tag stands for, among the caller's tenant's

A request that does not say whose memories it means is refused; a deletion also where it says "*".
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from deployments.audit import audit
from deployments.callers import Caller
from deployments.limits import Limits
from deployments.memory_calls import (
    AddCall,
    AddedFact,
    DeleteCall,
    DistilCall,
    EventCall,
    EventView,
    ExportCall,
    FactCall,
    FactPage,
    FactView,
    FeedbackCall,
    ForgetCall,
    FoundFact,
    HistoryCall,
    ListCall,
    MemoryCall,
    OwnerExport,
    SearchCall,
    UpdateCall,
)
from deployments.owner_calls import Hop, OwnerCalls
from deployments.shard_client import Shards
from deployments.unattended import Unattended
from sharding.errors import InvalidRequest, MemshardError, NotFound
from sharding.filters import ANY, Compare, Filter, anchors
from sharding.ids import NOBODY, FactId, Placement, UserId
from sharding.registry import EntitySeen, OwnerNames
from sharding.scopes import KINDS, Entity, entities, new_id
from sharding.turns import Turn

T = TypeVar("T")

MAX_OWNERS = 100  # that one request may concern
MAX_MERGED = 10_000  # facts that are read of each owner for one page of several
OWNERS_AT_ONCE = 8

Make = Callable[[str, Placement], MemoryCall[T]]
"""Makes a call out of a request id and a placement."""


@dataclass(frozen=True, slots=True)
class NewFacts:
    """What a client wants to be remembered: one turn, under the entities of `scopes`."""

    texts: tuple[str, ...]
    roles: tuple[str, ...]
    scopes: Mapping[str, str]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    expires_on: str | None = None
    told_at: float | None = None


class Memories:
    """One a gateway. Every method raises members of the error tree only."""

    def __init__(
        self,
        shards: Shards,
        calls: OwnerCalls,
        names: OwnerNames,
        limits: Limits,
        unattended: Unattended | None = None,
    ) -> None:
        """`unattended`: who takes adds while no shard lives; None where they are refused then."""
        self._shards = shards
        self._calls = calls
        self._names = names
        self._limits = limits
        self._unattended = unattended
        self._later: set[asyncio.Task[None]] = set()

    async def add(self, caller: Caller, new: NewFacts) -> tuple[str, tuple[AddedFact, ...]]:
        """Stores facts for the entity that owns them; who has no shard yet gets one. With the id of the event, which
        has happened when this returns."""
        owner = caller.owner(entities(new.scopes)[0])
        await self._limits.user_request(owner)
        details = (new.texts, new.roles, new.scopes, new.metadata, new.expires_on, new.told_at)
        id = new_id(owner)
        added = await self._calls.add(owner, self._hop(lambda p: AddCall(id, p, *details)))
        audit(caller, "add", owner, [one.fact.id for one in added])
        return id, added

    async def distil(self, caller: Caller, turn: Turn) -> EventView:
        """Keeps a turn, from which facts are distilled in the background: the event to ask for."""
        owner = caller.owner(entities(turn.scopes)[0])
        await self._limits.user_request(owner)
        id = new_id(owner)
        nobodys = False

        def call(placement: Placement) -> MemoryCall[EventView]:
            nonlocal nobodys
            nobodys = placement.shard == NOBODY
            return DistilCall(id, placement, turn)

        event: EventView = await self._calls.add(owner, self._hop(call))
        audit(caller, "distil", owner, [id])
        if nobodys:
            self._soon(self.event(caller, id))
        return event

    async def event(self, caller: Caller, id: str) -> EventView:
        """How far an add is. Raises `NotFound`."""
        return await self._by_id(caller, id, None, lambda call_id, p: EventCall(call_id, p, id))

    async def page_of(self, owner: UserId, page: int, page_size: int) -> FactPage:
        """One page of an owner. Raises `NotFound` for one whom nothing was ever stored for."""
        return await self._ask(owner, lambda id, p: ListCall(id, p, page, page_size))

    async def page(self, caller: Caller, filters: Filter, page: int, page_size: int, with_expired: bool) -> FactPage:
        """One page of what matches, oldest first, over all owners concerned."""
        owners = await self._owners(caller, filters)
        last = page * page_size
        if len(owners) > 1 and last > MAX_MERGED:
            raise InvalidRequest(f"Over several users, only the first {MAX_MERGED} can be paged through.", field="page")
        first, size = (page, page_size) if len(owners) == 1 else (1, last)
        found = await self._each(owners, lambda id, p: ListCall(id, p, first, size, filters, with_expired))
        if len(owners) == 1:
            return found[0] if found else FactPage(0, ())
        merged = sorted((fact for one in found for fact in one.facts), key=lambda fact: (fact.created_at, fact.id))
        return FactPage(sum(one.total for one in found), tuple(merged[last - page_size : last]))

    async def search(
        self, caller: Caller, query: str, filters: Filter, top_k: int, threshold: float, with_expired: bool
    ) -> list[FoundFact]:
        """What is nearest to `query` of what matches, nearest first, over all owners concerned."""
        owners = await self._owners(caller, filters)
        found = await self._each(
            owners, lambda id, p: SearchCall(id, p, query, top_k, threshold, filters, with_expired)
        )
        return sorted((fact for one in found for fact in one), key=lambda one: -one.score)[:top_k]

    async def get(self, caller: Caller, id: str, owner: UserId | None = None) -> FactView:
        """One memory. Raises `NotFound`, as all that take an id."""
        return await self._by_id(caller, id, owner, lambda call_id, p: FactCall(call_id, p, FactId(id)))

    async def history(self, caller: Caller, id: str) -> tuple[FactView, ...]:
        """Every version that is known, oldest first."""
        return await self._by_id(caller, id, None, lambda call_id, p: HistoryCall(call_id, p, FactId(id)))

    async def update(self, caller: Caller, id: str, **changes: Any) -> FactView:
        """A new version; `changes` are `UpdateCall`'s."""
        new = await self._by_id(caller, id, None, lambda call_id, p: UpdateCall(call_id, p, FactId(id), **changes))
        audit(caller, "update", new.user, [id])
        return new

    async def feedback(self, caller: Caller, id: str, verdict: str | None, reason: str | None) -> None:
        """Keeps what a reader said of a memory."""
        owners: list[UserId] = []

        def make(call_id: str, placement: Placement) -> FeedbackCall:
            owners.append(placement.user)
            return FeedbackCall(call_id, placement, FactId(id), verdict, reason)

        await self._by_id(caller, id, None, make)
        audit(caller, "feedback", owners[-1], [id])

    async def delete(self, caller: Caller, id: str, owner: UserId | None = None) -> None:
        """Deletes one memory; it is gone when this returns."""
        missing: NotFound | None = None
        call_id = uuid.uuid4().hex
        for candidate in await self._candidates(caller, id, owner):
            try:
                hop = self._calls.forgetting(self._hop(lambda p: DeleteCall(call_id, p, FactId(id))))
                await self._calls.delete(candidate, hop)
                audit(caller, "delete", candidate, [id])
                return
            except NotFound as error:
                missing = error
        raise missing or _no_such_memory()

    async def forget_owner(self, caller: Caller, owner: UserId) -> int:
        """Deletes all of an owner. Raises `NotFound` for one whom nothing was ever stored for."""
        count: int = await self._calls.call(owner, self._forgetting(None))
        audit(caller, "forget", owner, [])
        return count

    async def forget_known_owner(self, caller: Caller, owner: UserId) -> int:
        """The same for one of whom Redis may have nothing but a name."""
        with suppress(NotFound):
            return await self.forget_owner(caller, owner)
        return 0

    def _forgetting(self, only: Filter | None) -> Hop[int]:
        id = uuid.uuid4().hex
        return self._calls.forgetting(self._hop(lambda p: ForgetCall(id, p, only)))

    async def forget(self, caller: Caller, filters: Filter) -> int:
        """Deletes what matches; how many there were. Raises `InvalidRequest` where it could be everybody's."""
        concerned = anchors(filters)
        if concerned is not None and any(entity.name == ANY for entity in concerned):
            raise InvalidRequest("A deletion must name whose memories it means; '*' does not.", field="filters")
        all_of: set[UserId] = set()
        if isinstance(filters, Compare) and concerned is not None:
            all_of = {caller.owner(entity) for entity in concerned}
        count = 0
        for owner in await self._owners(caller, filters):
            with suppress(NotFound):
                count += await self._calls.call(owner, self._forgetting(None if owner in all_of else filters))
                audit(caller, "forget", owner, [])
        return count

    async def forget_entity(self, caller: Caller, entity: Entity) -> int:
        """Deletes what was told under an entity. Raises `NotFound` where nothing was."""
        if entity.kind == "user":
            return await self.forget_owner(caller, caller.owner(entity))
        field_name = KINDS[entity.kind]
        if not await self._owners_of(caller, entity):
            raise NotFound(f"There is no {entity.kind} with this id.", field=field_name)
        return await self.forget(caller, Compare(field_name, "eq", entity.name))

    async def entities(self, caller: Caller) -> list[EntitySeen]:
        """The tenant's entities, first seen first."""
        return await self._names.entities(caller.tenant)

    async def export(self, caller: Caller, entity: Entity) -> OwnerExport:
        """Everything that is kept of the owner. Raises `NotFound`."""
        return await self._ask(caller.owner(entity), ExportCall)

    # -- owners -----------------------------------------------------------------------------------------------------

    async def _owners(self, caller: Caller, filters: Filter) -> list[UserId]:
        concerned = anchors(filters)
        if concerned is None:
            raise InvalidRequest(
                "'filters' must say whose memories are meant: give a user_id, agent_id, app_id or run_id.",
                field="filters",
            )
        named: set[Entity] = {entity for entity in concerned if entity.name != ANY}
        for kind in {entity.kind for entity in concerned if entity.name == ANY}:
            named.update(seen.entity for seen in await self._names.entities(caller.tenant, kind))
        if len(named) > MAX_OWNERS:
            raise InvalidRequest(f"'filters' concern more than {MAX_OWNERS} users; name fewer.", field="filters")
        owners = {owner for entity in named for owner in await self._owners_of(caller, entity)}
        if len(owners) > MAX_OWNERS:
            raise InvalidRequest(f"'filters' concern more than {MAX_OWNERS} users; name fewer.", field="filters")
        return sorted(owners)

    async def _owners_of(self, caller: Caller, entity: Entity) -> list[UserId]:
        owner = caller.owner(entity)
        if entity.kind == "user":  # a user owns whatever it was named with
            return [owner]
        return await self._names.owners_of(caller.tenant, entity)

    async def _candidates(self, caller: Caller, id: str, owner: UserId | None) -> Sequence[UserId]:
        return [owner] if owner is not None else await self._names.owners_by_id(caller.tenant, id)

    # -- hops -------------------------------------------------------------------------------------------------------

    def _hop(self, make: Callable[[Placement], MemoryCall[T]]) -> Callable[[Placement, float], Any]:
        def hop(placement: Placement, left_s: float) -> Any:
            if placement.shard == NOBODY:
                assert self._unattended is not None, "nobody else places a user there"
                return self._unattended.ask(make(placement))
            return self._shards.ask(placement.shard, make(placement), left_s)

        return hop

    def _soon(self, asking: Awaitable[object]) -> None:
        """Asks the owner in the background: a shard that finds a turn which nobody distilled goes on with it."""

        async def ask() -> None:
            with suppress(MemshardError):  # the turn is kept; whoever asks for its event has it distilled
                await asking

        task = asyncio.create_task(ask())
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    async def _ask(self, owner: UserId, make: Make[T]) -> T:
        id = uuid.uuid4().hex  # of our own: a client's X-Request-ID need not be unique
        answer: T = await self._calls.call(owner, self._hop(lambda placement: make(id, placement)))
        return answer

    async def _by_id(self, caller: Caller, id: str, owner: UserId | None, make: Make[T]) -> T:
        missing: NotFound | None = None
        for candidate in await self._candidates(caller, id, owner):
            try:
                return await self._ask(candidate, make)
            except NotFound as error:
                missing = error
        raise missing or _no_such_memory()

    async def _each(self, owners: Sequence[UserId], make: Make[T]) -> list[T]:
        """The answers of all owners, those left out for whom nothing was ever stored."""
        gate = asyncio.Semaphore(OWNERS_AT_ONCE)

        async def one(owner: UserId) -> list[T]:
            async with gate:
                try:
                    return [await self._ask(owner, make)]
                except NotFound:
                    return []

        return [answer for answers in await asyncio.gather(*map(one, owners)) for answer in answers]


def _no_such_memory() -> NotFound:
    return NotFound("There is no memory with this id.", field="memory_id")
