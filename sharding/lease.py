"""How long a shard may believe what it knew: until the heartbeat that Redis last acknowledged runs out.

After that, others may have taken its users; it must ask before it serves them. A lease that ran out and was
renewed is a new *term*: what was verified in an earlier one has to be verified again, because in the gap
between the two the shard looked dead. So is a lease that a Redis with another history acknowledged (a fail-over, a
restart, a restored backup): what it had acknowledged before may be lost.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable


class Lease:
    """`ttl_s` is the heartbeat's TTL; `grace_s` how long after it users are still served while Redis is away."""

    def __init__(self, ttl_s: float, grace_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.ttl_s = ttl_s
        self.grace_s = grace_s
        self.clock = clock
        self.term = 0  # counts leases without a gap; 0 before the first heartbeat
        self.ended = False  # whether it was given up: others may take the users at any time
        self._expires_at = -math.inf
        self._histories: frozenset[str] | None = None

    def acknowledged(self, sent_at: float, histories: frozenset[str] | None = None) -> None:
        """Redis acknowledged a heartbeat that was sent at `sent_at` (by `clock`): its TTL began no earlier.

        `histories`: what `Directory.histories` said after it; None where it could not be asked.
        """
        if not self.valid() or (histories is not None and histories != self._histories):
            self.term += 1
        self._histories = histories or self._histories
        self._expires_at = max(self._expires_at, sent_at + self.ttl_s)

    def valid(self) -> bool:
        return not self.ended and self.clock() < self._expires_at

    def in_grace(self) -> bool:
        """Whether the lease is valid or ran out less than `grace_s` ago."""
        return not self.ended and self.clock() < self._expires_at + self.grace_s
