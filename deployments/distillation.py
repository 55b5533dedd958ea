"""Turns into facts, in the background: what a client that adds with `infer` waits for, or polls.

    begin   turn and event to Redis (durable: PENDING) ─► queue
    run     extract ─► for each fact: known ones near it? decide ─► under the write lock, if the turn is still there:
            append and update ─► event to Redis: SUCCEEDED with ids, or FAILED with the reason

A shard that dies leaves its turns PENDING in Redis; the user's next shard finishes them when it is asked for an event
or for another turn. Doing one twice adds nothing twice: facts of one turn are one append, and an update to the same
text is none. A turn that was deleted meanwhile leaves nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from deployments.distiller import MAX_KNOWN, Distils
from deployments.memory_calls import AddCall, DistilCall, EventCall, EventView, UpdateCall
from deployments.memory_reads import MemoryReads
from deployments.memory_writes import MemoryWrites, moment
from deployments.ports import Embeds
from deployments.resident import Residents
from deployments.resident_use import ResidentUse
from sharding.errors import Busy, Conflict, MemshardError, NotFound, RetryableError
from sharding.fact_records import instant, text_hash
from sharding.facts import FactStore
from sharding.ids import FactId, Placement
from sharding.memory import UserMemory
from sharding.scopes import entities, entity_of
from sharding.turns import Event, Turn

TURNS_AT_ONCE = 2
MAX_WAITING = 256
NEAR = 0.5
"""Cosine from which a known fact may be what a new one corrects. Below it the model is not asked: a wrong answer takes
something else away."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Outcome:
    """What is to be done for a turn."""

    add: list[str] = field(default_factory=list)
    update: list[tuple[FactId, int, str]] = field(default_factory=list)  # the version that was looked at, the new text
    known: list[FactId] = field(default_factory=list)


