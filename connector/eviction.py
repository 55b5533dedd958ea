"""Who gives chunks when others need the room: a policy of a ledger's, of users, not of chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol


class Usage(NamedTuple):
    """What a policy knows of a user: bytes held, and when they were used last, by the ledger's clock."""

    owner: str
    bytes: int
    used_at: float


class Evicted(NamedTuple):
    """A chunk that has to leave: whose it is, and its length in tokens."""

    owner: str
    tokens: int


class EvictionPolicy(Protocol):
    """Who gives chunks when others need the room."""

    def order(self, users: Sequence[Usage]) -> Iterable[Usage]:
        """The users, told least recently used first, in the order in which they are to give; some may be left out."""


class LeastRecentlyUsed:
    """Who was away longest gives everything first."""

    def order(self, users: Sequence[Usage]) -> Iterable[Usage]:
        return users
