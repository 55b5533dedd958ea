"""A write whose caller hangs up half way is done in this process as it is done in Redis, not only there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from types import SimpleNamespace

import pytest

from deployments.messages import AddCall, FactCall, ForgetCall
from deployments.shard import Shard
from sharding.facts import AddEvent, Fact, text_hash
from sharding.ids import FactId, Placement, ShardId, UserId
from sharding.user_memory import UserMemory

ALICE = Placement(UserId("alice"), ShardId("here"), 1)


class SlowStore:
    """Does at once what it is asked, and answers when `gate` is open."""

    def __init__(self) -> None:
        self.facts: dict[FactId, Fact] = {}
        self.gate = asyncio.Event()

    async def append(
        self, placement: Placement, texts: Sequence[str], turn_id: str, now: datetime
    ) -> list[tuple[Fact, AddEvent]]:
        added: list[tuple[Fact, AddEvent]] = []
        for text in texts:
            id_ = FactId(text)
            self.facts[id_] = Fact(id_, placement.user, text, text_hash(text), turn_id, len(self.facts), 1, "", "")
            added.append((self.facts[id_], "ADD"))
        await self.gate.wait()
        return added

    async def delete(self, placement: Placement, fact_id: FactId) -> bool:
        known = self.facts.pop(fact_id, None) is not None
        await self.gate.wait()
        return known

    async def delete_all(self, placement: Placement) -> int:
        count = len(self.facts)
        self.facts.clear()
        await self.gate.wait()
        return count


class OneUser:
    """The table, and what follows the facts, of a shard with one user."""

    def __init__(self) -> None:
        self.memory = UserMemory(ALICE, dim=2)

    @asynccontextmanager
    async def use(self, placement: Placement) -> AsyncIterator[UserMemory]:
        yield self.memory

    async def changed(self, memory: UserMemory) -> None: ...

    async def added(self, memory: UserMemory) -> None: ...

    async def index(self, memory: UserMemory) -> None: ...

    def encoded(self, memory: UserMemory, fact: FactId) -> bool:
        return False


@pytest.mark.parametrize("write", ["add", "delete_fact", "forget"])
async def test_a_write_that_is_abandoned_is_done_here_as_in_redis(write: str) -> None:
    store, home = SlowStore(), OneUser()
    template = SimpleNamespace(fact=lambda text: [1])
    parts = (None, None, None, None, home, None, template, home, store)
    shard = Shard(*parts, max_requests_in_flight=1, max_fact_tokens=9)  # type: ignore[arg-type]
    store.gate.set()
    await shard.add(AddCall("r1", ALICE, ("one", "two")))
    store.gate.clear()
    calls = {
        "add": AddCall("r2", ALICE, ("three",)),
        "delete_fact": FactCall("r2", ALICE, FactId("one")),
        "forget": ForgetCall("r2", ALICE),
    }
    caller = asyncio.create_task(getattr(shard, write)(calls[write]))
    await asyncio.sleep(0.01)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    store.gate.set()
    await asyncio.sleep(0.01)
    assert [fact.id for fact in home.memory.facts] == list(store.facts)
    assert not home.memory.write_lock.locked()
