"""The routes of mem0's self-hosted server, for those who call it by hand: no trailing slash, plain answers.

Refused: its administration. `POST /reset` would delete everybody's memories, `/configure` is what this server's
operator sets.
"""

from __future__ import annotations

from fastapi import APIRouter, Request

from deployments.adding import add_memories, outcome
from deployments.api_docs import body, both_forms, query
from deployments.bodies import parse_body, query_flag, query_int, query_scopes
from deployments.callers import caller_of
from deployments.mem0_bodies import AddRequest, SearchRequest, UpdateRequest, deletion_filter
from deployments.mem0_platform_api import entity_in_path
from deployments.mem0_shapes import (
    Distilled,
    DistilledMemory,
    EntityObject,
    Found,
    HistoryEntry,
    Listed,
    Memory,
    Message,
    entity,
    history,
    memory,
)
from deployments.memories import Memories
from deployments.memories_api import SCOPES
from deployments.searching import search_memories
from deployments.settings import GatewaySettings
from sharding.errors import NotOffered
from sharding.filters import parse_filters

DEFAULT_TOP_K = 20
MAX_TOP_K = 1_000


def oss_routes(memories: Memories, settings: GatewaySettings) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["mem0, self-hosted"])
    _many(routes, memories, settings)
    _one(routes, memories, settings)
    _entities(routes, memories)
    for path in ("/reset", "/configure"):
        routes.add_api_route(path, _refuse, methods=["GET", "POST"], include_in_schema=False)
    return routes


def _many(routes: APIRouter, memories: Memories, settings: GatewaySettings) -> None:
    @both_forms(routes, "POST", "/memories", openapi_extra=body(AddRequest))
    async def add(request: Request) -> Distilled:
        """Memories are distilled from the messages, unless `infer` is false; the answer waits for them."""
        told = await add_memories(request, memories, settings, infer=True)
        if told.status == "SUCCEEDED":
            return Distilled(results=[DistilledMemory(**one.model_dump()) for one in told.results])
        done = await outcome(memories, caller_of(request), told.event_id, settings.deadline_s)
        return Distilled(results=[DistilledMemory(id=id, memory=text, event=what) for id, what, text in done.results])

    more = [*SCOPES, *query("top_k", type="integer", minimum=1, maximum=MAX_TOP_K)]
    more += query("show_expired", type="boolean")

    @both_forms(routes, "GET", "/memories", openapi_extra={"parameters": more})
    async def get_all(request: Request) -> Listed:
        filters = parse_filters(dict(query_scopes(request)))
        size = query_int(request, "top_k", DEFAULT_TOP_K, MAX_TOP_K)
        page = await memories.page(caller_of(request), filters, 1, size, query_flag(request, "show_expired"))
        return Listed(results=[memory(fact) for fact in page.facts])

    @both_forms(routes, "DELETE", "/memories", openapi_extra={"parameters": SCOPES})
    async def forget(request: Request) -> Message:
        await memories.forget(caller_of(request), deletion_filter(request))
        return Message(message="All relevant memories deleted")

    @both_forms(routes, "POST", "/search", openapi_extra=body(SearchRequest))
    async def search(request: Request) -> Found:
        return await search_memories(request, memories, DEFAULT_TOP_K)


def _one(routes: APIRouter, memories: Memories, settings: GatewaySettings) -> None:
    @both_forms(routes, "GET", "/memories/{memory_id}/history")
    async def get_history(memory_id: str, request: Request) -> list[HistoryEntry]:
        return history(await memories.history(caller_of(request), memory_id))

    @both_forms(routes, "GET", "/memories/{memory_id}")
    async def get(memory_id: str, request: Request) -> Memory:
        return memory(await memories.get(caller_of(request), memory_id))

    @both_forms(routes, "PUT", "/memories/{memory_id}", openapi_extra=body(UpdateRequest))
    async def update(memory_id: str, request: Request) -> Message:
        changes = parse_body(UpdateRequest, await request.body()).changes(settings)
        await memories.update(caller_of(request), memory_id, **changes)
        return Message(message="Memory updated successfully!")

    @both_forms(routes, "DELETE", "/memories/{memory_id}")
    async def delete(memory_id: str, request: Request) -> Message:
        await memories.delete(caller_of(request), memory_id)
        return Message(message="Memory deleted successfully")


def _entities(routes: APIRouter, memories: Memories) -> None:
    @both_forms(routes, "GET", "/entities")
    async def list_entities(request: Request) -> list[EntityObject]:
        return [entity(one) for one in await memories.entities(caller_of(request))]

    @routes.delete("/entities/{entity_type}/{name:path}")
    async def delete_entity(entity_type: str, name: str, request: Request) -> Message:
        await memories.forget_entity(caller_of(request), entity_in_path(request, "/entities/"))
        return Message(message="Entity deleted successfully")


async def _refuse(request: Request) -> None:
    raise NotOffered(f"This server has no {request.url.path}: delete users one by one, set it up by its operator.")
