"""Server-sent events: a response that closes its source, whatever ends it, and the two lines OpenAI puts in it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"


def event(data: dict[str, Any]) -> bytes:
    """One event with a JSON object as its data."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class EventStream(StreamingResponse):
    """Streams an async generator and closes it at once when the client goes away, not at the next collection."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Starlette's own watching for a disconnect is not needed: http_edge.py cancels this task.
        async with aclosing(self._events):
            await self.stream_response(send)
