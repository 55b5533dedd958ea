"""Two shards of one process that a user moves between."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from neighbours import Neighbours
from redis.asyncio import Redis
from tiered_shard import TieredShard, tiered_shard

from deployments.deterministic import mark
from deployments.memory_calls import MoveCall, MoveReport
from sharding.errors import WrongShard
from sharding.ids import FactId, Placement, UserId
from sharding.placement import ShardReport

ALICE = UserId("alice")
FACTS = [f"boat {n} is called {name}" for n, name in enumerate(("Anna", "Berta", "Clara", "Dora", "Emma", "Frida"))]
QUESTION = "What is boat called?"


class Pair:
    """Two shards, and a gateway's way to whoever owns Alice: the directory's word, asked again after `WrongShard`."""

    def __init__(self, one: TieredShard, other: TieredShard) -> None:
        self.one, self.other = one, other
        self.shards = {one.me: one, other.me: other}
        self.told: list[str] = []  # acknowledged
        self.ids: dict[str, FactId] = {}
        self.neighbours: Neighbours | None = None  # where workers reach each other

    async def placement(self) -> Placement:
        placement = await self.one.directory.lookup(ALICE)
        assert placement is not None
        return placement

    async def sent(self, call: Callable[[TieredShard, Placement], Awaitable[object]], cached: Placement) -> object:
        """As `OwnerCalls` does it: whoever has moved again meanwhile is looked up again."""
        placement = cached
        for _ in range(4):
            try:
                return await call(self.shards[placement.shard], placement)
            except WrongShard:
                placement = await self.placement()
        return await call(self.shards[placement.shard], placement)

    def meet(self) -> None:
        """Their workers reach each other from now on, and nothing goes wrong on the way."""
        self.neighbours = Neighbours({me: shard.shard for me, shard in self.shards.items()})

    async def begin(self) -> None:
        """Alice is the first one's, and tells the facts."""
        alice = await self.one.owns("alice")
        for fact in FACTS:
            await self.tell(fact, alice)

    async def tell(self, text: str, cached: Placement) -> None:
        added = await self.sent(lambda shard, placement: shard.told(placement, text), cached)
        assert isinstance(added, list)
        self.ids[text] = added[0]
        self.told.append(text)

    async def reads_what_was_told(self, cached: Placement) -> None:
        before = set(map(mark, self.told))
        read = await self.sent(lambda shard, placement: shard.asked(placement, QUESTION, 1_000), cached)
        assert isinstance(read, tuple)
        assert before <= set(read[0]), "an acknowledged fact was not read"
        assert len(read[0]) == len(set(read[0])), "a fact was read twice"

    @asynccontextmanager
    async def talked_to(self) -> AsyncIterator[None]:
        """Writes and reads go on meanwhile, from callers whose cache is as old as it gets; each is answered, and every
        answer has what was acknowledged before, once."""
        talking, cached = True, await self.placement()

        async def write() -> None:
            for n in itertools.count(len(self.told)):
                if not talking:
                    return
                await self.tell(f"boat {100 + n} is called boat {n}", cached)

        async def read() -> None:
            while talking:
                await self.reads_what_was_told(cached)
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(write()), *(asyncio.create_task(read()) for _ in range(3))]
        try:
            yield
        finally:
            talking = False
            await asyncio.gather(*tasks)

    async def move(self) -> MoveReport:
        placement = await self.placement()
        target = self.other.me if placement.shard == self.one.me else self.one.me
        return await self.shards[placement.shard].shard.ask(MoveCall("r", placement, target))

    async def everything_is_served_by_one(self) -> None:
        placement = await self.placement()
        owner = self.shards[placement.shard]
        read, _ = await owner.asked(placement, QUESTION, 1_000)
        assert sorted(read) == sorted(map(mark, self.told))
        for shard in self.shards.values():
            if shard is not owner:
                with pytest.raises(WrongShard):
                    await shard.asked(Placement(ALICE, shard.me, placement.epoch), QUESTION)
                with pytest.raises(WrongShard):
                    await shard.told(Placement(ALICE, shard.me, placement.epoch - 1), "too late")


async def two_shards(opened: AsyncExitStack, valkey: tuple[Redis, str], folder: Path, **more: Any) -> Pair:
    """On an empty Redis, and both alive."""
    redis, url = valkey
    await redis.flushall()
    more = {**more, "chunk_device_bytes": 1 << 20}
    one, other = [await opened.enter_async_context(tiered_shard(name, redis, url, folder, **more)) for name in "ab"]
    for shard in (one, other):
        report = ShardReport(shard=shard.me, model="m", ready=True, free_bytes=0, users=0, requests_in_flight=0)
        await shard.directory.heartbeat(report.model_dump_json(), shard.me, 60.0)
    return Pair(one, other)
