"""Shards of one process that call each other, with what may go wrong on the way."""

from __future__ import annotations

import pickle
from collections.abc import Awaitable, Callable
from typing import Any

from deployments.memory_calls import MemoryCall
from deployments.shard import Shard
from sharding.errors import ShardGone
from sharding.ids import ShardId

Before = Callable[[ShardId, MemoryCall[Any]], Awaitable[None]]


class Neighbours:
    """`before` is awaited before a call, `after` between its answer and whoever asked; either may raise."""

    def __init__(self, shards: dict[ShardId, Shard]) -> None:
        self._shards = shards
        self.asked: list[MemoryCall[Any]] = []
        self.calm()
        for shard in shards.values():
            shard.courier.shards = lambda: self

    def calm(self) -> None:
        """Nothing goes wrong from now on."""
        self.before: Before = _nothing
        self.after: Before = _nothing

    def of(self, kind: type) -> list[MemoryCall[Any]]:
        """Calls of this type, in their order."""
        return [call for call in self.asked if isinstance(call, kind)]

    async def ask(self, shard: ShardId, call: MemoryCall[Any], deadline_s: float) -> Any:
        self.asked.append(call)
        await self.before(shard, call)
        if shard not in self._shards:
            raise ShardGone("It is gone.", certain=True)
        answer = await self._shards[shard].ask(pickle.loads(pickle.dumps(call)))
        await self.after(shard, call)
        return pickle.loads(pickle.dumps(answer))


async def _nothing(shard: ShardId, call: MemoryCall[Any]) -> None: ...
