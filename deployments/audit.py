"""The audit log: one line of JSON for each write and each deletion that was done, on the logger `memshard.audit`.

Whose key did it, what, to whose memory, to which ids. Never a fact's text, nor a filter's, which may hold some.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from deployments.callers import Caller
from sharding.ids import UserId
from sharding.scopes import entity_of

log = logging.getLogger("memshard.audit")
log.setLevel(logging.INFO)


def audit(caller: Caller, action: str, owner: UserId, ids: Sequence[str]) -> None:
    """Notes what `caller` has done to `owner`'s memory; no ids: to all of it, or to what a filter said."""
    kind, name = entity_of(owner)
    line = {"action": action, "tenant": caller.tenant, "key": caller.key_id, kind: name, "ids": list(ids)}
    log.info(json.dumps(line, ensure_ascii=False))


def audit_tenant(caller: Caller, action: str, tenant: str) -> None:
    """Notes what `caller` has done to all of a tenant."""
    log.info(json.dumps({"action": action, "tenant": tenant, "key": caller.key_id}))
