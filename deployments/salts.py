"""Under which name a user's prompts are cached in vLLM's prefix cache: another one after each deletion.

Blocks that hold what was deleted stay in the paged cache until others need the room. Their salts follow from the name
that they were cached under (`connector/chunk.py::memory_salt`), which nobody uses again: no later prompt meets them,
not even one that tells the same once more.
"""

from __future__ import annotations

from collections import OrderedDict

from sharding.scopes import SEPARATOR

MOST_NAMES = 100_000
"""Users whose latest deletion is remembered; the others go by the latest of those that were forgotten."""


class Salts:
    """Of one engine's users."""

    def __init__(self) -> None:
        self._deletions = 0
        self._floor = 0
        self._latest: OrderedDict[str, int] = OrderedDict()

    def name(self, owner: str) -> str:
        """What takes the place of `owner` in a salt."""
        latest = self._latest.get(owner, self._floor)
        return f"{owner}{SEPARATOR}{latest}" if latest else owner

    def renew(self, owner: str) -> None:
        """Something of the owner was deleted."""
        self._deletions += 1
        self._latest[owner] = self._deletions
        self._latest.move_to_end(owner)
        if len(self._latest) > MOST_NAMES:
            self._floor = self._latest.popitem(last=False)[1]
