"""Which cold users leave a shard whose memory is full, before their chunks go to its disk. Pure.

Another shard's host memory is nearer than a disk, as long as there is room that nobody needs: a chat of a user who
comes back finds the chunks in memory. Refused: to move anybody who was active lately, or who moved a while ago; a
target that would be more than `room` full; to move more than a few at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sharding.ids import ShardId, UserId
from sharding.rebalance import Move, Moved, restraint


@dataclass(frozen=True, slots=True)
class ShardMemory:
    """What a shard's chunks take of its device and host together; `budget_bytes` is at least 1."""

    shard: ShardId
    bytes: int
    budget_bytes: int
    ready: bool = True


@dataclass(frozen=True, slots=True)
class IdleUser:
    """What a user's chunks take of both, and how long ago they were used."""

    user: UserId
    bytes: int
    idle_s: float


@dataclass(frozen=True, slots=True)
class CoolingPolicy:
    """`begin`, `settle`: how full a shard is when users begin to leave, and until when. `room`: how full a target may
    become. `cold_s`: how long ago who leaves was active."""

    begin: float = 0.95
    settle: float = 0.85
    room: float = 0.7
    cold_s: float = 300.0
    max_moves_at_once: int = 8
    max_moves_per_hour: int = 120
    rest_s: float = 600.0

    def is_full(self, shard: ShardMemory) -> bool:
        """Whether anything is to be done at all."""
        return shard.bytes > self.begin * shard.budget_bytes

    def plan(
        self,
        full: ShardMemory,
        others: Iterable[ShardMemory],
        users: Sequence[IdleUser],
        past: Iterable[Moved],
        now_s: float,
    ) -> list[Move]:
        """The users who leave `full` now, the coldest first, each for where most is free."""
        if not self.is_full(full):
            return []
        left, resting = restraint(self, past, now_s)
        held = {other.shard: other for other in others if other.ready and other.shard != full.shard}
        moves: list[Move] = []
        bytes_left = full.bytes
        for user in sorted(users, key=lambda user: (-user.idle_s, user.user)):
            if bytes_left <= self.settle * full.budget_bytes or len(moves) >= left:
                break
            if user.idle_s < self.cold_s or user.user in resting or not user.bytes:
                continue
            fits = [s for s in held.values() if s.bytes + user.bytes <= self.room * s.budget_bytes]
            if not fits:
                continue
            target = min(fits, key=lambda shard: (shard.bytes - shard.budget_bytes, shard.shard))
            held[target.shard] = replace(target, bytes=target.bytes + user.bytes)
            bytes_left -= user.bytes
            moves.append(Move(user.user, full.shard, target.shard, user.bytes, 0.0))
        return moves
