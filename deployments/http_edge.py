"""The outermost layer of the HTTP side, as ASGI: what holds for every request, whichever route answers it.

- The body is read whole before the route runs, and refused beyond its limit (413).
- A client that hangs up cancels its request, streaming or not; the cancellation reaches the shard's engine.
- Whatever escapes the error handlers becomes a 500 without a trace of it; the log has it under the request id.
- `X-Request-ID` is taken from the request or made, and stands on the response.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.http_errors import error_response, internal_error_body
from sharding.errors import TooLarge

log = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestEdge:
    """ASGI middleware. `stamps_request_id` is off behind Serve's proxy, which puts the header on every response."""

    def __init__(self, app: ASGIApp, max_body_bytes: int, stamps_request_id: bool = True) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._stamps_request_id = stamps_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        started = False

        async def stamped_send(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                if self._stamps_request_id:
                    MutableHeaders(scope=message)["X-Request-ID"] = request_id
            await send(message)

        try:
            body = await self._read_body(scope, receive)
            if body is not None:
                await _run_until_disconnect(self._app, scope, body, receive, stamped_send)
        except TooLarge as error:
            await error_response(error)(scope, receive, stamped_send)
        except Exception:  # the edge of the process: nothing may pass
            log.exception("request %s failed", request_id)
            if not started:
                await JSONResponse(internal_error_body(request_id), 500)(scope, receive, stamped_send)

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body, or None where the client hung up before it had sent it. Raises TooLarge."""
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdecimal() and int(announced) > self._max_body_bytes:
            raise self._too_large()
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > self._max_body_bytes:
                raise self._too_large()
            if not message.get("more_body", False):
                return bytes(body)

    def _too_large(self) -> TooLarge:
        return TooLarge(f"The request's body is larger than {self._max_body_bytes} bytes.", field="body")


async def _run_until_disconnect(app: ASGIApp, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
    """Run `app` on a body that was read already; cancel it when the client hangs up."""
    hung_up = asyncio.ensure_future(_disconnected(receive))
    unread = True

    async def replay() -> Message:
        nonlocal unread
        if unread:
            unread = False
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.shield(hung_up)
        return {"type": "http.disconnect"}

    running = asyncio.ensure_future(app(scope, replay, send))
    try:
        await asyncio.wait((running, hung_up), return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended = running.done()
        for task in (running, hung_up):
            task.cancel()
        await asyncio.gather(running, hung_up, return_exceptions=True)
    if ended:
        running.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
