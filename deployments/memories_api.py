"""The routes under /v1/memories: store, list, read and delete one user's facts, in the shapes that mem0 gave them.

Every path works with and without a trailing slash, and none redirects. A request without `user_id` is refused:
nothing here ever concerns more than one user. A user for whom nothing was ever stored is not found; one whose facts
were all deleted has an empty page. `infer` must not be true, facts are stored as they are sent.
"""

from __future__ import annotations

import uuid
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, field_validator

from deployments.bodies import as_user_id, parse_body, query_int, query_user_id
from deployments.messages import AddCall, FactCall, FactView, ForgetCall, ListCall
from deployments.openai_api import text_of
from deployments.owner_calls import OwnerCalls
from deployments.settings import GatewaySettings
from deployments.shard_client import Shards
from sharding.errors import InvalidRequest, NotFound, TooLarge
from sharding.ids import FactId

JSONObject = dict[str, Any]

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 200
MAX_PAGE = 1_000_000
MAX_FACT_ID_CHARS = 256

NOT_KEPT = (
    "agent_id",
    "app_id",
    "run_id",
    "metadata",
    "filters",
    "expiration_date",
    "timestamp",
    "custom_instructions",
    "custom_categories",
)
"""mem0's fields that this server would have to drop: refused, so that nobody relies on them."""


class MemoryMessage(BaseModel):
    """One message, stored as one fact. Its role is accepted and not kept."""

    model_config = ConfigDict(strict=True)

    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: str

    @field_validator("content", mode="before")
    @classmethod
    def _text(cls, content: object) -> str:
        return text_of(content)


class AddRequest(BaseModel):
    """The body of POST /v1/memories: the messages of one conversation turn, or one text."""

    model_config = ConfigDict(strict=True, extra="allow")

    user_id: str
    messages: list[MemoryMessage] = Field(min_length=1)
    infer: bool | None = None

    @field_validator("messages", mode="before")
    @classmethod
    def _one_text(cls, messages: object) -> object:
        return [{"content": messages}] if isinstance(messages, str) else messages

    def refuse_unsupported(self) -> None:
        """Raises InvalidRequest for a field that asks for what this server cannot do."""
        if self.infer:
            message = "'infer' must be false: facts are not distilled from messages yet, they are stored as they are."
            raise InvalidRequest(message, field="infer")
        extra = self.model_extra or {}
        for field in NOT_KEPT:
            if extra.get(field) not in (None, {}, []):
                raise InvalidRequest(f"'{field}' is not supported: it would not be kept.", field=field)

    def texts(self, settings: GatewaySettings) -> tuple[str, ...]:
        """The facts' texts. Raises InvalidRequest or TooLarge."""
        if len(self.messages) > settings.max_facts_per_call:
            reason = f"'messages' has more than {settings.max_facts_per_call} entries; send several requests."
            raise InvalidRequest(reason, field="messages")
        for index, message in enumerate(self.messages):
            field = f"messages[{index}].content"
            if not message.content.strip():
                raise InvalidRequest(f"'{field}' must not be blank.", field=field)
            if len(message.content) > settings.max_fact_chars:
                raise TooLarge(f"'{field}' is longer than {settings.max_fact_chars} characters.", field=field)
        return tuple(message.content for message in self.messages)


def memory_routes(shards: Shards, calls: OwnerCalls, settings: GatewaySettings) -> APIRouter:
    """The routes; every call goes to the user's owner through `calls`."""
    routes = APIRouter()

    @routes.post("/v1/memories")
    @routes.post("/v1/memories/", include_in_schema=False)
    async def add(request: Request) -> JSONObject:
        body = parse_body(AddRequest, await request.body())
        body.refuse_unsupported()
        user, texts, id = as_user_id(body.user_id, "user_id"), body.texts(settings), _call_id()
        added = await calls.add(user, lambda p, left_s: shards.add(p.shard, AddCall(id, p, texts), left_s))
        return {"results": [{**fact_object(one.fact), "event": one.event} for one in added]}

    @routes.get("/v1/memories")
    @routes.get("/v1/memories/", include_in_schema=False)
    async def list_facts(request: Request) -> JSONObject:
        user, id = query_user_id(request), _call_id()
        page = query_int(request, "page", 1, MAX_PAGE)
        size = query_int(request, "page_size", DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
        found = await calls.call(
            user, lambda p, left_s: shards.list_facts(p.shard, ListCall(id, p, page, size), left_s)
        )
        return {
            "count": found.total,
            "next": _page_url(request, page + 1) if page * size < found.total else None,
            "previous": _page_url(request, page - 1) if page > 1 else None,
            "results": [fact_object(fact) for fact in found.facts],
        }

    @routes.delete("/v1/memories")
    @routes.delete("/v1/memories/", include_in_schema=False)
    async def forget(request: Request) -> JSONObject:
        user, id = query_user_id(request), _call_id()
        deleted = await calls.call(user, lambda p, left_s: shards.forget(p.shard, ForgetCall(id, p), left_s))
        return {"message": "All memories of this user were deleted.", "deleted": deleted}

    @routes.get("/v1/memories/{fact_id:path}")
    async def get_fact(fact_id: str, request: Request) -> JSONObject:
        user, fact, id = query_user_id(request), _fact_id(fact_id), _call_id()
        found = await calls.call(user, lambda p, left_s: shards.get_fact(p.shard, FactCall(id, p, fact), left_s))
        return fact_object(found)

    @routes.delete("/v1/memories/{fact_id:path}")
    async def delete_fact(fact_id: str, request: Request) -> JSONObject:
        user, fact, id = query_user_id(request), _fact_id(fact_id), _call_id()
        await calls.delete(user, lambda p, left_s: shards.delete_fact(p.shard, FactCall(id, p, fact), left_s))
        return {"message": "Memory deleted successfully!"}

    return routes


def fact_object(fact: FactView) -> JSONObject:
    """A fact as clients see it."""
    return {
        "id": fact.id,
        "memory": fact.text,
        "user_id": fact.user,
        "created_at": fact.created_at,
        "updated_at": fact.updated_at,
        "encoded": fact.encoded,
    }


def _fact_id(path: str) -> FactId:
    """The id out of the rest of a path, which may end in a slash. Raises NotFound for what cannot be one."""
    id = path.removesuffix("/")
    if not id or len(id) > MAX_FACT_ID_CHARS:
        raise NotFound("There is no memory with this id.", field="id")
    return FactId(id)


def _call_id() -> str:
    """Ids of calls are ours: a client's X-Request-ID need not be unique."""
    return uuid.uuid4().hex


def _page_url(request: Request, page: int) -> str:
    return str(request.url.include_query_params(page=page))