class Distillation:
    """The turns that a shard works on. `distiller` is what reads them."""

    def __init__(
        self,
        users: ResidentUse,
        residents: Residents,
        store: FactStore,
        reads: MemoryReads,
        writes: MemoryWrites,
        embedder: Embeds,
        distiller: Distils,
    ) -> None:
        self.distiller = distiller
        self._users = users
        self._residents = residents
        self._store = store
        self._reads = reads
        self._writes = writes
        self._embedder = embedder
        self._running: dict[str, asyncio.Task[None]] = {}
        self._gate = asyncio.Semaphore(TURNS_AT_ONCE)

    async def begin(self, call: DistilCall) -> EventView:
        """Keeps the turn, durably, and has it distilled. Raises `Busy` where too many wait."""
        if len(self._running) >= MAX_WAITING:
            raise Busy("Too many conversations wait to be distilled; retry shortly.", retry_after_s=5.0)
        return await self._users.to_its_end(self._begin(call))

    async def _begin(self, call: DistilCall) -> EventView:
        async with self._users.use(call.placement) as memory, memory.write_lock:
            owner, now = call.placement.user, datetime.now(UTC)
            named = {entity_of(owner), *entities(call.turn.scopes)}
            await self._store.registry.register(owner, named, now)
            event = await self._store.turns.event(owner, call.request_id)  # there, where the call is repeated
            if event is None:
                event = Event("PENDING", instant(now), instant(now))
                await self._store.turns.begin(call.placement, call.request_id, call.turn, event)
            await self._resume(call.placement)
            return self._view(memory, call.request_id, event)

    async def event(self, call: EventCall) -> EventView:
        """How far an add is; also one that distilled nothing. Raises `NotFound`."""
        async with self._users.use(call.placement) as memory:
            event = await self._store.turns.event(call.placement.user, call.event_id)
            if event is None:
                told = [fact for fact in memory.facts if fact.turn_id == call.event_id]
                if not told:
                    raise NotFound("There is no event with this id, or it was forgotten.", field="event_id")
                results = [(fact.id, "ADD") for fact in told]
                event = Event("SUCCEEDED", told[0].created_at, told[0].created_at, results)
            elif event.status == "PENDING":
                await self._resume(call.placement)
            return self._view(memory, call.event_id, event)

    async def settled(self) -> None:
        """Returns when nothing is being distilled."""
        while self._running:
            await asyncio.wait(self._running.values())

    def close(self) -> None:
        """Ends what runs; whoever owns the users next finishes it."""
        for task in self._running.values():
            task.cancel()

    async def _resume(self, placement: Placement) -> None:
        """Every turn of the user that is not distilled yet is being worked on when this returns."""
        for turn_id in await self._store.turns.pending(placement.user):
            if turn_id not in self._running and len(self._running) < MAX_WAITING:
                task = asyncio.create_task(self._run(placement, turn_id))
                self._running[turn_id] = task
                task.add_done_callback(lambda _, id=turn_id: self._running.pop(id, None))  # type: ignore[misc]

    async def _run(self, placement: Placement, turn_id: str) -> None:
        async with self._gate:
            try:
                await self._distil(placement, turn_id)
            except RetryableError as error:  # another shard's user by now, or Redis is away: still PENDING
                log.info("A turn is left to be distilled later: %s", error)
            except MemshardError as error:
                await self._failed(placement, turn_id, error.message)
            except Exception:  # the task's edge: the client has to hear of it
                log.exception("Distilling failed")
                await self._failed(placement, turn_id, "The server failed to distil this turn.")

    async def _failed(self, placement: Placement, turn_id: str, reason: str) -> None:
        log.warning("A turn cannot be distilled: %s", reason)
        try:
            await self._settle(placement, turn_id, Event("FAILED", "", "", reason=reason))
        except RetryableError as error:
            log.warning("That it failed could not be noted: %s", error)

    async def _distil(self, placement: Placement, turn_id: str) -> None:
        turn = await self._store.turns.turn(placement.user, turn_id)
        if turn is None:
            return await self._settle(placement, turn_id, Event("FAILED", "", "", reason="The turn was deleted."))
        facts = await self.distiller.extract(placement.user, turn.messages, turn.instructions)
        outcome = _Outcome()
        async with self._users.use(placement) as memory:
            for fact in filter(self._writes.fits, facts):
                await self._decide(memory, fact, outcome)
        await self._users.to_its_end(self._apply(placement, turn_id, turn, outcome))

    async def _decide(self, memory: UserMemory, fact: str, outcome: _Outcome) -> None:
        await self._residents.ready(memory)
        vector = (await self._embedder.embed([fact]))[0]
        near = [known for known, score in memory.search_scored(vector, MAX_KNOWN) if score >= NEAR]
        same = next((known for known in near if known.text_hash == text_hash(fact)), None)
        if same is not None:
            outcome.known.append(same.id)
        elif not near:
            outcome.add.append(fact)
        else:
            decided = await self.distiller.decide(memory.placement.user, fact, [known.text for known in near])
            known = near[decided.known]
            if decided.what == "ADD":
                outcome.add.append(fact)
            elif decided.what == "UPDATE":
                outcome.update.append((known.id, known.version, fact))
            else:
                outcome.known.append(near[0].id)

    async def _apply(self, placement: Placement, turn_id: str, turn: Turn, outcome: _Outcome) -> None:
        async with self._users.use(placement) as memory, memory.write_lock:
            if await self._store.turns.turn(placement.user, turn_id) is None:
                return await self._settle(placement, turn_id, Event("FAILED", "", "", reason="The turn was deleted."))
            results = [(id, "NONE") for id in outcome.known]
            add = list(outcome.add)
            for id, version, text in outcome.update:
                held = memory.get(id)
                if held is None or (held.version != version and held.text != text):
                    add.append(text)  # what it was to replace is gone, or was changed meanwhile
                    continue
                try:
                    await self._writes.change(memory, UpdateCall(turn_id, placement, id, text, told_at=turn.told_at))
                    results.append((id, "UPDATE"))
                except Conflict:
                    results.append((id, "NONE"))
            if add:
                details = (turn.scopes, turn.metadata, turn.expires_on, turn.told_at)
                added = await self._writes.append(memory, AddCall(turn_id, placement, tuple(add), (), *details))
                results += [(fact.id, event) for fact, event in added]
            now = instant(moment(None))
            await self._settle(placement, turn_id, Event("SUCCEEDED", now, now, results))

    async def _settle(self, placement: Placement, turn_id: str, event: Event) -> None:
        before = await self._store.turns.event(placement.user, turn_id)
        now = instant(datetime.now(UTC))
        created_at = now if before is None else before.created_at
        await self._store.turns.settle(placement, turn_id, replace(event, created_at=created_at, updated_at=now))

    def _view(self, memory: UserMemory, id: str, event: Event) -> EventView:
        results: Sequence[tuple[FactId, str, str]] = [
            (fact.id, what, fact.text) for fact_id, what in event.results if (fact := memory.get(fact_id)) is not None
        ]
        return EventView(id, event.status, event.created_at, event.updated_at, tuple(results), event.reason)
