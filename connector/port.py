"""What the shard asks of an engine, whichever it is: the port, and what crosses it.

`connector.engine.MemoryEngine` is the product's. Nothing heavy is imported here, so that a shard around another engine
(`deployments.deterministic`, for load and chaos runs with many shards) loads neither vLLM nor torch.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from connector.chunk import CaptureRange, ChunkId
from connector.moves import Move, Outcome
from connector.plan import PromptPlan
from connector.reason import Reason

CHAT_PRIORITY = 0
ENCODE_PRIORITY = 1
"""Lower runs first: encoding waits for, and is preempted by, live chats."""


@dataclass(frozen=True, slots=True)
class EngineDelta:
    """What came since the last one. `finish_reason` is set on the last. `injected_tokens`, `cached_tokens` (found in
    the engine's prefix cache), `hit_tokens` (those of them that were to be injected) and `fallback` (why chunks were
    prefilled as text instead) are final only there."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    injected_tokens: int
    cached_tokens: int
    fallback: Reason | None
    hit_tokens: int = 0
    logprobs: Any = None


class Engine(Protocol):
    """See `connector.engine.MemoryEngine`, which says what each does and raises."""

    model_digest: str
    token_bytes: int
    ranks: int
    devices: tuple[str, ...]
    block_tokens: int
    counters: dict[str, int]
    refusal: str | None
    max_model_len: int

    @property
    def dead(self) -> bool: ...

    def sampling(
        self, max_tokens: int, stop: Sequence[str] = (), *, schema: Mapping[str, Any] | None = None, **given: Any
    ) -> Any: ...

    def generate(
        self, request_id: str, plan: PromptPlan, sampling: Any, *, priority: int = CHAT_PRIORITY
    ) -> AsyncGenerator[EngineDelta, None]: ...

    async def encode(
        self, request_id: str, token_ids: Sequence[int], captures: Sequence[CaptureRange], salt: str
    ) -> set[ChunkId]: ...

    async def drop(self, ids: Sequence[ChunkId]) -> None: ...

    async def move(self, move: Move) -> dict[ChunkId, Outcome]: ...

    async def listen(self, line: str, nccl: bool) -> list[tuple[str, int]]: ...

    async def dial(self, line: str, doors: Sequence[tuple[str, int]], nccl: bool) -> None: ...

    async def hang_up(self, line: str) -> None: ...

    async def stats(self) -> list[dict[str, int]]: ...

    async def check_health(self) -> None: ...

    def shutdown(self) -> None: ...
