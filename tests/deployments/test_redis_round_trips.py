"""How often a request asks Redis: gateway, directory, user table and facts as they are, on a server that counts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from deployments.messages import ChatCall, ChatEvent, ChatFinished, ChatStarted, MemoryUse, Sampling
from deployments.owner_calls import OwnerCalls
from deployments.owners import Owners
from sharding.client import connect
from sharding.directory import Directory, PlacementCache, ShardReport
from sharding.errors import WrongShard
from sharding.facts import FactStore
from sharding.ids import ShardId, UserId
from sharding.keys import KeySpace
from sharding.lease import Lease
from sharding.placement import PlacementPolicy
from sharding.user_memory import UserTable
from tests.sharding.real_valkey import running_valkey

HERE = ShardId("here")
ADA = UserId("ada")
REPORT = ShardReport(shard=HERE, model="m", ready=True, free_bytes=1, users=0, requests_in_flight=0)


class Stack:
    """One gateway and one shard without an engine."""

    def __init__(self, redis: Any) -> None:
        self._redis = redis
        keys = KeySpace("n", "m")
        self.directory, self.store = Directory(redis, keys), FactStore(redis, keys)
        self.lease = Lease(60, 60)
        self.lease.acknowledged(self.lease.clock())
        self.table = UserTable(HERE, self.directory, self.store, self.lease, dim=2, capacity=10)
        self.owners = Owners(self.directory, PlacementPolicy(), PlacementCache(10))
        shards: Any = self
        self.calls = OwnerCalls(shards, self.owners, 10)

    async def chat(self, shard: ShardId, call: ChatCall, deadline_s: float) -> AsyncGenerator[ChatEvent, None]:
        assert call.placement is not None
        async with self.table.use(call.placement) as memory:
            found = memory.search([1.0, 0.0], call.top_k)
        use = MemoryUse("inject", fact_ids=tuple(fact.id for fact in found))
        yield ChatStarted(1, use)
        yield ChatFinished("stop", 1, use)

    async def ask(self) -> int:
        """How many facts a chat found."""
        call = ChatCall("r", None, ({"role": "user", "content": "?"},), Sampling())
        events = [event async for event in self.calls.chat(ADA, call)]
        assert isinstance(events[0], ChatStarted)
        return len(events[0].memory.fact_ids)

    async def commands_of(self, action: Callable[[], Awaitable[object]]) -> int:
        """Commands that Redis ran for `action`, by its own count; those inside a script are not round trips."""
        await self._redis.config_resetstat()
        await action()
        told = await self._redis.info("commandstats")
        counts = {name.removeprefix("cmdstat_"): stat["calls"] for name, stat in told.items()}
        inside = counts.get("evalsha", 0) > 0
        beside = {"smembers", "mget"}  # heartbeats, read once a second while anybody asks anything
        ignored = {"config|resetstat", "info", *beside, *({"hset", "hincrby"} if inside else ())}
        return int(sum(count for name, count in counts.items() if name not in ignored))


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    with running_valkey(tmp_path) as server:
        async with connect(server.url) as redis:
            stack = Stack(redis)
            await stack.directory.heartbeat(REPORT.model_dump_json(), HERE, 60)
            placement = await stack.owners.owner(ADA)
            ((fact, _),) = await stack.store.append(placement, ["I play the cello."], "t", datetime.now(UTC))
            await stack.store.put_embeddings(placement, {fact.id: b"\0\0\x80?" + b"\0" * 4})
            yield stack


async def test_a_chat_of_a_placed_user_asks_redis_nothing(stack: Stack) -> None:
    assert await stack.commands_of(stack.ask) > 0, "the first one loads the user: the count counts"
    for _ in range(5):
        assert await stack.commands_of(stack.ask) == 0
    assert await stack.ask() == 1


async def test_a_gateway_that_knows_nobody_asks_once(stack: Stack) -> None:
    await stack.ask()
    stack.owners.distrust(HERE, ADA, WrongShard("The epoch is over."))
    assert await stack.commands_of(stack.ask) == 1


async def test_after_redis_changed_its_history_a_user_is_asked_for_once(stack: Stack) -> None:
    await stack.ask()
    stack.lease.acknowledged(stack.lease.clock(), frozenset({"another"}))
    assert await stack.commands_of(stack.ask) == 1
    assert await stack.commands_of(stack.ask) == 0
