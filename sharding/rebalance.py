"""Which users move where, so that no shard carries much more than the others. Pure: loads in, moves out.

    overloaded(shards)        whose users have to be known: nothing else needs to be asked
    plan(shards, users, …)    the moves to begin now, most useful first

Two things are balanced at once, bytes of KV (as a part of each shard's budget) and load (requests a second): a shard is
overloaded where either exceeds `begin` times the mean. Each move lowers a sum of powers of both over all shards, so
that planning again and again comes to an end, and never swaps users back and forth. Refused: to move anybody while all
shards are within `begin`; a target that is not ready, would become full, or is hot; a user who moved a while ago; more
moves an hour than `max_moves_per_hour`. `deployments/rebalancer.py` carries them out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, overload

import numpy as np
from numpy.typing import NDArray

from sharding.ids import ShardId, UserId

Floats = NDArray[np.float64]

HOUR_S = 3600.0

POWER = 8
"""Of each shard's part of the mean, in the sum that moves lower: high enough that the worst shard decides, where with
squares a user who brings as much of one measure as they take of the other would never go."""

LEAST_GAIN = 1e-9  # rounding is not a gain


@dataclass(frozen=True, slots=True)
class UserLoad:
    """What one user takes of their shard."""

    user: UserId
    bytes: int  # of KV
    load: float  # requests a second, averaged over minutes


@dataclass(frozen=True, slots=True)
class ShardLoad:
    """What a shard carries."""

    shard: ShardId
    bytes: int  # of KV
    budget_bytes: int  # at least 1
    load: float  # requests a second, averaged over minutes
    requests_in_flight: int = 0  # now
    ready: bool = True

    @property
    def fullness(self) -> float:
        return self.bytes / self.budget_bytes


@dataclass(frozen=True, slots=True)
class Move:
    """One user from one shard to another. `bytes` and `load` are what goes with them."""

    user: UserId
    source: ShardId
    target: ShardId
    bytes: int
    load: float


@dataclass(frozen=True, slots=True)
class Moved:
    """A move that was begun before. `at_s`: by the clock that `plan` is given."""

    user: UserId
    at_s: float


class Limits(Protocol):
    """How much a policy may move."""

    @property
    def max_moves_per_hour(self) -> int: ...

    @property
    def max_moves_at_once(self) -> int: ...

    @property
    def rest_s(self) -> float: ...


def restraint(limits: Limits, past: Iterable[Moved], now_s: float) -> tuple[int, set[UserId]]:
    """How many moves may begin now, and who has moved too lately to move again."""
    recent = list(past)
    left = limits.max_moves_per_hour - sum(now_s - moved.at_s < HOUR_S for moved in recent)
    resting = {moved.user for moved in recent if now_s - moved.at_s < limits.rest_s}
    return min(left, limits.max_moves_at_once), resting


@dataclass(frozen=True, slots=True)
class RebalancingPolicy:
    """`begin`, `settle`: the largest over the mean at which moving begins, and below which it ends. `full`: the part of
    its budget that no move fills a target beyond. `max_gap_requests`: a target may have so many more requests in flight
    than the idlest shard. `worth`: the least part of a mean shard's bytes or load that a move must carry."""

    begin: float = 1.1
    settle: float = 1.05
    full: float = 0.9
    max_gap_requests: int = 8
    max_moves_per_hour: int = 120
    max_moves_at_once: int = 16
    rest_s: float = 600.0
    worth: float = 0.001

    def overloaded(self, shards: Iterable[ShardLoad]) -> list[ShardId]:
        """The shards that users should leave, the worst first; none while nothing exceeds `begin`."""
        ready = [shard for shard in shards if shard.ready]
        means = _Means.of(ready)
        if max((means.pressure(shard) for shard in ready), default=0.0) <= self.begin:
            return []
        over = [shard for shard in ready if means.pressure(shard) > self.settle]
        return [s.shard for s in sorted(over, key=lambda s: (-means.pressure(s), s.shard))]

    def plan(
        self,
        shards: Iterable[ShardLoad],
        users: Mapping[ShardId, Sequence[UserLoad]],
        past: Iterable[Moved],
        now_s: float,
    ) -> list[Move]:
        """At most `max_moves_at_once` moves, no user twice. `users`: at least of the shards that `overloaded` names."""
        held = {shard.shard: shard for shard in shards if shard.ready}
        left, resting = restraint(self, past, now_s)
        means = _Means.of(held.values())
        moves: list[Move] = []
        for source in self.overloaded(held.values()):
            candidates = [user for user in users.get(source, ()) if user.user not in resting]
            while len(moves) < left and means.pressure(held[source]) > self.settle:
                if (move := self._best(held, source, candidates, means)) is None:
                    break
                moves.append(move)
                candidates = [user for user in candidates if user.user != move.user]
                held[source] = _with(held[source], -move.bytes, -move.load)
                held[move.target] = _with(held[move.target], move.bytes, move.load)
        return moves

    def _best(
        self, held: Mapping[ShardId, ShardLoad], source: ShardId, users: Sequence[UserLoad], means: _Means
    ) -> Move | None:
        """The move off `source` that lowers the sum of powers most."""
        least = min(shard.requests_in_flight for shard in held.values())
        others = [shard for shard in held.values() if shard.shard != source and shard.fullness < self.full]
        cold = [shard for shard in others if shard.requests_in_flight - least <= self.max_gap_requests]
        if not cold or not users:
            return None
        # The one with least of each, and of both: of shards with room, what is best goes to one of them.
        targets = {
            min(cold, key=lambda shard: (shard.fullness, shard.shard)).shard,
            min(cold, key=lambda shard: (shard.load, shard.shard)).shard,
            min(cold, key=lambda shard: (means.sum(shard), shard.shard)).shard,
        }
        sizes = np.array([user.bytes for user in users], np.float64)
        loads = np.array([user.load for user in users], np.float64)
        found: list[tuple[float, UserId, ShardId, int]] = []
        for target in targets:
            to = held[target]
            gains = means.gains(held[source], to, sizes, loads)
            gains[to.bytes + sizes > self.full * to.budget_bytes] = 0.0
            gains[~means.are_worth(sizes, loads, to, self.worth)] = 0.0
            most = gains.max()
            if most > LEAST_GAIN:
                equals = (int(at) for at in np.flatnonzero(gains == most))
                found += [(-most, users[at].user, target, at) for at in equals]
        if not found:
            return None
        _, _, target, at = min(found)
        return Move(users[at].user, source, target, users[at].bytes, users[at].load)


