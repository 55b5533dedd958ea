"""What the routes that add memories do alike: store messages as they are, or keep the turn and distil it."""

from __future__ import annotations

import asyncio

from fastapi import Request

from deployments.bodies import parse_body
from deployments.callers import Caller, caller_of
from deployments.mem0_bodies import AddRequest
from deployments.mem0_shapes import Added, added
from deployments.memories import Memories
from deployments.memory_calls import EventView
from deployments.settings import GatewaySettings
from sharding.errors import DeadlineExceeded, EngineFailed

LOOK_AGAIN_S = 0.1


async def add_memories(request: Request, memories: Memories, settings: GatewaySettings, *, infer: bool) -> Added:
    """Stores what the request tells; `infer` is what counts where it does not say."""
    asked = parse_body(AddRequest, await request.body())
    asked.refuse_unsupported()
    caller = caller_of(request)
    if infer if asked.infer is None else asked.infer:
        event = await memories.distil(caller, asked.turn(settings))
        message = "The conversation is kept; memories are distilled from it in the background."
        return Added(message=message, status=event.status, event_id=event.id)
    event_id, stored = await memories.add(caller, asked.facts(settings))
    message = f"{sum(one.event == 'ADD' for one in stored)} memories were added."
    return Added(message=message, status="SUCCEEDED", event_id=event_id, results=[added(one) for one in stored])


async def outcome(memories: Memories, caller: Caller, event_id: str, deadline_s: float) -> EventView:
    """The event, when it is over. Raises `DeadlineExceeded`, and `EngineFailed` where nothing can be distilled."""
    try:
        async with asyncio.timeout(deadline_s):
            while (event := await memories.event(caller, event_id)).status == "PENDING":  # noqa: ASYNC110  # others work on it
                await asyncio.sleep(LOOK_AGAIN_S)
    except TimeoutError:
        message = f"The conversation is kept and still being distilled; ask for the event {event_id}."
        raise DeadlineExceeded(message, event_id=event_id) from None
    if event.status == "FAILED":
        raise EngineFailed(event.reason or "This conversation could not be distilled.")
    return event
