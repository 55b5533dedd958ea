"""Errors as HTTP: the one table from class to status, OpenAI's body, and the handlers that use them.

Every error body is `{"error": {message, type, param, code}, "detail": message}`: the first is what OpenAI's clients
read, the second what mem0's show. A message is one sentence of ours; what went wrong inside stays in the log, under
the request id. Retryable statuses carry Retry-After.
"""

from __future__ import annotations

import logging
import math
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from sharding.errors import (
    Busy,
    Conflict,
    ContextTooLong,
    DeadlineExceeded,
    EngineFailed,
    Forbidden,
    InvalidRequest,
    MemshardError,
    NotFound,
    NotOffered,
    RateLimited,
    RequestError,
    RetryableError,
    TooLarge,
    Unauthorized,
    Unavailable,
)

log = logging.getLogger(__name__)


class Status(NamedTuple):
    """How one class of the error tree looks over HTTP."""

    http: int
    type: str  # OpenAI's error type
    code: str  # unless the error's details name a better one


STATUSES: dict[type[MemshardError], Status] = {
    InvalidRequest: Status(400, "invalid_request_error", "invalid_request"),
    ContextTooLong: Status(400, "invalid_request_error", "context_length_exceeded"),
    Unauthorized: Status(401, "authentication_error", "invalid_api_key"),
    Forbidden: Status(403, "permission_error", "forbidden"),
    NotFound: Status(404, "invalid_request_error", "not_found"),
    Conflict: Status(409, "invalid_request_error", "conflict"),
    NotOffered: Status(501, "invalid_request_error", "not_offered"),
    TooLarge: Status(413, "invalid_request_error", "too_large"),
    RequestError: Status(400, "invalid_request_error", "invalid_request"),
    Busy: Status(429, "rate_limit_error", "shard_busy"),
    RateLimited: Status(429, "rate_limit_error", "rate_limited"),
    Unavailable: Status(503, "server_error", "unavailable"),
    DeadlineExceeded: Status(504, "server_error", "deadline_exceeded"),
    RetryableError: Status(503, "server_error", "unavailable"),
    EngineFailed: Status(500, "server_error", "engine_failed"),
    MemshardError: Status(500, "server_error", "internal_error"),
}
"""The nearest class in an error's ancestry counts."""

JSONObject = dict[str, Any]


def status_of(error: MemshardError) -> Status:
    """The table's row for this error."""
    return next(STATUSES[cls] for cls in type(error).__mro__ if cls in STATUSES)


def error_body(error: MemshardError) -> JSONObject:
    """The JSON body for an error of the tree; `details["field"]` becomes `param`, `details["code"]` the code."""
    status = status_of(error)
    code = error.details.get("code", status.code)
    return _body(error.message, status.type, error.details.get("field"), code)


def internal_error_body(request_id: str) -> JSONObject:
    """The body for an error that nobody foresaw: nothing of it, but where to find it."""
    message = f"The server failed to handle this request; its log has the reason under request id {request_id}."
    return _body(message, "server_error", None, "internal_error")


def error_response(error: MemshardError) -> JSONResponse:
    """The complete response for an error of the tree."""
    status = status_of(error)
    headers = {}
    if status.http in (429, 503):
        retry_after_s = error.retry_after_s if isinstance(error, RetryableError) else 1.0
        headers["Retry-After"] = str(max(1, math.ceil(retry_after_s)))
    if isinstance(error, RateLimited):
        headers["X-RateLimit-Limit"] = str(error.details["limit"])
        headers["X-RateLimit-Remaining"] = str(error.details["remaining"])
        headers["X-RateLimit-Reset"] = headers["Retry-After"]
    return JSONResponse(error_body(error), status.http, headers)


def install_error_handlers(app: FastAPI) -> None:
    """Answer the tree's errors, and those of routing, in our shape. What is left is caught by `http_edge.py`."""

    async def on_memshard_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, MemshardError)
        if (status := status_of(error).http) >= 500 and not isinstance(error, RequestError):
            trace = status == 500  # the others say what is away, and come in numbers
            log.warning("request %s: %s: %s", request.state.request_id, type(error).__name__, error, exc_info=trace)
        return error_response(error)

    async def on_http_exception(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        reasons = {404: "There is no such path", 405: "This path does not have the method"}
        message = f"{reasons.get(error.status_code, error.detail)}: {request.method} {request.url.path}."
        body = _body(message, "invalid_request_error", None, "not_found" if error.status_code == 404 else None)
        return JSONResponse(body, error.status_code, error.headers)

    app.add_exception_handler(MemshardError, on_memshard_error)
    app.add_exception_handler(HTTPException, on_http_exception)


def _body(message: str, type: str, param: str | None, code: str | None) -> JSONObject:
    return {"error": {"message": message, "type": type, "param": param, "code": code}, "detail": message}
