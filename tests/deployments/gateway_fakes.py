"""A small cluster in one process: a directory and shards that hold facts, check epochs and answer by echoing.

They implement the same interfaces as the real ones, so the gateway above them is all real.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from deployments import exposition
from deployments.gateway import Gateway, GatewayStores
from deployments.memory_calls import (
    AddCall,
    AddedFact,
    DeleteCall,
    DrainReport,
    FactCall,
    FactPage,
    FactView,
    ForgetCall,
    ListCall,
    MemoryCall,
    MoveCall,
    MoveReport,
    RebuildCall,
    Rebuilt,
)
from deployments.messages import (
    ChatCall,
    ChatDelta,
    ChatEvent,
    ChatFinished,
    ChatStarted,
    MemoryUse,
    ShardStatus,
    Verdict,
)
from deployments.settings import GatewaySettings
from deployments.shard_client import Shards
from sharding.api_keys import KnowsKeys
from sharding.errors import MemshardError, NotFound, ShardGone, Unavailable, WrongShard
from sharding.ids import FactId, Placement, ShardId, UserId
from sharding.limits import CountsMinutes
from sharding.move import End
from sharding.placement import PlacementPolicy, ShardReport
from sharding.registry import EntitySeen, OwnerNames
from sharding.scopes import Entity, entity_of, new_id, owner_id, owner_tag, tag_in

MODEL = "tiny"
NOW = "2026-01-01T00:00:00Z"


class FakeDirectory:
    """Placements and reports in dictionaries; `away` makes it fail as Redis does."""

    def __init__(self) -> None:
        self.placements: dict[UserId, Placement] = {}
        self.reports: dict[ShardId, ShardReport] = {}
        self.remembered: set[UserId] = set()  # who have facts and, perhaps, no placement
        self.away = False
        self.calls = 0

    async def lookup(self, user: UserId) -> Placement | None:
        self._reach()
        return self.placements.get(user)

    async def remembers(self, user: UserId) -> bool:
        self._reach()
        return user in self.remembered

    async def claim(self, user: UserId, shard: ShardId, expected: Placement | None) -> Placement:
        self._reach()
        held = self.placements.get(user)
        if held == expected:
            epoch = held.epoch + 1 if held else 1
            self.placements[user] = Placement(user, shard, epoch)
        return self.placements[user]

    async def shards(self) -> dict[ShardId, ShardReport]:
        self._reach()
        return dict(self.reports)

    def _reach(self) -> None:
        self.calls += 1
        if self.away:
            raise Unavailable("Redis could not be reached; retry shortly.", retry_after_s=1.5)


@dataclass
class FakeShard:
    """One shard's state, and what a test wants it to do next."""

    id: ShardId
    facts: dict[UserId, dict[FactId, FactView]] = field(default_factory=dict)
    chats: list[ChatCall] = field(default_factory=list)
    refuse_with: MemshardError | None = None  # instead of starting
    then: Callable[[], None] = lambda: None  # after a refusal
    fail_with: Exception | None = None  # after the start, before the first piece of text
    break_with: Exception | None = None  # after the first piece of text
    stall: bool = False  # after the first piece of text, for ever
    stall_before_start: bool = False
    died: bool = False
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


