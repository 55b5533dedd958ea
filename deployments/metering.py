"""What every request leaves behind: a count, a duration, a log line and, where traces are on, a span."""

from __future__ import annotations

import logging
import time

from opentelemetry import propagate
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.telemetry import REQUEST, REQUESTS, begun, span

QUIET = {"/healthz", "/readyz", "/metrics", "/status", "/"}
"""Asked all the time by machines: counted, and not logged."""

HUNG_UP = 499
"""As status of a request whose client left before the answer began."""

log = logging.getLogger(__name__)


class Meter:
    """ASGI middleware inside `http_edge.RequestEdge`, which has given the request its id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        status = HUNG_UP
        begun(request_id=scope["state"]["request_id"])

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        parent = propagate.extract(dict(Headers(scope=scope)))
        try:
            with span(scope["method"], parent) as whole:
                try:
                    await self._app(scope, receive, counted)
                finally:
                    whole.update_name(f"{scope['method']} {_route(scope)}")
        finally:
            _note(scope, status, time.perf_counter() - began)


def _note(scope: Scope, status: int, took_s: float) -> None:
    route = _route(scope)
    REQUESTS.labels(scope["method"], route, status).inc()
    REQUEST.labels(route).observe(took_s)
    if route not in QUIET:
        fields = {"method": scope["method"], "route": route, "status": status, "took_s": round(took_s, 4)}
        log.info("answered", extra={"fields": fields})


def _route(scope: Scope) -> str:
    """The path as it was declared: the one that was asked for holds names, or anything at all."""
    return str(getattr(scope.get("route"), "path", "none"))
