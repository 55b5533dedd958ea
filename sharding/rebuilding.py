"""When what corrections left stale is encoded again: soon, for better answers; late, so that one rebuild serves several
corrections."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RebuildPolicy:
    """Nothing is stale for longer than `after_s`, and no more than `stale_share` of a user's tokens. With both at
    infinity and 1 a rebuild happens on demand only."""

    after_s: float = math.inf
    stale_share: float = 1.0

    def due(self, stale_tokens: int, tokens: int, stale_for_s: float) -> bool:
        """Whether a user with `tokens` tokens of facts, `stale_tokens` of them stale, some for `stale_for_s`, is to be
        rebuilt now."""
        if not stale_tokens:
            return False
        return stale_tokens > self.stale_share * tokens or stale_for_s >= self.after_s
