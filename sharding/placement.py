"""Which shard a new user goes to. Pure: reports in, one id out; the claim itself is `directory.py`'s."""

from __future__ import annotations

from collections.abc import Iterable
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
        """The shard for a new user: most free bytes (but for `slack`), then fewest users, then the smallest id.

        Raises `Unavailable` where no shard is ready.
        """
        ready = [report for report in reports if report.ready]
        if not ready:
            raise Unavailable("No shard is ready to take a user; retry when one has started.", retry_after_s=2.0)
        least_loaded = min(report.requests_in_flight for report in ready)
        open_to_new = [r for r in ready if r.requests_in_flight - least_loaded <= self.max_gap_requests]
        most_free = max(report.free_bytes for report in open_to_new)
        free = [report for report in open_to_new if report.free_bytes >= (1 - self.slack) * most_free]
        return min(free, key=lambda report: (report.users, report.shard)).shard
