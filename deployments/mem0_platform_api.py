"""The routes that mem0's `MemoryClient` and `AsyncMemoryClient` call, as version 2.2 of its package does.

Its paths end in a slash, it follows no redirects, and it percent-encodes names whole. What of its platform is no memory
(profiles, projects, webhooks, exports into schemas) is answered 501.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request

from deployments.adding import add_memories
from deployments.api_docs import body, both_forms, query
from deployments.bodies import as_user_id, parse_body, query_entity, query_flag, raw_segments
from deployments.callers import caller_of
from deployments.mem0_bodies import (
    AddRequest,
    BatchItem,
    BatchRequest,
    FeedbackRequest,
    ListRequest,
    SearchRequest,
    UpdateRequest,
)
from deployments.mem0_shapes import (
    Added,
    Deleted,
    EntityPage,
    EventObject,
    Found,
    HistoryEntry,
    Memory,
    MemoryPage,
    Message,
    entity,
    event,
    history,
    memory,
    page_of,
    page_url,
)
from deployments.memories import Memories
from deployments.memories_api import PAGES, SCOPES, pages
from deployments.searching import search_memories
from deployments.settings import GatewaySettings
from sharding.errors import MemshardError, NotFound, NotOffered
from sharding.ids import UserId
from sharding.scopes import FIELDS, KINDS, Entity

DEFAULT_TOP_K = 10
BATCH_AT_ONCE = 8


def platform_routes(memories: Memories, settings: GatewaySettings) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["mem0"])
    _whole(routes, memories, settings)
    _one_memory(routes, memories, settings)
    _entities(routes, memories)
    _batches(routes, memories, settings)
    _not_offered(routes)
    return routes


def _whole(routes: APIRouter, memories: Memories, settings: GatewaySettings) -> None:
    @both_forms(routes, "GET", "/v1/ping/")
    async def ping() -> dict[str, str | None]:
        return {"status": "ok", "org_id": "memshard", "project_id": "memshard", "user_email": None}

    @both_forms(routes, "POST", "/v3/memories/add/", openapi_extra=body(AddRequest))
    async def add(request: Request) -> Added:
        """Memories are distilled from the messages, unless `infer` is false."""
        return await add_memories(request, memories, settings, infer=True)

    @both_forms(routes, "GET", "/v1/event/{event_id}/")
    async def get_event(event_id: str, request: Request) -> EventObject:
        return event(await memories.event(caller_of(request), event_id))

    @both_forms(routes, "POST", "/v3/memories/", openapi_extra={**body(ListRequest), "parameters": PAGES})
    async def get_all(request: Request) -> MemoryPage:
        asked = parse_body(ListRequest, await request.body())
        page, size = pages(request)
        listed = await memories.page(caller_of(request), asked.filter(), page, size, bool(asked.show_expired))
        return page_of(listed, request, page, size)

    @both_forms(routes, "POST", "/v3/memories/search/", openapi_extra=body(SearchRequest))
    async def search(request: Request) -> Found:
        return await search_memories(request, memories, DEFAULT_TOP_K)


def _one_memory(routes: APIRouter, memories: Memories, settings: GatewaySettings) -> None:
    @both_forms(routes, "GET", "/v1/memories/{memory_id}/history/")
    async def get_history(memory_id: str, request: Request) -> list[HistoryEntry]:
        return history(await memories.history(caller_of(request), memory_id))

    @both_forms(routes, "GET", "/v1/memories/{memory_id}/", openapi_extra={"parameters": SCOPES})
    async def get(memory_id: str, request: Request) -> Memory:
        return memory(await memories.get(caller_of(request), memory_id, _owner_in_query(request)))

    @both_forms(routes, "PUT", "/v1/memories/{memory_id}/", openapi_extra=body(UpdateRequest))
    async def update(memory_id: str, request: Request) -> Memory:
        changes = parse_body(UpdateRequest, await request.body()).changes(settings)
        return memory(await memories.update(caller_of(request), memory_id, **changes))

    linked = [*SCOPES, *query("delete_linked", type="boolean")]

    @both_forms(routes, "DELETE", "/v1/memories/{memory_id}/", openapi_extra={"parameters": linked})
    async def delete(memory_id: str, request: Request) -> Message:
        query_flag(request, "delete_linked")  # earlier versions always go with a memory
        await memories.delete(caller_of(request), memory_id, _owner_in_query(request))
        return Message(message="Memory deleted successfully!")

    @both_forms(routes, "POST", "/v1/feedback/", openapi_extra=body(FeedbackRequest))
    async def feedback(request: Request) -> Message:
        said = parse_body(FeedbackRequest, await request.body())
        await memories.feedback(caller_of(request), said.memory_id, said.feedback, said.feedback_reason)
        return Message(message="The feedback is kept with the memory.")


def _entities(routes: APIRouter, memories: Memories) -> None:
    @both_forms(routes, "GET", "/v1/entities/", openapi_extra={"parameters": PAGES})
    async def list_entities(request: Request) -> EntityPage:
        page, size = pages(request)
        seen = await memories.entities(caller_of(request))
        kinds = [one.entity.kind for one in seen]
        everything = "page" not in request.query_params and "page_size" not in request.query_params
        shown = seen if everything else seen[(page - 1) * size : page * size]
        return EntityPage(
            count=len(seen),
            next=page_url(request, page + 1) if not everything and page * size < len(seen) else None,
            previous=page_url(request, page - 1) if page > 1 else None,
            results=[entity(one) for one in shown],
            **{f"total_{kind}s": kinds.count(kind) for kind in KINDS},
        )

    @routes.delete("/v2/entities/{entity_type}/{name:path}")
    async def delete_entity(entity_type: str, name: str, request: Request) -> Deleted:
        count = await memories.forget_entity(caller_of(request), entity_in_path(request, "/v2/entities/"))
        return Deleted(message="Entity deleted successfully!", deleted=count)


def _batches(routes: APIRouter, memories: Memories, settings: GatewaySettings) -> None:
    @both_forms(routes, "PUT", "/v1/batch/", openapi_extra=body(BatchRequest))
    async def update_many(request: Request) -> Message:
        caller = caller_of(request)
        asked = [(item.memory_id, item.changes(settings)) for item in await _batch(request)]
        await _one_by_one([lambda i=id, c=c: memories.update(caller, i, **c) for id, c in asked])  # type: ignore[misc]
        return Message(message=f"Successfully updated {len(asked)} memories")

    @both_forms(routes, "DELETE", "/v1/batch/", openapi_extra=body(BatchRequest))
    async def delete_many(request: Request) -> Message:
        caller, ids = caller_of(request), [item.memory_id for item in await _batch(request)]
        await _one_by_one([lambda id=id: memories.delete(caller, id) for id in ids])  # type: ignore[misc]
        return Message(message=f"Successfully deleted {len(ids)} memories")


def _owner_in_query(request: Request) -> UserId | None:
    """Whose memory it has to be, where the query says so."""
    if not any(field in request.query_params for field in FIELDS):
        return None
    return caller_of(request).owner(query_entity(request))


async def _batch(request: Request) -> list[BatchItem]:
    return parse_body(BatchRequest, await request.body()).memories


async def _one_by_one(jobs: list[Callable[[], Awaitable[object]]]) -> None:
    """All of them, some at a time. Raises the first error when all were tried."""
    gate = asyncio.Semaphore(BATCH_AT_ONCE)

    async def run(job: Callable[[], Awaitable[object]]) -> MemshardError | None:
        async with gate:
            try:
                await job()
            except MemshardError as error:
                return error
        return None

    for error in await asyncio.gather(*map(run, jobs)):
        if error is not None:
            raise error


def entity_in_path(request: Request, prefix: str) -> Entity:
    """The type and the name behind `prefix`; the name may hold anything, encoded. Raises NotFound, InvalidRequest."""
    kind, *names = raw_segments(request, prefix)
    if kind not in KINDS or not names:
        raise NotFound(f"Entities are of the types {', '.join(KINDS)}.", field="entity_type")
    return Entity(kind, as_user_id("/".join(names), "name"))


NOT_OFFERED = ("/v1/exports", "/v1/summary", "/v2/profiles", "/api/v1/orgs", "/api/v1/webhooks")


def _not_offered(routes: APIRouter) -> None:
    async def refuse(request: Request) -> None:
        raise NotOffered(f"This server keeps memories only; it does not have {request.url.path}.")

    for prefix in NOT_OFFERED:
        methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
        routes.add_api_route(f"{prefix}/{{rest:path}}", refuse, methods=methods, include_in_schema=False)
