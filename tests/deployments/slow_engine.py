"""A `MemoryEngine` in memory, as far as the encoder uses one: it holds chunks by id, can wait and can fail.

It checks what the real one could not forgive: a capture that is not the tokens its id stands for, and chunks over the
budget.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from connector.chunk import CaptureRange, ChunkId
from sharding.errors import EngineFailed


@dataclass(frozen=True)
class Prefill:
    """One call of `encode`."""

    token_ids: tuple[int, ...]
    captures: tuple[CaptureRange, ...]
    salt: str

    @property
    def ids(self) -> list[ChunkId]:
        return [range_.id for range_ in self.captures]


STEP_TOKENS = (1_000, 1_000)  # of the encoder before it: every job is one prefill


class SlowEngine:
    """`gate` closed makes each `encode` and `drop` wait; `fails_with` makes encodes fail, `drops_fail_with`
    drops; `loses` names chunks that never become complete."""

    model_digest = "model"
    token_bytes = 1
    ranks = 1
    devices: tuple[str, ...] = ("cpu",)
    block_tokens = 1

    def __init__(self, budget_tokens: int) -> None:
        self.refusal: str | None = None
        self.budget_tokens = budget_tokens
        self.chunks: dict[ChunkId, tuple[int, ...]] = {}
        self.prefills: list[Prefill] = []
        self.running = 0
        self.most_running = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.fails_with: Exception | None = None
        self.drops_fail_with: Exception | None = None
        self.loses: set[ChunkId] = set()
        self.counters: dict[str, int] = {}

    def sampling(self, *_: Any, **given: float) -> None: ...

    async def encode(
        self, request_id: str, token_ids: Sequence[int], captures: Sequence[CaptureRange], salt: str
    ) -> set[ChunkId]:
        prefill = Prefill(tuple(token_ids), tuple(captures), salt)
        self.prefills.append(prefill)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self._pass()
            if self.fails_with is not None:
                raise self.fails_with
        finally:
            self.running -= 1
        for range_ in captures:
            assert range_.start + range_.tokens <= len(token_ids)
            if range_.id not in self.loses:
                self.chunks[range_.id] = tuple(token_ids[range_.start : range_.start + range_.tokens])
        assert sum(map(len, self.chunks.values())) <= self.budget_tokens, "the worker would have had no room"
        return {range_.id for range_ in captures} - self.loses

    async def drop(self, ids: Sequence[ChunkId]) -> None:
        if ids:
            if self.drops_fail_with is not None:
                raise self.drops_fail_with
            for id_ in ids:
                self.chunks.pop(id_, None)
            await self._pass()

    async def _pass(self) -> None:
        await asyncio.sleep(0)  # as long as it ever takes, others may run
        await self.gate.wait()


def dead() -> EngineFailed:
    return EngineFailed("The engine of this shard has died.")
