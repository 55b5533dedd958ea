"""A small cluster in one process: a directory and shards that hold facts, check epochs and answer by echoing.

They implement the same interfaces as the real ones, so the gateway above them is all real.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace

from deployments.gateway import Gateway
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
    ShardStatus,
)
from deployments.settings import GatewaySettings
from deployments.shard_client import Shards
from sharding.errors import MemshardError, NotFound, ShardGone, Unavailable, WrongShard
from sharding.ids import FactId, Placement, ShardId, UserId
from sharding.placement import PlacementPolicy, ShardReport

MODEL = "tiny"
NOW = "2026-01-01T00:00:00Z"


class FakeDirectory:
    """Placements and reports in dictionaries; `away` makes it fail as Redis does."""

    def __init__(self) -> None:
        self.placements: dict[UserId, Placement] = {}
        self.reports: dict[ShardId, ShardReport] = {}
        self.away = False
        self.calls = 0

    async def lookup(self, user: UserId) -> Placement | None:
        self._reach()
        return self.placements.get(user)

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

    async def add(self, shard: ShardId, call: AddCall, deadline_s: float) -> tuple[AddedFact, ...]:
        mine = self._facts(shard, call.placement)
        added = []
        for text in call.texts:
            held = next((fact for fact in mine.values() if fact.text == text), None)
            fact = held or FactView(FactId(str(uuid.uuid4())), call.placement.user, text, NOW, NOW, encoded=False)
            mine[fact.id] = fact
            added.append(AddedFact(fact, "NONE" if held else "ADD"))
        return tuple(added)

    async def list_facts(self, shard: ShardId, call: ListCall, deadline_s: float) -> FactPage:
        mine = list(self._facts(shard, call.placement).values())
        first = (call.page - 1) * call.page_size
        return FactPage(len(mine), tuple(mine[first : first + call.page_size]))

    async def get_fact(self, shard: ShardId, call: FactCall, deadline_s: float) -> FactView:
        return self._fact(shard, call)

    async def delete_fact(self, shard: ShardId, call: FactCall, deadline_s: float) -> None:
        del self._facts(shard, call.placement)[self._fact(shard, call).id]

    async def forget(self, shard: ShardId, call: ForgetCall, deadline_s: float) -> int:
        mine = self._facts(shard, call.placement)
        count = len(mine)
        mine.clear()
        return count

    async def status(self, shard: ShardId, deadline_s: float) -> ShardStatus:
        here = self._enter(shard, None)
        return ShardStatus(shard, MODEL, True, NOW, len(here.facts), 0, 0, 0, 0, (("device", 10, 100),), {"chats": 1})

    def _enter(self, shard: ShardId, placement: Placement | None) -> FakeShard:
        here = self.by_id.get(shard)
        if here is None or here.died:
            raise ShardGone(f"Shard {shard} does not exist.", shard=shard, certain=here is not None)
        if placement is not None and self.directory.placements.get(placement.user) != placement:
            raise WrongShard("The epoch is over.", shard=shard)
        if here.refuse_with is not None:
            here.then()
            raise here.refuse_with
        return here

    def _facts(self, shard: ShardId, placement: Placement) -> dict[FactId, FactView]:
        return self._enter(shard, placement).facts.setdefault(placement.user, {})

    def _fact(self, shard: ShardId, call: FactCall) -> FactView:
        try:
            return self._facts(shard, call.placement)[call.fact_id]
        except KeyError:
            raise NotFound("There is no memory with this id.", field="id") from None


class Cluster:
    """A gateway over two shards, and the handles that a test pulls."""

    def __init__(self, **settings: float) -> None:
        self.directory = FakeDirectory()
        self.shards = FakeShards(self.directory, "shard-a", "shard-b")
        self.gateway = Gateway(
            self.shards,
            self.directory,
            PlacementPolicy(),
            GatewaySettings(model=MODEL, expected_shards=2, **settings),  # type: ignore[arg-type]
        )

    def place(self, user: str) -> FakeShard:
        """As if the user had stored something once."""
        self.directory.placements[UserId(user)] = Placement(UserId(user), ShardId("shard-a"), 1)
        return self.shards.of(user)

    def other_than(self, shard: FakeShard) -> FakeShard:
        return next(other for other in self.shards.by_id.values() if other is not shard)
