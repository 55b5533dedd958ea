"""POST /v1/chat/completions and the models: from an OpenAI body to the owner's events, and back.

Nothing is sent before the shard's first event, which comes with the first token: an error until then has its own
status, and the shard may still be replaced by another. After that an error is one last `data: {"error": …}`.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from deployments.api_docs import body as body_of
from deployments.bodies import parse_body
from deployments.callers import caller_of
from deployments.http_errors import error_body, internal_error_body
from deployments.limits import Limits
from deployments.messages import ChatCall, ChatDelta, ChatEvent, ChatFinished, ChatStarted
from deployments.openai_api import ChatRequest, memory_object, model_object, usage
from deployments.owner_calls import OwnerCalls
from deployments.settings import GatewaySettings
from deployments.sse import DONE, EventStream, event
from sharding.errors import EngineFailed, InvalidRequest, MemshardError, NotFound
from sharding.scopes import Entity

log = logging.getLogger(__name__)

JSONObject = dict[str, Any]
E = TypeVar("E", ChatStarted, ChatDelta)

STREAM: dict[int | str, JSONObject] = {
    200: {
        "description": "One completion, or its chunks as server-sent events",
        "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
    }
}


def chat_routes(calls: OwnerCalls, settings: GatewaySettings, limits: Limits) -> APIRouter:
    """The routes; every answer comes from the caller's shard through `calls`."""
    routes = APIRouter()
    created = int(time.time())

    @routes.post("/v1/chat/completions", openapi_extra=body_of(ChatRequest), responses=STREAM)
    async def chat_completions(request: Request) -> Response:
        body = parse_body(ChatRequest, await request.body())
        _check_model(body.model, settings)
        body.refuse_unsupported()
        named = body.caller(_header_user_id(request))
        caller = caller_of(request)
        user = None if named is None else caller.owner(Entity("user", named))
        await limits.chat(caller, user)
        call = body.to_call(uuid.uuid4().hex, user, settings.default_top_k, settings.max_top_k)
        frame = _Frame(call, settings.model)
        if not body.stream:
            answer = _completion(await calls.whole_chat(user, call), frame)
            await limits.spent(caller, user, answer["usage"]["total_tokens"])
            return JSONResponse(answer)
        events = _counted(calls.chat(user, call), partial(limits.spent, caller, user))
        include_usage = body.stream_options is not None and body.stream_options.include_usage
        started = _expect(ChatStarted, await anext(events, None))
        return EventStream(_stream(started, events, frame, include_usage, request.state.request_id))

    @routes.get("/v1/models")
    async def list_models() -> JSONObject:
        return {"object": "list", "data": [model_object(settings.model, created)]}

    @routes.get("/v1/models/{model:path}")
    async def get_model(model: str) -> JSONObject:
        _check_model(model, settings)
        return model_object(settings.model, created)

    return routes


async def _counted(
    events: AsyncGenerator[ChatEvent, None], spent: Callable[[int], Awaitable[None]]
) -> AsyncGenerator[ChatEvent, None]:
    """A stream's events; what they took is counted when they end, whoever ends them."""
    prompt = answer = 0
    try:
        async with aclosing(events):
            async for event in events:
                if isinstance(event, ChatStarted):
                    prompt = event.prompt_tokens
                elif isinstance(event, ChatFinished):
                    answer = event.completion_tokens
                else:
                    answer += 1  # about one a delta, should the stream be cut
                yield event
    finally:
        if prompt:
            await asyncio.shield(spent(prompt + answer))


class _Frame:
    """The fields that all chunks of one answer share."""

    def __init__(self, call: ChatCall, model: str) -> None:
        self._head = {"id": f"chatcmpl-{call.request_id}", "created": int(time.time()), "model": model}

    def completion(self, **fields: Any) -> JSONObject:
        return {**self._head, "object": "chat.completion", "system_fingerprint": None, **fields}

    def chunk(self, delta: JSONObject, finish_reason: str | None = None, **fields: Any) -> JSONObject:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice], **fields}

    def usage_chunk(self, counts: JSONObject) -> JSONObject:
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": counts}


def _completion(events: Sequence[ChatEvent], frame: _Frame) -> JSONObject:
    """The whole answer as one object."""
    started = _expect(ChatStarted, events[0] if events else None)
    texts = [piece.text for piece in events if isinstance(piece, ChatDelta)]
    finished = next((piece for piece in events if isinstance(piece, ChatFinished)), None)
    if finished is None:
        raise _cut_short()
    message = {"role": "assistant", "content": "".join(texts), "refusal": None}
    choice = {"index": 0, "message": message, "finish_reason": finished.finish_reason, "logprobs": None}
    counts = usage(started, finished)
    return frame.completion(choices=[choice], usage=counts, memory=memory_object(finished.memory))


async def _stream(
    started: ChatStarted,
    events: AsyncGenerator[ChatEvent, None],
    frame: _Frame,
    include_usage: bool,
    request_id: str,
) -> AsyncGenerator[bytes, None]:
    """The answer as OpenAI's chunks; an error ends it as one last event.

    `memory` stands on the first chunk as it was planned, and on the one with the finish reason as it turned out.
    """
    no_usage = {"usage": None} if include_usage else {}
    try:
        async with aclosing(events):
            role = {"role": "assistant", "content": ""}
            yield event(frame.chunk(role, memory=memory_object(started.memory), **no_usage))
            finished = None
            async for piece in events:
                if isinstance(piece, ChatFinished):
                    finished = piece
                    continue
                yield event(frame.chunk({"content": _expect(ChatDelta, piece).text}, **no_usage))
        if finished is None:
            raise _cut_short()
        yield event(frame.chunk({}, finished.finish_reason, memory=memory_object(finished.memory), **no_usage))
        if include_usage:
            yield event(frame.usage_chunk(usage(started, finished)))
        yield DONE
    except MemshardError as error:
        log.warning("request %s ended in its stream: %s", request_id, error)
        yield event(error_body(error))
    except Exception:  # the edge: the status is sent already, an error has to be an event
        log.exception("request %s failed in its stream", request_id)
        yield event(internal_error_body(request_id))


def _check_model(model: str, settings: GatewaySettings) -> None:
    if model != settings.model:
        message = f"The model '{model[:200]}' does not exist; this server has '{settings.model}'."
        raise NotFound(message, field="model", code="model_not_found")


def _header_user_id(request: Request) -> str | None:
    raw = next((value for name, value in request.headers.raw if name == b"x-user-id"), None)
    try:
        return None if raw is None else raw.decode()
    except UnicodeDecodeError:
        raise InvalidRequest("'x-user-id' is not valid UTF-8.", field="x-user-id") from None


def _expect(kind: type[E], got: ChatEvent | None) -> E:
    if not isinstance(got, kind):
        raise _cut_short()
    return got


def _cut_short() -> EngineFailed:
    return EngineFailed("The shard ended its answer too early.")
