"""Which shard a new user goes to. Pure: reports in, one id out; the claim itself is `directory.py`'s."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from sharding.errors import Unavailable
from sharding.ids import ShardId


class ShardReport(BaseModel):
    """What a shard says of itself in each heartbeat. Fields that this version does not know are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    shard: ShardId
    model: str
    ready: bool  # whether it takes requests
    leaving: bool = False  # whether others may claim its users; it still answers what it was asked before
    free_bytes: int  # memory left for users' KV
    users: int = Field(ge=0)  # users whose memory is resident
    requests_in_flight: int = Field(ge=0)
    status: dict[str, Any] = Field(default_factory=dict)  # free-form, for `memshard status`


@dataclass(frozen=True, slots=True)
class PlacementPolicy:
    """Most free memory wins, unless that shard is too busy.

    `max_gap_requests`: a shard with more requests in flight than the least loaded ready one by more than this
    gets no new users. `slack`: shards whose free bytes are within this share of the most count as equally free;
    reports are a heartbeat old, and a burst of new users would else go to one shard until the next one.
    """

    max_gap_requests: int = 8
    slack: float = 0.05

    def choose(self, reports: Iterable[ShardReport]) -> ShardId:
        """The shard for one new user; see `choices`."""
        return self.choices(reports).take()

    def choices(self, reports: Iterable[ShardReport]) -> Choices:
        """Shards for the new users of as long as these reports are believed: most free bytes (but for `slack`), then
        fewest users, then the smallest id."""
        ready = [report for report in reports if report.ready]
        if not ready:
            return Choices(())
        least_loaded = min(report.requests_in_flight for report in ready)
        open_to_new = [r for r in ready if r.requests_in_flight - least_loaded <= self.max_gap_requests]
        most_free = max(report.free_bytes for report in open_to_new)
        return Choices(report for report in open_to_new if report.free_bytes >= (1 - self.slack) * most_free)


class Choices:
    """Shards that are equally good but for their users, who are counted on: a report is a heartbeat old, and all new
    users of its lifetime would else go to one shard."""

    def __init__(self, reports: Iterable[ShardReport]) -> None:
        self._heap = [(report.users, report.shard) for report in reports]
        heapq.heapify(self._heap)

    def take(self, gone: Collection[ShardId] = ()) -> ShardId:
        """The one with fewest users, who has one more from now on; none of `gone`. Raises `Unavailable` where no shard
        is ready."""
        while self._heap:
            users, shard = self._heap[0]
            if shard not in gone:
                heapq.heapreplace(self._heap, (users + 1, shard))
                return shard
            heapq.heappop(self._heap)
        raise Unavailable("No shard is ready to take a user; retry when one has started.", retry_after_s=2.0)
