"""Who is calling, as the routes see it: set before a route runs, read here."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import Request

from sharding.api_keys import Role
from sharding.ids import UserId
from sharding.scopes import NO_TENANT, Entity, owner_id


@dataclass(frozen=True, slots=True)
class Caller:
    """Everything that a caller names is looked up among what belongs to `tenant`."""

    tenant: str = NO_TENANT
    role: Role = "admin"
    key_id: str | None = None  # of the key that was shown

    def owner(self, entity: Entity) -> UserId:
        """Whose memory is meant where this caller names `entity`."""
        return owner_id(self.tenant, entity)


ANYONE = Caller()
"""Where keys are not asked for, everybody is this one."""


def caller_of(request: Request) -> Caller:
    """Who sent this request."""
    caller = getattr(request.state, "caller", ANYONE)
    assert isinstance(caller, Caller)
    return caller
