"""Identifiers, as types of their own so that a user is never passed where a shard is meant."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NewType

UserId = NewType("UserId", str)
"""Who a memory belongs to, as the client spells it (any non-blank text of at most 256 characters)."""

FactId = NewType("FactId", str)
"""A fact of one user (a UUID in text form)."""

ShardId = NewType("ShardId", str)
"""A running shard replica: the Serve replica's unique id. A restarted one has a new id, so it is its own boot id."""

NOBODY = ShardId("nobody")
"""Stands for the owner of users for whom facts are stored while no shard lives. Under its epoch nothing is held in any
process, so whoever reads a placement of its may append; the next shard claims the user from it as from a dead one."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Who owns a user's memory: exactly one shard, under an epoch that only grows.

    `redis_away`: whoever sends it found Redis away, too. No part of what it says.
    """

    user: UserId
    shard: ShardId
    epoch: int
    redis_away: bool = field(default=False, compare=False)