class FakeShards(Shards):
    """The shards by id; a shard that is not among them is gone, as the router would say."""

    def __init__(self, directory: FakeDirectory, *ids: str) -> None:
        self.directory = directory
        self.by_id: dict[ShardId, FakeShard] = {}
        self.drained: list[ShardId] = []
        self.left: list[tuple[ShardId, UserId]] = []
        for id in ids:
            self.start(id)

    def start(self, id: str) -> None:
        shard = ShardId(id)
        self.by_id[shard] = FakeShard(shard)
        self.directory.reports[shard] = ShardReport(
            shard=shard, model=MODEL, ready=True, free_bytes=1, users=0, requests_in_flight=0
        )

    def kill(self, id: ShardId, heartbeat_remains: bool = False) -> None:
        self.by_id[id].died = True
        if not heartbeat_remains:
            del self.directory.reports[id]

    def of(self, user: str) -> FakeShard:
        return self.by_id[self.directory.placements[UserId(user)].shard]

    async def chat(self, shard: ShardId, call: ChatCall, deadline_s: float) -> AsyncGenerator[ChatEvent, None]:
        here = self._enter(shard, call.placement)
        here.chats.append(call)
        try:
            if here.stall_before_start:
                await asyncio.Event().wait()
            facts = list(here.facts.get(call.placement.user, {})) if call.placement and call.mode != "off" else []
            use = MemoryUse(call.mode, tuple(facts[: call.top_k]), memory_tokens=7, injected_tokens=7)  # as planned
            yield ChatStarted(20, use)
            if here.fail_with is not None:
                raise here.fail_with
            yield ChatDelta("You said: ")
            if here.break_with is not None:
                raise here.break_with
            if here.stall:
                await asyncio.Event().wait()
            yield ChatDelta(call.messages[-1]["content"])
            yield ChatFinished("stop", 4, replace(use, injected_tokens=5))
        except (asyncio.CancelledError, GeneratorExit):
            here.aborted.set()
            raise

    async def ask(self, shard: ShardId, call: MemoryCall[Any], deadline_s: float) -> Any:
        mine = self._enter(shard, call.placement).facts.setdefault(call.placement.user, {})
        match call:
            case AddCall():
                return self._add(mine, call)
            case ListCall():
                first = (call.page - 1) * call.page_size
                return FactPage(len(mine), tuple(mine.values())[first : first + call.page_size])
            case ForgetCall():
                count = len(mine)
                mine.clear()
                return count
            case MoveCall():
                moved = Placement(call.placement.user, call.target, call.placement.epoch + 1)
                self.by_id[call.target].facts[moved.user] = self.by_id[shard].facts.pop(moved.user)
                self.directory.placements[moved.user] = moved
                return MoveReport(End.MOVED, moved, 3, 0.25, 0.125)
            case RebuildCall():
                return Rebuilt(3, 120, 800)
            case FactCall() | DeleteCall():
                if call.fact_id not in mine:
                    raise NotFound("There is no memory with this id.", field="id")
                return mine[call.fact_id] if isinstance(call, FactCall) else mine.pop(call.fact_id) and None
        raise AssertionError(f"no test needs {call} yet")

    def _add(self, mine: dict[FactId, FactView], call: AddCall) -> tuple[AddedFact, ...]:
        added = []
        for text in call.texts:
            held = next((fact for fact in mine.values() if fact.text == text), None)
            id = new_id(call.placement.user)
            fact = held or FactView(id, call.placement.user, text, NOW, NOW, False, scopes=call.scopes)
            mine[fact.id] = fact
            added.append(AddedFact(fact, "NONE" if held else "ADD"))
        return tuple(added)

    async def status(self, shard: ShardId, deadline_s: float) -> ShardStatus:
        here = self._enter(shard, None)
        tiers = (("device", 10, 100),)
        return ShardStatus(
            shard, MODEL, True, NOW, len(here.facts), 0, 0, 0, 0, tiers, {"chats": 1}, Verdict("passed", 0, "as good")
        )

    async def prove(self, shard: ShardId, deadline_s: float) -> ShardStatus:
        return replace(await self.status(shard, deadline_s), canary=Verdict("failed", None, "worse than text"))

    async def drain(self, shard: ShardId, deadline_s: float) -> DrainReport:
        self._enter(shard, None)
        self.drained.append(shard)
        return DrainReport(4, 2)

    async def leave(self, shard: ShardId, user: UserId, deadline_s: float) -> None:
        self._enter(shard, None)
        self.left.append((shard, user))

    async def metrics(self, shard: ShardId, deadline_s: float) -> str:
        return exposition.of_status(asdict(await self.status(shard, deadline_s)))

    def _enter(self, shard: ShardId, placement: Placement | None) -> FakeShard:
        here = self.by_id.get(shard)
        if here is None or here.died:
            raise ShardGone(f"Shard {shard} does not exist.", shard=shard, certain=here is not None)
        if placement is not None and self.directory.placements.get(placement.user) != placement:
            raise WrongShard("The epoch is over.", shard=shard)
        if (refusal := here.refuse_with) is not None:
            here.then()
            raise refusal
        return here


class FakeNames(OwnerNames):
    """Everybody who is placed, by the entity that owns."""

    def __init__(self, directory: FakeDirectory) -> None:
        self._directory = directory

    async def owners_of(self, tenant: str, entity: Entity) -> list[UserId]:
        return [owner for owner in self._directory.placements if owner == owner_id(tenant, entity)]

    async def owners_by_id(self, tenant: str, id: str) -> list[UserId]:
        self._directory._reach()
        return [owner for owner in self._directory.placements if owner_tag(owner) == tag_in(id)]

    async def entities(self, tenant: str, kind: str | None = None) -> list[EntitySeen]:
        return [EntitySeen(entity_of(owner), NOW, NOW) for owner in self._directory.placements]

    async def everybody(self, tenant: str, *, with_memories: bool) -> list[UserId]:
        return []


class NoKeys(KnowsKeys):
    """Keys are not required here, so there is none."""

    async def revoke_all(self, tenant: str, but: str | None = None) -> int:
        return 0


class NoLimits(CountsMinutes):
    """Nothing is limited here, so nothing is counted."""


class Cluster:
    """A gateway over two shards, and the handles that a test pulls."""

    def __init__(self, **settings: float) -> None:
        self.directory = FakeDirectory()
        self.shards = FakeShards(self.directory, "shard-a", "shard-b")
        self.gateway = Gateway(
            self.shards,
            GatewayStores(self.directory, FakeNames(self.directory), NoKeys(), NoLimits()),
            PlacementPolicy(),
            GatewaySettings(**{"model": MODEL, "expected_shards": 2, "patience_s": 0.0} | settings),  # type: ignore[arg-type]
        )

    def place(self, user: str) -> FakeShard:
        """As if the user had stored something once."""
        self.directory.placements[UserId(user)] = Placement(UserId(user), ShardId("shard-a"), 1)
        return self.shards.of(user)

    def other_than(self, shard: FakeShard) -> FakeShard:
        return next(other for other in self.shards.by_id.values() if other is not shard)
