"""Whose a memory is: tenants, and the four kinds of entity that mem0's clients name (user, agent, app, run).

The *owner* of a memory, which is what is placed on a shard (`ids.UserId`), is the most specific of the entities it was
told under: its user, else its agent, else its app, else its run. The others are attributes that can be filtered on.

    user ada, no tenant             owner "ada"
    every other kind, or a tenant   owner "<tenant> US <kind> US <name>"    (US: U+001F, which no name may hold)

A fact's id names its owner without telling who it is: it is a UUID (version 8, RFC 9562) whose first 60 free bits are a
hash of the owner; `registry.py` knows which owner of a tenant has that hash. So a route that is given nothing but a
fact's id finds the user, and never one of another tenant.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import uuid
from collections.abc import Mapping
from typing import NamedTuple

from sharding.errors import InvalidRequest
from sharding.ids import FactId, UserId

SEPARATOR = "\x1f"
NO_TENANT = ""

FIELDS = {"user_id": "user", "agent_id": "agent", "app_id": "app", "run_id": "run"}
"""The fields that name entities, the one that owns first, with their kind."""

KINDS = {kind: field for field, kind in FIELDS.items()}

TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""What a tenant may be called."""

_UUID8 = re.compile(r"([0-9a-f]{8})-([0-9a-f]{4})-8([0-9a-f]{3})-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


class Entity(NamedTuple):
    """A user, agent, app or run, by the name that clients give it."""

    kind: str
    name: str


def entities(scopes: Mapping[str, str]) -> list[Entity]:
    """The entities of `scopes` (field to name), the one that owns first."""
    return [Entity(kind, scopes[field]) for field, kind in FIELDS.items() if field in scopes]


def owner_id(tenant: str, entity: Entity) -> UserId:
    """The owner that memories told under this entity, and under none before it, belong to.

    Raises `InvalidRequest` for a name that could be read as another tenant's, or that UTF-8 cannot hold.
    """
    if SEPARATOR in entity.name or not _is_utf8(entity.name):
        raise InvalidRequest("A name must not hold U+001F, and must be valid Unicode.", field=KINDS[entity.kind])
    if tenant == NO_TENANT and entity.kind == "user":
        return UserId(entity.name)
    return UserId(SEPARATOR.join((tenant, *entity)))


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def tenant_of(owner: UserId) -> str:
    """The tenant whose memories these are."""
    tenant, separator, _ = owner.partition(SEPARATOR)
    return tenant if separator else NO_TENANT


def entity_of(owner: UserId) -> Entity:
    """The entity that owns, as its tenant names it."""
    if SEPARATOR not in owner:
        return Entity("user", owner)
    _, kind, name = owner.split(SEPARATOR)
    return Entity(kind, name)


def owner_tag(owner: UserId) -> str:
    """15 hexadecimal digits that stand in the ids of this owner's facts."""
    return hashlib.blake2b(owner.encode(errors="surrogatepass"), digest_size=8).hexdigest()[:15]


def new_id(owner: UserId) -> FactId:
    """A new id for something of this owner: 62 random bits beside the tag."""
    tag = owner_tag(owner)
    return FactId(str(uuid.UUID(f"{tag[:12]}8{tag[12:]}{0x8000 | secrets.randbits(14):04x}{secrets.token_hex(6)}")))


def tag_in(id: str) -> str | None:
    """The tag of the owner that `id` belongs to; None for what is not such an id."""
    found = _UUID8.fullmatch(id)
    return "".join(found.groups()) if found else None
