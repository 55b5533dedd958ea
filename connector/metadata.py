"""What crosses the borders inside the engine: request -> scheduler side -> worker side -> scheduler side.

A request carries `kv_transfer_params = {"load": [[id, tokens], …], "capture": [[id, start, tokens], …]}`:
`load` names the chunks that the prompt starts with, in order; `capture` names ranges of the prompt to keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from connector.chunk import CaptureRange, ChunkId, ChunkRef
from connector.reason import Reason


def transfer_params(load: Sequence[ChunkRef] = (), capture: Sequence[CaptureRange] = ()) -> dict[str, Any]:
    """The plain form of a request's wishes, as `SamplingParams.extra_args["kv_transfer_params"]` carries it."""
    return {
        "load": [[id_, tokens] for id_, tokens in load],
        "capture": [[range_.id, range_.start, range_.tokens] for range_ in capture],
    }


@dataclass(frozen=True, slots=True)
class Wishes:
    """`transfer_params`, read back."""

    load: tuple[ChunkRef, ...] = ()
    capture: tuple[CaptureRange, ...] = ()

    @classmethod
    def of(cls, params: dict[str, Any] | None) -> Wishes:
        """Never raises: an exception in a scheduler hook would end the engine; malformed wishes are none."""
        if not params:
            return cls()
        try:
            load = tuple((ChunkId(str(id_)), int(tokens)) for id_, tokens in params.get("load", ()))
            capture = tuple(CaptureRange(ChunkId(str(i)), int(s), int(n)) for i, s, n in params.get("capture", ()))
        except (AttributeError, OverflowError, TypeError, ValueError):
            return cls()
        if any(tokens <= 0 for _, tokens in load) or any(r.start < 0 or r.tokens <= 0 for r in capture):
            return cls()
        return cls(load, capture)

    @property
    def load_tokens(self) -> int:
        return sum(tokens for _, tokens in self.load)


@dataclass(frozen=True, slots=True)
class Load:
    """Write positions `skip` up to `skip + len(slots)` of the composition of `chunks` into `slots` of the paged cache.

    `blocks` are the block ids that hold the slots, for reporting a failure.
    """

    request_id: str
    chunks: tuple[ChunkRef, ...]
    skip: int
    slots: tuple[int, ...]
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Capture:
    """Keep what this step writes into `slots` as tokens `offset`, `offset + 1`, … of a chunk."""

    id: ChunkId
    position: int
    tokens: int
    offset: int
    slots: tuple[int, ...]


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler side -> worker side, once a step."""

    loads: list[Load] = field(default_factory=list)
    captures: list[Capture] = field(default_factory=list)


@dataclass(slots=True)
class StepReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Worker side -> scheduler side: the requests whose load failed in this step, with the reason, and the blocks that
    do not hold what the scheduler published them as."""

    failed: dict[str, Reason] = field(default_factory=dict)
    blocks: set[int] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReport:
        assert isinstance(other, StepReport)
        return StepReport({**self.failed, **other.failed}, self.blocks | other.blocks)
