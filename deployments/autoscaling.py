"""How many shards there should be. Pure: what the shards report in, a number and what to remember out.

    wanted now   = what the scarcest of three needs: bytes of users active lately, chunks waited for, chats in flight;
                   one where anybody asked lately, none else
    more shards  = the least that was wanted throughout the last `up_s`: a peak of a moment starts nothing
    fewer shards = the most that was wanted in the last `down_s`: a pause of a moment stops nothing

So the number does not follow a load that rises and falls faster than `down_s`, and is back at its minimum one `down_s`
after the load has gone. A rise is kept for one `down_s`: what was wanted before a shard was woken says nothing about
it. Bytes count only for users who were active: a chunk store is a cache and stays full.

Serve's controller calls it several times a second, bounds it, starts the first shard itself where there is none and a
call waits for one (`shard_client.py::ShardClient.wake`), and chooses which replica ends: its users are handed over
while it answers what it was asked (`replica.py::ShardReplica`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

ACTIVE_BYTES = "active_bytes"
ENCODE_BACKLOG = "encode_backlog"
REQUESTS = "requests_in_flight"
ASKED_LATELY = "asked_lately"
"""What a shard reports: see `ShardReplica.record_autoscaling_stats`."""

Reports = Mapping[str, Mapping[Any, float]]


class Sample(Protocol):
    """As much as is used of Serve's `TimeStampedValue`."""

    @property
    def value(self) -> float: ...


Remembered = list[tuple[float, int]]


class Context(Protocol):
    """As much as is used of `ray.serve.config.AutoscalingContext`."""

    @property
    def raw_metrics(self) -> Mapping[str, Mapping[Any, Sequence[Sample]]] | None: ...

    @property
    def target_num_replicas(self) -> int: ...

    @property
    def policy_state(self) -> dict[str, Any]: ...

    @property
    def current_time(self) -> float | None: ...


class ShardScaling:
    """`…_a_shard`: how much of it one shard is meant to carry; above it another is wanted."""

    def __init__(
        self, *, bytes_a_shard: int, backlog_a_shard: int, requests_a_shard: int, up_s: float, down_s: float
    ) -> None:
        self._a_shard = {ACTIVE_BYTES: bytes_a_shard, ENCODE_BACKLOG: backlog_a_shard, REQUESTS: requests_a_shard}
        self._up_s = up_s
        self._down_s = down_s

    def __call__(self, ctx: Context) -> tuple[int, dict[str, Any]]:
        """The number of shards, and the state for the next call."""
        now = ctx.current_time if ctx.current_time is not None else time.time()
        state, target = ctx.policy_state, ctx.target_num_replicas
        risen_at = now if target > state.get("target", target) else state.get("risen_at", -math.inf)
        remembered: Remembered = [(at, wanted) for at, wanted in state.get("wanted", ())]
        remembered.append((now, self.wanted(newest(ctx.raw_metrics or {}))))
        remembered = _thinned(remembered, now - max(self._up_s, self._down_s))
        least = _extreme(min, remembered, now - self._up_s)
        most = _extreme(max, remembered, now - self._down_s)
        state = {"wanted": remembered, "target": target, "risen_at": risen_at}
        if least is not None and least > target:
            return least, state
        if most is not None and most < target and now - risen_at >= self._down_s:
            return most, state
        return target, state

    def wanted(self, reports: Reports) -> int:
        """Shards that the load of this moment needs; 0 where there is none."""
        loads = ((sum(reports.get(name, {}).values()), room) for name, room in self._a_shard.items())
        asked = any(reports.get(ASKED_LATELY, {}).values())
        return max(int(asked), *(math.ceil(load / room) for load, room in loads))


def newest(samples: Mapping[str, Mapping[Any, Sequence[Sample]]]) -> Reports:
    """What each shard said last: Serve's own mean over a while would make one of the load before and the load now."""
    return {
        name: {shard: said[-1].value for shard, said in by_shard.items() if said} for name, by_shard in samples.items()
    }


def _extreme(pick: Any, remembered: Remembered, since: float) -> int | None:
    """Of what was wanted from `since` on; None before that much time was seen."""
    earlier = [wanted for at, wanted in remembered if at <= since]
    if not earlier:
        return None
    later = [wanted for at, wanted in remembered if at > since]
    return int(pick([earlier[-1], *later]))  # what was wanted last before `since` held until the next was seen


def _thinned(remembered: Remembered, since: float) -> Remembered:
    """Without what repeats its neighbour, and without what is older than `since`, but for the last of it."""
    first = max((i for i, (at, _) in enumerate(remembered) if at <= since), default=0)
    kept = remembered[first:]
    return [entry for i, entry in enumerate(kept) if i == 0 or entry[1] != kept[i - 1][1]]
