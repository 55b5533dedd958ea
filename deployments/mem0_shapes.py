"""What the memory routes answer, as mem0's clients know it; the models also stand in the OpenAPI description."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import Request
from pydantic import BaseModel

from deployments.memory_calls import AddedFact, EventView, FactPage, FactView, FoundFact, OwnerExport
from sharding.registry import EntitySeen
from sharding.scopes import KINDS


class Memory(BaseModel):
    """One memory. `encoded`: its KV is ready to be injected; until then it is served as text."""

    id: str
    memory: str
    hash: str
    version: int
    encoded: bool
    user_id: str | None = None
    agent_id: str | None = None
    app_id: str | None = None
    run_id: str | None = None
    session_id: str | None = None
    role: str | None = None
    metadata: dict[str, Any]
    categories: list[str] = []
    created_at: str
    updated_at: str
    expiration_date: str | None = None


class FoundMemory(Memory):
    """A memory that was searched for; `score` is the cosine between query and memory."""

    score: float


class AddedData(BaseModel):
    memory: str


class AddedMemory(Memory):
    """What became of one message: "ADD", or "NONE" where it was known."""

    event: str
    data: AddedData


class Added(BaseModel):
    """Memories that are stored, or (`status` "PENDING") a turn that is: ask for the event until it is not pending."""

    message: str
    status: str
    event_id: str
    results: list[AddedMemory] = []


class EventResult(BaseModel):
    id: str
    event: str
    data: AddedData


class EventObject(BaseModel):
    """How far an add is: PENDING, SUCCEEDED, or FAILED with a reason."""

    id: str
    event_id: str
    event_type: str = "ADD"
    status: str
    results: list[EventResult]
    reason: str | None
    created_at: str
    updated_at: str


class Distilled(BaseModel):
    """What became of a turn, in the words of mem0's own server."""

    results: list[DistilledMemory]


class DistilledMemory(BaseModel):
    id: str
    memory: str
    event: str


class MemoryPage(BaseModel):
    count: int
    next: str | None
    previous: str | None
    results: list[Memory]


class Found(BaseModel):
    results: list[FoundMemory]


class Listed(BaseModel):
    results: list[Memory]


class Message(BaseModel):
    message: str


class Deleted(Message):
    deleted: int


class HistoryEntry(BaseModel):
    """One version; `id` names it, `memory_id` the memory."""

    id: str
    memory_id: str
    input: list[dict[str, Any]] = []
    old_memory: str | None
    new_memory: str
    user_id: str | None
    event: str
    metadata: dict[str, Any]
    created_at: str
    updated_at: str
    is_deleted: bool = False
    actor_id: str | None = None
    role: str | None = None


class EntityObject(BaseModel):
    id: str
    name: str
    type: str
    created_at: str
    updated_at: str
    owner: str = ""


class EntityPage(BaseModel):
    count: int
    next: str | None
    previous: str | None
    results: list[EntityObject]
    total_users: int
    total_agents: int
    total_apps: int
    total_runs: int


class ExportedTurn(BaseModel):
    """As it was sent; `told_under` are the entities that it named."""

    messages: list[dict[str, str]]
    metadata: dict[str, Any]
    told_under: dict[str, str]
    timestamp: float | None
    expiration_date: str | None
    custom_instructions: str | None


class ExportedMemory(BaseModel):
    versions: list[Memory]
    feedback: Mapping[str, Any] | None


class Export(BaseModel):
    """Everything that is kept of one user, agent, app or run."""

    type: str
    name: str
    memories: list[ExportedMemory]
    turns: list[ExportedTurn]


def memory_fields(fact: FactView) -> dict[str, Any]:
    """The fields of a `Memory`."""
    return {
        "id": fact.id,
        "memory": fact.text,
        "hash": fact.text_hash,
        "version": fact.version,
        "encoded": fact.encoded,
        **{field: fact.scopes.get(field) for field in KINDS.values()},
        "session_id": fact.scopes.get("run_id"),
        "role": fact.role,
        "metadata": dict(fact.metadata),
        "created_at": fact.created_at,
        "updated_at": fact.updated_at,
        "expiration_date": fact.expires_on,
    }


def memory(fact: FactView) -> Memory:
    return Memory(**memory_fields(fact))


def found(one: FoundFact) -> FoundMemory:
    return FoundMemory(**memory_fields(one.fact), score=one.score)


def added(one: AddedFact) -> AddedMemory:
    return AddedMemory(**memory_fields(one.fact), event=one.event, data=AddedData(memory=one.fact.text))


def page_of(found: FactPage, request: Request, page: int, page_size: int) -> MemoryPage:
    """One page, with the addresses of its neighbours."""
    following = page * page_size < found.total
    return MemoryPage(
        count=found.total,
        next=page_url(request, page + 1) if following else None,
        previous=page_url(request, page - 1) if page > 1 else None,
        results=[memory(fact) for fact in found.facts],
    )


def page_url(request: Request, page: int) -> str:
    return str(request.url.include_query_params(page=page))


def history(versions: tuple[FactView, ...]) -> list[HistoryEntry]:
    """Each version with what it replaced, oldest first."""
    entries = []
    before: str | None = None
    for version in versions:
        entries.append(
            HistoryEntry(
                id=f"{version.id}:{version.version}",
                memory_id=version.id,
                old_memory=before,
                new_memory=version.text,
                user_id=version.scopes.get("user_id"),
                event="ADD" if version.version == 1 else "UPDATE",
                metadata=dict(version.metadata),
                created_at=version.created_at,
                updated_at=version.updated_at,
                role=version.role,
            )
        )
        before = version.text
    return entries


def entity(seen: EntitySeen) -> EntityObject:
    return EntityObject(
        id=f"{seen.entity.kind}:{seen.entity.name}",
        name=seen.entity.name,
        type=seen.entity.kind,
        created_at=seen.created_at,
        updated_at=seen.updated_at,
    )


def export(kept: OwnerExport) -> Export:
    memories = [
        ExportedMemory(versions=[memory(version) for version in fact.versions], feedback=fact.feedback)
        for fact in kept.facts
    ]
    turns = [
        ExportedTurn(
            messages=[{"role": role, "content": text} for role, text in turn.messages],
            metadata=dict(turn.metadata),
            told_under=dict(turn.scopes),
            timestamp=turn.told_at,
            expiration_date=turn.expires_on,
            custom_instructions=turn.instructions,
        )
        for turn in kept.turns
    ]
    return Export(type=kept.entity.kind, name=kept.entity.name, memories=memories, turns=turns)


def event(seen: EventView) -> EventObject:
    return EventObject(
        id=seen.id,
        event_id=seen.id,
        status=seen.status,
        results=[EventResult(id=id, event=what, data=AddedData(memory=text)) for id, what, text in seen.results],
        reason=seen.reason,
        created_at=seen.created_at,
        updated_at=seen.updated_at,
    )
