"""A shard that carries too much moves users of its own away, one shard at a time.

    every `every_s` ─► what the shards last said of themselves ─► overloaded, or full of cold users?
         ─► take the turn (`sharding/move_turns.py`) ─► plan ─► move ─► keep the turn until heartbeats tell of it

There is no controller to lose: a shard knows its own users best, whose turn it is and who moved lately is in Redis,
and whoever ends in the middle leaves a turn that runs out and a move that `mover.py` makes safe. What is planned may
rest on views that are a heartbeat old: a user who is not here any more is passed over, and a target that is full by
then refuses chunks, not users.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterable
from typing import Any

from deployments.memory_calls import MoveCall
from deployments.mover import Mover
from deployments.usage import Rates
from sharding.cooling import CoolingPolicy, IdleUser, ShardMemory
from sharding.errors import MemshardError
from sharding.ids import ShardId, UserId
from sharding.move import End
from sharding.move_turns import MoveTurns
from sharding.placement import ShardReport
from sharding.rebalance import Move, RebalancingPolicy, ShardLoad, UserLoad

TURN_S = 120.0
"""How long a turn lasts at most that nobody gives back."""

DEVICE, HOST = "device", "host"  # as a status names its tiers

log = logging.getLogger(__name__)


class Rebalancer:
    """`run` it in a task. `settle_s`: how long until every shard's heartbeat tells of what has just been done;
    `active_s`: how long a user counts as active."""

    def __init__(
        self,
        me: ShardId,
        mover: Mover,
        rates: Rates,
        turns: MoveTurns,
        *,
        settle_s: float,
        active_s: float,
        balancing: RebalancingPolicy | None = None,
        cooling: CoolingPolicy | None = None,
    ) -> None:
        self._me = me
        self._mover = mover
        self._rates = rates
        self._turns = turns
        self._settle_s = settle_s
        self._active_s = active_s
        self._balancing = balancing or RebalancingPolicy()
        self._cooling = cooling or CoolingPolicy()
        self._settled_at = 0.0  # before that, what the others said may be older than what was done
        self.counters = {"rebalanced_users": 0, "cold_users_moved": 0, "planned_moves_failed": 0}

    async def run(self, every_s: float) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.once()
            except MemshardError as error:
                log.warning("Users are moved for balance later: %s", error)

    async def once(self) -> int:
        """Moves whom the policies name; how many moved. Raises `Unavailable`."""
        if self._turns.clock() < self._settled_at:
            return 0
        reports = list((await self._mover.table.directory.shards()).values())
        loads = [load for report in reports if (load := load_of(report)) is not None]
        memories = {memory.shard: memory for report in reports if (memory := memory_of(report)) is not None}
        mine = memories.get(self._me)
        over = self._me in self._balancing.overloaded(loads)
        if not over and (mine is None or not self._cooling.is_full(mine)):
            return 0
        if not await self._turns.take(self._me, TURN_S):
            return 0
        past, now = await self._turns.lately(), self._turns.clock()
        moved = 0
        if over:
            moved += await self._carry_out(
                self._balancing.plan(loads, {self._me: self._loads()}, past, now), "rebalanced_users"
            )
        elif mine is not None:
            plan = self._cooling.plan(mine, memories.values(), self._idle(), past, now)
            moved += await self._carry_out(plan, "cold_users_moved")
        await self._turns.take(self._me, self._settle_s)
        self._settled_at = self._turns.clock() + self._settle_s
        return moved

    async def _carry_out(self, moves: Iterable[Move], counter: str) -> int:
        moved = 0
        for move in moves:
            if move.source != self._me:
                continue  # it will plan that itself
            placement = await self._mover.table.directory.lookup(move.user)
            if placement is None or placement.shard != self._me:
                continue
            if not await self._turns.take(self._me, TURN_S):
                break
            await self._turns.begun(move.user)
            try:
                report = await self._mover.move(MoveCall(uuid.uuid4().hex, placement, move.target))
            except MemshardError as error:
                log.warning("A user was not moved for balance: %s", error)
                self.counters["planned_moves_failed"] += 1
                continue
            done = report.end is End.MOVED
            self.counters[counter if done else "planned_moves_failed"] += 1
            moved += done
        return moved

    def _loads(self) -> list[UserLoad]:
        device = self._mover.tiers.device
        idle = device.idle()
        active = {owner: size for owner, (size, idle_s) in idle.items() if idle_s < self._active_s}
        users = {*active, *self._rates.users()}
        return [UserLoad(UserId(user), active.get(user, 0), self._rates.of(UserId(user))) for user in users]

    def _idle(self) -> list[IdleUser]:
        device, host = self._mover.tiers.device.idle(), self._mover.tiers.host.idle()
        never = (0, float("inf"))
        users = []
        for owner in device.keys() | host.keys():
            (one, one_s), (other, other_s) = device.get(owner, never), host.get(owner, never)
            users.append(IdleUser(UserId(owner), one + other, min(one_s, other_s)))
        return users


def load_of(report: ShardReport) -> ShardLoad | None:
    """What a heartbeat says of a shard's load, if it does."""
    tiers = _tiers(report.status)
    active, load = report.status.get("active_bytes"), report.status.get("load_per_s")
    if DEVICE not in tiers or active is None or load is None:
        return None
    budget = max(1, tiers[DEVICE][1])
    return ShardLoad(report.shard, int(active), budget, float(load), report.requests_in_flight, report.ready)


def memory_of(report: ShardReport) -> ShardMemory | None:
    """What a heartbeat says of a shard's memory, if it does."""
    tiers = _tiers(report.status)
    if DEVICE not in tiers:
        return None
    held = [tiers.get(name, (0, 0)) for name in (DEVICE, HOST)]
    return ShardMemory(report.shard, sum(h[0] for h in held), max(1, sum(h[1] for h in held)), report.ready)


def _tiers(status: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {str(name): (int(held), int(budget)) for name, held, budget in status.get("tiers", ())}
