"""mem0's requests as data: what its clients send, checked. No I/O.

Fields that nobody here knows are ignored, as mem0's own server does; those that would be silently dropped although they
change what is remembered are refused (`NOT_KEPT`).
"""

from __future__ import annotations

import ast
from datetime import UTC, date, datetime
from typing import Annotated, Any, Literal

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, field_validator

from deployments.bodies import query_scopes, scopes_of
from deployments.memories import NewFacts
from deployments.openai_api import text_of
from deployments.settings import GatewaySettings
from sharding.errors import InvalidRequest, TooLarge
from sharding.fact_records import check_metadata
from sharding.filters import Combine, Compare, Filter, anchors, parse_filters, parse_time
from sharding.scopes import FIELDS
from sharding.turns import Turn

JSONObject = dict[str, Any]

MAX_BATCH = 1_000
MAX_QUERY_CHARS = 8_192
LAST_SECOND = 253_402_300_799  # of the year 9999

NOT_KEPT = ("custom_categories", "structured_data_schema", "includes", "excludes", "immutable")
"""Fields that this server would have to drop: refused, so that nobody relies on them."""

Scope = str | None
Number = Annotated[float, Field(ge=0, le=LAST_SECOND)]


class Lenient(BaseModel):
    """Unknown fields are kept apart, in `model_extra`."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class MemoryMessage(BaseModel):
    """One message, stored as one fact with its role."""

    model_config = ConfigDict(strict=True)

    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: str

    @field_validator("content", mode="before")
    @classmethod
    def _text(cls, content: object) -> str:
        return text_of(content)


class AddRequest(Lenient):
    """The messages of one conversation turn, or one text; at least one entity, here or in `filters`."""

    messages: list[MemoryMessage] = Field(min_length=1)
    user_id: Scope = None
    agent_id: Scope = None
    app_id: Scope = None
    run_id: Scope = None
    filters: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    infer: bool | None = None
    expiration_date: str | None = None
    timestamp: Number | None = None

    @field_validator("messages", mode="before")
    @classmethod
    def _as_list(cls, messages: object) -> object:
        if isinstance(messages, str):
            return [{"content": messages}]
        return [messages] if isinstance(messages, dict) else messages

    custom_instructions: Annotated[str, Field(max_length=4_096)] | None = None

    def refuse_unsupported(self) -> None:
        """Raises InvalidRequest for a field that asks for what this server cannot do."""
        extra = self.model_extra or {}
        for name in NOT_KEPT:
            if extra.get(name) not in (None, {}, [], False):
                raise InvalidRequest(f"'{name}' is not supported: it would not be kept.", field=name)

    def facts(self, settings: GatewaySettings) -> NewFacts:
        """What is to be stored. Raises InvalidRequest or TooLarge."""
        if len(self.messages) > settings.max_facts_per_call:
            reason = f"'messages' has more than {settings.max_facts_per_call} entries; send several requests."
            raise InvalidRequest(reason, field="messages")
        for index, message in enumerate(self.messages):
            check_text(message.content, f"messages[{index}].content", settings)
        metadata = self.metadata or {}
        check_metadata(metadata)
        return NewFacts(
            texts=tuple(message.content for message in self.messages),
            roles=tuple(message.role for message in self.messages),
            scopes=self.scopes(),
            metadata=metadata,
            expires_on=as_day(self.expiration_date, "expiration_date"),
            told_at=self.timestamp,
        )

    def turn(self, settings: GatewaySettings) -> Turn:
        """The same, to distil facts from. Raises InvalidRequest or TooLarge."""
        new = self.facts(settings)
        return Turn(
            messages=tuple(zip(new.roles, new.texts, strict=True)),
            scopes=new.scopes,
            metadata=new.metadata,
            expires_on=new.expires_on,
            told_at=new.told_at,
            instructions=self.custom_instructions,
        )

    def scopes(self) -> dict[str, str]:
        """The entities that the turn is told under."""
        named = {field: getattr(self, field) for field in FIELDS}
        for field, name in (self.filters or {}).items():
            if field not in FIELDS or not isinstance(name, str):
                raise InvalidRequest(f"'filters' of an add names {', '.join(FIELDS)} only.", field="filters")
            named[field] = name
        return scopes_of(named)


class ListRequest(Lenient):
    """What to list; `page` and `page_size` stand in the query."""

    filters: dict[str, Any]
    start_date: str | None = None
    end_date: str | None = None
    show_expired: bool | None = None

    def filter(self) -> Filter:
        """All conditions as one. Raises InvalidRequest."""
        parts = [parse_filters(self.filters)]
        for name, operator, value in (("start_date", "gte", self.start_date), ("end_date", "lte", self.end_date)):
            if value is not None:
                if parse_time(value) is None:
                    raise InvalidRequest(f"'{name}' is not an ISO 8601 date or time.", field=name)
                parts.append(Compare("created_at", operator, value))
        return parts[0] if len(parts) == 1 else Combine("AND", tuple(parts))


class SearchRequest(Lenient):
    """What to search for, and among which memories. The entities may stand in `filters` or beside it."""

    query: Annotated[str, Field(max_length=MAX_QUERY_CHARS)]
    filters: dict[str, Any] = Field(default_factory=dict)
    user_id: Scope = None
    agent_id: Scope = None
    app_id: Scope = None
    run_id: Scope = None
    top_k: Annotated[int, Field(ge=1, le=1_000)] | None = None
    limit: Annotated[int, Field(ge=1, le=1_000)] | None = None
    threshold: Annotated[float, Field(ge=-1, le=1)] | None = None
    show_expired: bool | None = None

    @field_validator("query")
    @classmethod
    def _not_blank(cls, query: str) -> str:
        if not query.strip():
            raise ValueError("must not be blank")
        return query

    def filter(self) -> Filter:
        """Raises InvalidRequest."""
        beside = {field: name for field in FIELDS if (name := getattr(self, field)) is not None}
        return parse_filters({**self.filters, **beside})


class UpdateRequest(Lenient):
    """A new version of one memory; what is not given stays as it is."""

    text: str | None = None
    data: str | None = None  # what older clients call the text
    metadata: dict[str, Any] | None = None
    expiration_date: str | None = None
    timestamp: Number | str | None = None

    def changes(self, settings: GatewaySettings) -> JSONObject:
        """The fields of an `UpdateCall`. Raises InvalidRequest or TooLarge."""
        text = self.data if self.text is None else self.text
        if text is None and self.metadata is None and "expiration_date" not in self.model_fields_set:
            raise InvalidRequest("An update needs a text, metadata or an expiration_date.", field="text")
        if text is not None:
            check_text(text, "text", settings)
        if self.metadata is not None:
            check_metadata(self.metadata)
        return {
            "text": text,
            "metadata": self.metadata,
            "expires_on": as_day(self.expiration_date, "expiration_date"),
            "never_expires": "expiration_date" in self.model_fields_set and self.expiration_date is None,
            "told_at": _as_seconds(self.timestamp),
        }


class BatchItem(UpdateRequest):
    memory_id: str


class BatchRequest(Lenient):
    """Memories to change, or to delete."""

    memories: list[BatchItem] = Field(min_length=1, max_length=MAX_BATCH)


class FeedbackRequest(Lenient):
    """What a reader says of a memory; null takes it back."""

    memory_id: str
    feedback: Literal["POSITIVE", "NEGATIVE", "VERY_NEGATIVE"] | None = None
    feedback_reason: Annotated[str, Field(max_length=4_096)] | None = None


def check_text(text: str, field: str, settings: GatewaySettings) -> None:
    """Raises InvalidRequest for a blank text, TooLarge for one over the limit."""
    if not text.strip():
        raise InvalidRequest(f"'{field}' must not be blank.", field=field)
    if len(text) > settings.max_fact_chars:
        raise TooLarge(f"'{field}' is longer than {settings.max_fact_chars} characters.", field=field)


def as_day(text: str | None, field: str) -> str | None:
    """A date as facts keep it. Raises InvalidRequest."""
    try:
        return None if text is None else date.fromisoformat(text).isoformat()
    except ValueError:
        raise InvalidRequest(f"'{field}' must be a date, YYYY-MM-DD.", field=field) from None


def deletion_filter(request: Request) -> Filter:
    """What a deletion's query means: entities, each by its name, or `filters`, where mem0's client puts the repr of a
    dict. Raises InvalidRequest for a query that is empty, unreadable or says nothing of whose memories it means."""
    known = {*FIELDS, "filters"}
    if unknown := set(request.query_params) - known:
        name = min(unknown)[:40]
        raise InvalidRequest(f"A deletion knows no '{name}'; it would delete more than was meant.", field=name)
    if (text := request.query_params.get("filters")) is None:
        return parse_filters(dict(query_scopes(request)))
    if len(request.query_params.multi_items()) != 1:
        raise InvalidRequest("Beside 'filters', a deletion's query may hold nothing else.", field="filters")
    try:
        filter = parse_filters(ast.literal_eval(text))
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        raise InvalidRequest("'filters' cannot be read; nothing was deleted.", field="filters") from None
    if anchors(filter) is None:
        raise InvalidRequest("'filters' does not say whose memories to delete; nothing was deleted.", field="filters")
    return filter


def _as_seconds(timestamp: float | str | None) -> float | None:
    if not isinstance(timestamp, str):
        return timestamp
    at = parse_time(timestamp)
    if at is None or not 0 <= at <= LAST_SECOND:
        raise InvalidRequest("'timestamp' is neither seconds since 1970 nor an ISO 8601 time.", field="timestamp")
    return datetime.fromtimestamp(at, UTC).timestamp()
