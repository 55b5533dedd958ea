"""JSON bodies and query parameters into typed values, or one sentence that names what is wrong.

Bodies are parsed here and not by FastAPI, whatever their Content-Type: so that malformed JSON, invalid UTF-8, lone
surrogates and wrong types all end in the same `InvalidRequest`, and never echo what the client sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar
from urllib.parse import unquote

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from sharding.errors import InvalidRequest, NotFound
from sharding.ids import UserId
from sharding.scopes import FIELDS, SEPARATOR, Entity, entities

M = TypeVar("M", bound=BaseModel)

MAX_USER_ID_CHARS = 256


def parse_body(model: type[M], body: bytes) -> M:
    """`body` as `model`. Raises InvalidRequest."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _first_problem(error.errors(include_url=False, include_input=False)[0]) from None


def as_user_id(value: str, field: str) -> UserId:
    """A user id as clients may spell it. Raises InvalidRequest that names `field`."""
    if not value.strip():
        raise InvalidRequest(f"'{field}' must not be blank.", field=field)
    if len(value) > MAX_USER_ID_CHARS:
        raise InvalidRequest(f"'{field}' is longer than {MAX_USER_ID_CHARS} characters.", field=field)
    if SEPARATOR in value:
        raise InvalidRequest(f"'{field}' must not hold the control character U+001F.", field=field)
    if "\ufffd" in value:  # what invalid bytes decode to: two broken ids must not become one user
        raise InvalidRequest(f"'{field}' is not valid UTF-8.", field=field)
    return UserId(value)


def scopes_of(given: Mapping[str, str | None]) -> dict[str, str]:
    """The entities among the given fields, at least one, each name checked. Raises InvalidRequest."""
    named = {field: as_user_id(name, field) for field, name in given.items() if name is not None and field in FIELDS}
    if not named:
        others = ", ".join(field for field in FIELDS if field != "user_id")
        raise InvalidRequest(f"'user_id' is required, or one of {others}.", field="user_id")
    return dict(named)


def query_scopes(request: Request) -> dict[str, str]:
    """The entities that the query names, each at most once. Raises InvalidRequest."""
    for field in FIELDS:
        if len(request.query_params.getlist(field)) > 1:
            raise InvalidRequest(f"The query parameter '{field}' may stand once.", field=field)
    return scopes_of({field: request.query_params.get(field) for field in FIELDS})


def query_entity(request: Request) -> Entity:
    """The entity that owns what the query names. Raises InvalidRequest."""
    return entities(query_scopes(request))[0]


def query_flag(request: Request, name: str) -> bool:
    """A yes or no out of the query, no where it is not there. Raises InvalidRequest."""
    text = request.query_params.get(name, "false").lower()
    if text not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"'{name}' must be true or false.", field=name)
    return text in ("true", "1")


def raw_segments(request: Request, prefix: str) -> list[str]:
    """What stands behind `prefix` in the path, cut at its slashes and then decoded: a name may hold encoded ones.

    Raises NotFound for what is not UTF-8.
    """
    raw: bytes = request.scope.get("raw_path") or request.scope["path"].encode()
    path = raw.split(b"?")[0].decode("ascii", errors="replace")
    rest = path[path.index(prefix) + len(prefix) :].removesuffix("/")
    try:
        return [unquote(segment, errors="strict") for segment in rest.split("/")]
    except UnicodeDecodeError:
        raise NotFound("The path is not valid UTF-8.") from None


def query_int(request: Request, name: str, default: int, limit: int) -> int:
    """A whole number from 1 to `limit` out of the query. Raises InvalidRequest."""
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and 1 <= int(text) <= limit):
        raise InvalidRequest(f"'{name}' must be a whole number from 1 to {limit}.", field=name)
    return int(text)


def _first_problem(problem: ErrorDetails) -> InvalidRequest:
    field = _spelled(problem["loc"])
    kind, reason = problem["type"], problem["msg"].removeprefix("Value error, ")
    if kind == "json_invalid":
        return InvalidRequest(f"The body is not valid JSON: {reason.removeprefix('Invalid JSON: ')}.", field="body")
    if not field:
        return InvalidRequest("The body must be a JSON object.", field="body")
    if kind == "missing":
        return InvalidRequest(f"'{field}' is required.", field=field)
    if kind == "extra_forbidden":
        return InvalidRequest(f"'{field}' is not a known field.", field=field)
    if kind == "value_error":  # our own validators speak in predicates
        return InvalidRequest(f"'{field}' {reason}.", field=field)
    return InvalidRequest(f"'{field}' is not valid: {reason[0].lower()}{reason[1:]}.", field=field)


def _spelled(loc: tuple[int | str, ...]) -> str:
    """`("messages", 0, "content")` as `messages[0].content`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")
