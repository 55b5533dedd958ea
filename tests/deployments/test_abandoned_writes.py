"""A write whose caller hangs up half way is done in this process as it is done in Redis, not only there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.memory_calls import AddCall, DeleteCall, ForgetCall, MemoryCall, UpdateCall
from deployments.salts import Salts
from deployments.shard import Shard
from sharding.facts import AddEvent, Fact, Told, text_hash
from sharding.ids import FactId, Placement, ShardId, UserId
from sharding.turns import Turn
from sharding.user_memory import UserMemory

ALICE = Placement(UserId("alice"), ShardId("here"), 1)


class SlowStore:
    """Does at once what it is asked, and answers when `gate` is open."""

    def __init__(self) -> None:
        self.facts: dict[FactId, Fact] = {}
        self.gate = asyncio.Event()

    @property
    def registry(self) -> SlowStore:
        return self

    @property
    def turns(self) -> SlowTurns:
        return SlowTurns()

    async def register(self, *_: object) -> None: ...

    async def unregister(self, *_: object, empty: bool) -> None: ...

    async def append(
        self, placement: Placement, texts: Sequence[Told], turn_id: str, now: datetime
    ) -> list[tuple[Fact, AddEvent]]:
        added: list[tuple[Fact, AddEvent]] = []
        for told in texts:
            id_, text = FactId(told.text), told.text
            self.facts[id_] = Fact(id_, placement.user, text, text_hash(text), turn_id, len(self.facts), 1, "", "")
            added.append((self.facts[id_], "ADD"))
        await self.gate.wait()
        return added

    async def update(self, placement: Placement, fact: Fact, *, text: str, **_: object) -> Fact:
        changed = self.facts[fact.id] = replace(fact, text=text, version=2)
        await self.gate.wait()
        return changed

    async def delete(self, placement: Placement, ids: Sequence[FactId]) -> int:
        known = sum(self.facts.pop(id_, None) is not None for id_ in ids)
        await self.gate.wait()
        return known

    async def delete_all(self, placement: Placement) -> int:
        count = len(self.facts)
        self.facts.clear()
        await self.gate.wait()
        return count


class SlowTurns:
    """Nothing was distilled."""

    async def turns(self, user: UserId) -> dict[str, Turn]:
        return {}


class OneUser:
    """The table, and what follows the facts, of a shard with one user."""

    def __init__(self) -> None:
        self.memory = UserMemory(ALICE, dim=2)

    @asynccontextmanager
    async def use(self, placement: Placement) -> AsyncIterator[UserMemory]:
        yield self.memory

    async def read(self, memory: UserMemory, facts: Sequence[Fact]) -> None: ...

    async def changed(self, memory: UserMemory) -> None: ...

    async def purge(self, memory: UserMemory) -> None: ...

    async def added(self, memory: UserMemory) -> None: ...

    async def index(self, memory: UserMemory) -> None: ...

    async def embedding(self, text: str) -> bytes:
        return bytes(8)

    def indexing(self, memory: UserMemory) -> asyncio.Lock:
        return asyncio.Lock()

    def encoded(self, memory: UserMemory, fact: FactId) -> bool:
        return False


WRITES: list[MemoryCall[Any]] = [
    AddCall("r2", ALICE, ("three",)),
    UpdateCall("r2", ALICE, FactId("one"), text="uno"),
    DeleteCall("r2", ALICE, FactId("one")),
    ForgetCall("r2", ALICE),
]


@pytest.mark.parametrize("write", WRITES, ids=lambda call: type(call).__name__)
async def test_a_write_that_is_abandoned_is_done_here_as_in_redis(write: MemoryCall[Any]) -> None:
    store, home = SlowStore(), OneUser()
    template = SimpleNamespace(fact=lambda text: [1])
    encoder = SimpleNamespace(salts=Salts())
    parts = (None, SimpleNamespace(device=None), encoder, None, home, None, template, home, store)
    shard = Shard(*parts, canary=None, max_requests_in_flight=1, max_fact_tokens=9)  # type: ignore[arg-type]
    store.gate.set()
    await shard.ask(AddCall("r1", ALICE, ("one", "two")))
    store.gate.clear()
    caller = asyncio.create_task(shard.ask(write))
    await asyncio.sleep(0.01)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    store.gate.set()
    await shard.users.background_done()
    assert list(home.memory.facts) == list(store.facts.values())
    assert not home.memory.write_lock.locked()
