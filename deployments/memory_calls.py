"""What a gateway asks a shard about one owner's memory, and what it is told. Frozen, small, picklable.

A call's type names its answer, so that one method of a shard takes them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from connector.chunk import ChunkId, ChunkRef
from connector.moves import Outcome
from sharding.filters import Filter
from sharding.ids import FactId, Placement, ShardId, UserId
from sharding.move import End
from sharding.scopes import Entity
from sharding.turns import Status, Turn

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class MemoryCall(Generic[T_co]):
    """A call that is answered by a `T_co`."""

    request_id: str
    placement: Placement


@dataclass(frozen=True, slots=True)
class FactView:
    """A fact as clients see it. Times are ISO 8601 in UTC."""

    id: FactId
    user: UserId  # the owner, see scopes.py
    text: str
    created_at: str
    updated_at: str
    encoded: bool  # whether its KV is ready to be injected; until then it is served as text
    version: int = 1
    text_hash: str = ""
    role: str | None = None
    scopes: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    expires_on: str | None = None


@dataclass(frozen=True, slots=True)
class AddedFact:
    """Outcome for one text: "ADD" for a new fact, "NONE" where the user already had it."""

    fact: FactView
    event: Literal["ADD", "NONE"]


@dataclass(frozen=True, slots=True)
class AddCall(MemoryCall[tuple[AddedFact, ...]]):
    """Store each text as one fact; the texts are one conversation turn. `roles` are theirs, where they are known."""

    texts: tuple[str, ...]
    roles: tuple[str, ...] = ()
    scopes: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    expires_on: str | None = None
    told_at: float | None = None  # seconds since 1970; None is now


@dataclass(frozen=True, slots=True)
class FactPage:
    """`total` counts what matched, on all pages."""

    total: int
    facts: tuple[FactView, ...]


@dataclass(frozen=True, slots=True)
class ListCall(MemoryCall[FactPage]):
    """One page of the facts that match, in the order of their creation; `page` counts from 1."""

    page: int = 1
    page_size: int = 100
    filters: Filter | None = None
    with_expired: bool = False


@dataclass(frozen=True, slots=True)
class FoundFact:
    """`score` is the cosine between the query and the fact."""

    fact: FactView
    score: float


@dataclass(frozen=True, slots=True)
class SearchCall(MemoryCall[tuple[FoundFact, ...]]):
    """The facts nearest to `query` that match, nearest first, none below `threshold`."""

    query: str
    top_k: int = 10
    threshold: float = 0.0
    filters: Filter | None = None
    with_expired: bool = False


@dataclass(frozen=True, slots=True)
class FactCall(MemoryCall[FactView]):
    """Get one fact."""

    fact_id: FactId


@dataclass(frozen=True, slots=True)
class DeleteCall(MemoryCall[None]):
    """Delete one fact."""

    fact_id: FactId


@dataclass(frozen=True, slots=True)
class UpdateCall(MemoryCall[FactView]):
    """A new version of one fact; None leaves a field as it is, and `never_expires` clears its last day."""

    fact_id: FactId
    text: str | None = None
    metadata: Mapping[str, Any] | None = None
    expires_on: str | None = None
    never_expires: bool = False
    told_at: float | None = None


@dataclass(frozen=True, slots=True)
class HistoryCall(MemoryCall[tuple[FactView, ...]]):
    """Every version of one fact that is known, oldest first; the last is the one that stands."""

    fact_id: FactId


@dataclass(frozen=True, slots=True)
class ForgetCall(MemoryCall[int]):
    """Delete the facts that match, or every one; how many there were."""

    filters: Filter | None = None


@dataclass(frozen=True, slots=True)
class FeedbackCall(MemoryCall[None]):
    """Keep what a reader said of a fact; a `verdict` of None takes it back."""

    fact_id: FactId
    verdict: str | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class EventView:
    """How far an add is. `results`: (fact id, what became of it, its text as it is now)."""

    id: str
    status: Status
    created_at: str
    updated_at: str
    results: tuple[tuple[FactId, str, str], ...] = ()
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class DistilCall(MemoryCall[EventView]):
    """Keep a turn and distil facts from it; `request_id` becomes the id of the turn and its event."""

    turn: Turn


@dataclass(frozen=True, slots=True)
class EventCall(MemoryCall[EventView]):
    """Ask how far an add is."""

    event_id: str


@dataclass(frozen=True, slots=True)
class FactExport:
    """One fact with everything that is kept of it."""

    versions: tuple[FactView, ...]  # oldest first
    feedback: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class OwnerExport:
    """Everything that is kept of one owner, but for what is derived from it."""

    entity: Entity
    facts: tuple[FactExport, ...]
    turns: tuple[Turn, ...] = ()  # that facts were distilled from


@dataclass(frozen=True, slots=True)
class ExportCall(MemoryCall[OwnerExport]):
    """Everything that is kept of the owner."""


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """`facts` were encoded anew after corrections, by prefills of `tokens` tokens, their windows included. Encoding the
    whole memory would have taken `full_tokens`."""

    facts: int
    tokens: int
    full_tokens: int

    @property
    def share(self) -> float:
        """Of the cost of a full build."""
        return self.tokens / self.full_tokens if self.full_tokens else 0.0


@dataclass(frozen=True, slots=True)
class RebuildCall(MemoryCall[Rebuilt]):
    """Encode anew what corrections left stale, now."""


@dataclass(frozen=True, slots=True)
class MoveReport:
    """How a move ended. `placement` is the one under which the user is served now, as far as the source knows."""

    end: End
    placement: Placement
    copied_chunks: int = 0  # that the tier both see did not have before
    sent_chunks: int = 0  # from worker to worker
    sent_bytes: int = 0  # by all of a shard's workers together
    copied_s: float = 0.0  # how long the copy took that nobody waited for
    paused_s: float = 0.0  # how long writes waited
    closed_s: float = 0.0  # how long reads waited


@dataclass(frozen=True, slots=True)
class MoveCall(MemoryCall[MoveReport]):
    """Move the user to another shard."""

    target: ShardId


@dataclass(frozen=True, slots=True)
class Accepted:
    """What the target of a copy makes of an offer; where it is `known` and waited for, nothing, it is refused."""

    known: frozenset[ChunkId] = frozenset()  # that it has already
    chunks: tuple[ChunkRef, ...] = ()  # that it has room for now and waits for, in this order
    doors: tuple[tuple[str, int], ...] = ()  # of each rank, where the line is new to it
    nccl: bool = False


@dataclass(frozen=True, slots=True)
class OfferCall(MemoryCall[Accepted]):
    """Chunks of a user are ready to be sent over a line, to a shard that may own the user soon. The placement is the
    one that stands; `request_id` names the transfer."""

    line: str
    digest: str  # of the model
    devices: tuple[str, ...]  # of the source's ranks, where NCCL may be used, else nothing
    chunks: tuple[ChunkRef, ...]
    load_per_s: float = 0.0  # how often the user is served


@dataclass(frozen=True, slots=True)
class ArrivedCall(MemoryCall[dict[ChunkId, Outcome]]):
    """What became of the chunks of the transfer of this `request_id`; waits until it has ended."""


@dataclass(frozen=True, slots=True)
class DropCopyCall(MemoryCall[None]):
    """Chunks of a user who has not moved: drop them, or with None all of them."""

    ids: frozenset[ChunkId] | None


@dataclass(frozen=True, slots=True)
class DrainReport:
    """How many users were moved away, and how many there was no time for."""

    moved: int
    left: int
