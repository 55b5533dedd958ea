"""The routes under /v1/memories that speak of one user: add, list, delete all, and export.

Every path works with and without a trailing slash, and none redirects. A user for whom nothing was ever stored is not
found; one whose facts were all deleted has an empty page. mem0's own routes are beside it: `mem0_platform_api.py`,
`mem0_oss_api.py`.
"""

from __future__ import annotations

from fastapi import APIRouter, Request

from deployments.adding import add_memories
from deployments.api_docs import body, both_forms, query
from deployments.bodies import query_entity, query_int
from deployments.callers import caller_of
from deployments.mem0_bodies import AddRequest, deletion_filter
from deployments.mem0_shapes import Added, Deleted, Export, MemoryPage, export, page_of
from deployments.memories import Memories
from deployments.settings import GatewaySettings
from sharding.filters import ANY, Compare, anchors
from sharding.scopes import FIELDS, Entity

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 200
MAX_PAGE = 1_000_000

PAGES = [
    *query("page", type="integer", minimum=1, maximum=MAX_PAGE),
    *query("page_size", type="integer", minimum=1, maximum=MAX_PAGE_SIZE),
]
SCOPES = query(*FIELDS)


def memory_routes(memories: Memories, settings: GatewaySettings) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["memories"])

    @both_forms(routes, "POST", "/v1/memories", openapi_extra=body(AddRequest))
    async def add(request: Request) -> Added:
        """Messages are stored as they are, unless `infer` is true."""
        return await add_memories(request, memories, settings, infer=False)

    @both_forms(routes, "GET", "/v1/memories", openapi_extra={"parameters": [*SCOPES, *PAGES]})
    async def list_facts(request: Request) -> MemoryPage:
        owner = caller_of(request).owner(query_entity(request))
        page, size = pages(request)
        return page_of(await memories.page_of(owner, page, size), request, page, size)

    parameters = [*SCOPES, *query("filters")]

    @both_forms(routes, "DELETE", "/v1/memories", openapi_extra={"parameters": parameters})
    async def forget(request: Request) -> Deleted:
        caller, filters = caller_of(request), deletion_filter(request)
        if isinstance(filters, Compare) and filters.operator == "eq" and filters.operand != ANY:
            (entity,) = anchors(filters) or (Entity("", ""),)
            count = await memories.forget_entity(caller, entity)
        else:
            count = await memories.forget(caller, filters)
        return Deleted(message="All memories that were meant are deleted.", deleted=count)

    @both_forms(routes, "GET", "/v1/export", openapi_extra={"parameters": SCOPES})
    async def export_all(request: Request) -> Export:
        return export(await memories.export(caller_of(request), query_entity(request)))

    return routes


def pages(request: Request) -> tuple[int, int]:
    """`page` and `page_size` out of the query. Raises InvalidRequest."""
    page = query_int(request, "page", 1, MAX_PAGE)
    return page, query_int(request, "page_size", DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
