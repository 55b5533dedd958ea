"""The OpenAPI description: bodies that routes read themselves, query parameters, and the one shape of all errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

JSONObject = dict[str, Any]

REF = "#/components/schemas/{model}"
STATUSES = {
    400: "The request cannot be read, or asks for what is not there to be had",
    401: "A key is needed",
    403: "The key may not do this",
    404: "There is no such thing",
    405: "This path does not have the method",
    409: "It contradicts what is stored",
    413: "Too large",
    429: "Too much at once; Retry-After says when to come again",
    500: "The server failed",
    501: "Not offered by this server",
    503: "Not now; Retry-After says when to come again",
    504: "It took longer than it may",
}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every error: `error` is what OpenAI's clients read, `detail` what mem0's show."""

    error: ErrorDetail
    detail: str


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text} for status, text in STATUSES.items()
}


def body(model: type[BaseModel]) -> JSONObject:
    """The description of a body that a route parses itself; `install_openapi` is told of its model."""
    schema = {"$ref": REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def query(*names: str, required: bool = False, **schema: Any) -> list[JSONObject]:
    """The description of query parameters that a route reads itself."""
    return [
        {"name": name, "in": "query", "required": required, "schema": schema or {"type": "string"}} for name in names
    ]


def both_forms(routes: APIRouter, method: str, path: str, **options: Any) -> Callable[[Any], Any]:
    """Registers a route with and without a trailing slash; neither redirects, `path` is the one that is described."""
    other = path.removesuffix("/") if path.endswith("/") else f"{path}/"

    def register(endpoint: Any) -> Any:
        routes.add_api_route(path, endpoint, methods=[method], **options)
        routes.add_api_route(other, endpoint, methods=[method], **{**options, "include_in_schema": False})
        return endpoint

    return register


def install_openapi(app: FastAPI, bodies: list[type[BaseModel]]) -> None:
    """Makes the application describe itself, bodies included."""

    def openapi() -> JSONObject:
        if app.openapi_schema is None:
            described = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, extra = models_json_schema([(model, "validation") for model in bodies], ref_template=REF)
            schemas = described.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(extra.get("$defs", {}))
            for name in ("HTTPValidationError", "ValidationError"):  # requests are never answered by FastAPI's own 422
                schemas.pop(name, None)
            for path in described["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            app.openapi_schema = described
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way
