"""What Mem0's two families of routes do alike to search; they differ in how many memories they find by default."""

from __future__ import annotations

from fastapi import Request

from deployments.bodies import parse_body
from deployments.callers import caller_of
from deployments.mem0_bodies import SearchRequest
from deployments.mem0_shapes import Found, found
from deployments.memories import Memories

DEFAULT_THRESHOLD = 0.1


async def search_memories(request: Request, memories: Memories, default_top_k: int) -> Found:
    """What the request asks for, nearest first."""
    asked = parse_body(SearchRequest, await request.body())
    top_k = asked.top_k or asked.limit or default_top_k
    threshold = DEFAULT_THRESHOLD if asked.threshold is None else asked.threshold
    nearest = await memories.search(
        caller_of(request), asked.query, asked.filter(), top_k, threshold, bool(asked.show_expired)
    )
    return Found(results=[found(one) for one in nearest])