@dataclass(frozen=True, slots=True)
class _Means:
    """Of all ready shards; what they are measured by."""

    fullness: float
    load: float

    @classmethod
    def of(cls, shards: Iterable[ShardLoad]) -> _Means:
        some = list(shards)
        count = max(1, len(some))
        # fsum, because the plan must not depend on the order of the reports.
        return cls(math.fsum(s.fullness for s in some) / count, math.fsum(s.load for s in some) / count)

    def pressure(self, shard: ShardLoad) -> float:
        """The worse of fullness and load, over its mean."""
        return max(_over(shard.fullness, self.fullness), _over(shard.load, self.load))

    def sum(self, shard: ShardLoad) -> float:
        return _over(shard.fullness, self.fullness) + _over(shard.load, self.load)

    def are_worth(self, sizes: Floats, loads: Floats, to: ShardLoad, worth: float) -> NDArray[np.bool_]:
        parts = np.maximum(_over(sizes / to.budget_bytes, self.fullness), _over(loads, self.load))
        return np.asarray(parts >= worth)

    def gains(self, source: ShardLoad, to: ShardLoad, sizes: Floats, loads: Floats) -> Floats:
        """By how much moving each of the users lowers the sum of powers."""
        before = (
            _power(_over(source.fullness, self.fullness))
            + _power(_over(source.load, self.load))
            + _power(_over(to.fullness, self.fullness))
            + _power(_over(to.load, self.load))
        )
        after = (
            _power(_over(np.maximum(source.bytes - sizes, 0) / source.budget_bytes, self.fullness))
            + _power(_over(np.maximum(source.load - loads, 0), self.load))
            + _power(_over((to.bytes + sizes) / to.budget_bytes, self.fullness))
            + _power(_over(to.load + loads, self.load))
        )
        return np.asarray(before - after)


@overload
def _over(value: float, mean: float) -> float: ...
@overload
def _over(value: Floats, mean: float) -> Floats: ...
def _over(value: float | Floats, mean: float) -> float | Floats:
    return value / mean if mean > 0 else value * 0.0


@overload
def _power(value: float) -> float: ...
@overload
def _power(value: Floats) -> Floats: ...
def _power(value: float | Floats) -> float | Floats:
    """To the `POWER`th, by products: they round alike wherever a number stands in its array; numpy's power does not."""
    square = value * value
    fourth = square * square
    return fourth * fourth


def _with(shard: ShardLoad, more_bytes: int, more_load: float) -> ShardLoad:
    return replace(shard, bytes=max(0, shard.bytes + more_bytes), load=max(0.0, shard.load + more_load))
