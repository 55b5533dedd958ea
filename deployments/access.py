"""Who may call: ASGI middleware that turns a key into a `Caller` before any route runs.

    Authorization: Bearer <key> (OpenAI's clients) · Authorization: Token <key> (mem0's) · X-API-Key: <key>

What a route needs is decided here, by method and path, and what is not listed needs a key that may write; so a route
that is added later is closed until somebody opens it. Revoking a key takes effect within `CACHE_S`. While Redis is
away, keys that were checked before go on.
"""

from __future__ import annotations

import math
import re
import time
from collections import OrderedDict

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.callers import ANYONE, Caller
from deployments.http_errors import error_response
from deployments.limits import Limits
from sharding.api_keys import MAX_KEY_CHARS, ApiKey, KnowsKeys, Role
from sharding.errors import Forbidden, MemshardError, Unauthorized, Unavailable
from sharding.limits import Taken

OPEN = {"/healthz", "/readyz", "/metrics", "/openapi.json"}
"""Asked by who has no key, and telling nothing of anybody."""

ADMINS = {"/", "/status"}
ADMIN_PATHS = "/v1/admin/"
READING_POSTS = {"/v1/chat/completions", "/v3/memories", "/v3/memories/search", "/search"}

RANKS: dict[Role, int] = {"read": 0, "write": 1, "admin": 2}
CACHE_S = 5.0
CACHED_KEYS = 10_000

_SCHEME = re.compile(r"(?:bearer|token)\s+(\S+)\s*", re.IGNORECASE)


class Access:
    """The middleware. Without `required` keys are not looked at, and everybody is `ANYONE`."""

    def __init__(self, app: ASGIApp, keys: KnowsKeys, limits: Limits, required: bool) -> None:
        self._app = app
        self._keys = keys
        self._limits = limits
        self._required = required
        self._checked: OrderedDict[str, tuple[ApiKey, float]] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN:
            await self._app(scope, receive, send)
            return
        taken: Taken | None = None
        try:
            caller = await self._caller(scope)
            taken = await self._limits.request(caller)
        except MemshardError as error:
            await error_response(error)(scope, receive, send)
            return
        scope.setdefault("state", {})["caller"] = caller
        await self._app(scope, receive, _with_limits(send, taken))

    async def _caller(self, scope: Scope) -> Caller:
        if not self._required:
            return ANYONE
        text = _key_in(Headers(scope=scope))
        known = None if text is None else await self._known(text)
        if known is None:
            reason = "This server needs an API key" if text is None else "This API key is not known"
            raise Unauthorized(f"{reason}; ask its operator for one.", field="authorization")
        needed = needed_role(scope["method"], scope["path"])
        if RANKS[known.role] < RANKS[needed]:
            raise Forbidden(f"This needs a key of the role '{needed}', and yours is of '{known.role}'.")
        return Caller(known.tenant, known.role, known.id)

    async def _known(self, text: str) -> ApiKey | None:
        if len(text) > MAX_KEY_CHARS:
            return None
        now = time.monotonic()
        cached = self._checked.get(text)
        if cached is not None and now - cached[1] < CACHE_S:
            return cached[0]
        try:
            known = await self._keys.find(text)
        except Unavailable:
            if cached is None:
                raise
            return cached[0]
        self._checked.pop(text, None)
        if known is not None:
            self._checked[text] = (known, now)
            if len(self._checked) > CACHED_KEYS:
                self._checked.popitem(last=False)
        return known


def needed_role(method: str, path: str) -> Role:
    """The least role that may send this request."""
    path = path if path == "/" else path.rstrip("/")
    if path in ADMINS or path.startswith(ADMIN_PATHS):
        return "admin"
    reads = method in ("GET", "HEAD", "OPTIONS") or (method == "POST" and path in READING_POSTS)
    return "read" if reads else "write"


def _key_in(headers: Headers) -> str | None:
    if (key := headers.get("x-api-key")) is not None:
        return key
    found = _SCHEME.fullmatch(headers.get("authorization", ""))
    return found.group(1) if found else None


def _with_limits(send: Send, taken: Taken | None) -> Send:
    if taken is None:
        return send

    async def stamped(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["X-RateLimit-Limit"] = str(taken.limit)
            headers["X-RateLimit-Remaining"] = str(taken.left)
            headers["X-RateLimit-Reset"] = str(math.ceil(taken.reset_s))
        await send(message)

    return stamped
