"""A fact, and the JSON that Redis keeps of one version of it.

    {id, text_hash, turn_id, version, created_at, updated_at, body: {text, role, scopes, metadata, expires_on}}

What Lua reads stands outside; what people said stands in `body`, which is one sealed text where there is a secret.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from sharding.errors import InvalidRequest
from sharding.ids import FactId, UserId
from sharding.sealing import Seal, unreadable

MAX_METADATA_BYTES = 16_384
MAX_METADATA_DEPTH = 32


@dataclass(frozen=True, slots=True)
class Fact:
    """One remembered text, in the version that stands. Times are ISO 8601 in UTC."""

    id: FactId
    user: UserId  # the owner, see scopes.py
    text: str  # as it was told, not normalised
    text_hash: str  # `text_hash(text)`, in hex
    turn_id: str  # facts told together share it
    seq: int  # grows with every fact of the user; never given out twice
    version: int  # 1 for a fact never changed
    created_at: str
    updated_at: str
    embedding: bytes | None = None  # the model's fingerprint, float32 little endian; None until it was computed
    role: str | None = None  # who said it, where that is known
    scopes: Mapping[str, str] = field(default_factory=dict)  # the entities that it was told under, by field
    metadata: Mapping[str, Any] = field(default_factory=dict)  # the client's own
    expires_on: str | None = None  # the last day it is served, YYYY-MM-DD in UTC

    def expired(self, today: str) -> bool:
        """Whether its last day was before `today` (see `today`)."""
        return self.expires_on is not None and self.expires_on < today


@dataclass(frozen=True, slots=True)
class Told:
    """What comes with a text that is to be stored."""

    text: str
    role: str | None = None
    scopes: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    expires_on: str | None = None


def text_hash(text: str) -> str:
    """SHA-256 in hex of `text` in NFC, stripped, each run of whitespace as one space: what makes two facts the same.

    Raises `InvalidRequest` for text that UTF-8 cannot hold (lone surrogates).
    """
    try:
        normalised = " ".join(unicodedata.normalize("NFC", text).split())
        return hashlib.sha256(normalised.encode()).hexdigest()
    except UnicodeEncodeError as error:
        raise InvalidRequest("A fact's text holds characters that are not valid Unicode.", field="text") from error


def check_metadata(metadata: Mapping[str, Any]) -> None:
    """Raises `InvalidRequest` for what JSON cannot hold, and for what is too large or too deep."""
    if _deeper_than(metadata, MAX_METADATA_DEPTH):
        raise InvalidRequest(f"'metadata' is nested more than {MAX_METADATA_DEPTH} levels deep.", field="metadata")
    try:
        size = len(json.dumps(metadata, ensure_ascii=False, allow_nan=False).encode())
    except (TypeError, ValueError) as error:
        raise InvalidRequest("'metadata' holds what JSON cannot.", field="metadata") from error
    if size > MAX_METADATA_BYTES:
        raise InvalidRequest(f"'metadata' is larger than {MAX_METADATA_BYTES} bytes.", field="metadata")


def instant(at: datetime) -> str:
    """A timezone-aware time as facts keep it."""
    return at.astimezone(UTC).isoformat(timespec="milliseconds")


def today() -> str:
    """The day that expiration dates are compared with: today in UTC, as YYYY-MM-DD."""
    return datetime.now(UTC).date().isoformat()


def dump_fact(fact: Fact, seal: Seal) -> bytes:
    """The record of `fact`; its seq and embedding live beside it, under keys of their own."""
    body: Any = {
        "text": fact.text,
        "role": fact.role,
        "scopes": dict(fact.scopes),
        "metadata": dict(fact.metadata),
        "expires_on": fact.expires_on,
    }
    if seal.on:
        body = seal.seal_text(json.dumps(body, ensure_ascii=False, allow_nan=False), fact.user + fact.id)
    record = {
        "id": fact.id,
        "text_hash": seal.hash(fact.text_hash),
        "turn_id": fact.turn_id,
        "version": fact.version,
        "created_at": fact.created_at,
        "updated_at": fact.updated_at,
        "body": body,
    }
    return json.dumps(record, ensure_ascii=False, allow_nan=False).encode()


def load_fact(user: UserId, record: bytes, seq: int, seal: Seal, embedding: bytes | None = None) -> Fact:
    """The fact that `dump_fact` made the record of. Raises `Unreadable`."""
    fields = json.loads(record)
    body = fields.pop("body")
    if seal.on or isinstance(body, str):
        if not (seal.on and isinstance(body, str)):
            raise unreadable()
        body = json.loads(seal.open_text(body, user + fields["id"]))
        fields["text_hash"] = text_hash(body["text"])
    return Fact(user=user, seq=seq, embedding=embedding, **fields, **body)


def _deeper_than(value: object, levels: int) -> bool:
    if not isinstance(value, (dict, list)):
        return False
    members = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_deeper_than(member, levels - 1) for member in members)
