"""Executes a move of one of this shard's users to another shard: `sharding.move` says what, this does it.

Runs where the user is, so that a move whose caller has gone away ends all the same, and one whose process is killed has
changed nothing but, perhaps, the placement. Chunks travel from worker to worker (`copies.py`); what did not get there
so, by way of a tier of files that both shards see; and where there is none, the target encodes the facts again, and
serves them as text meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from connector.tiers import Tiers
from deployments.copies import Copy, Courier
from deployments.memory_calls import DrainReport, MoveCall, MoveReport
from deployments.resident import Residents
from deployments.resident_use import ResidentUse
from sharding.errors import InvalidRequest, MemshardError, ShardGone, WrongShard
from sharding.ids import Placement, ShardId, UserId
from sharding.move import Do, End, Moving, Outcome, after
from sharding.placement import PlacementPolicy
from sharding.user_memory import UserTable

PAUSE_DEADLINE_S = 10.0
"""How long a move waits for the writes that go on."""

TAIL_S = 10.0
"""How long the copy may take that writes wait for; what is not there by then goes another way."""

RETRY_S = 0.2

log = logging.getLogger(__name__)


class Mover:
    """Moves users of one shard away."""

    def __init__(
        self, tiers: Tiers, residents: Residents, users: ResidentUse, table: UserTable, courier: Courier
    ) -> None:
        self.tiers = tiers
        self.courier = courier
        self.residents = residents
        self.users = users
        self.table = table
        self.moved_users = 0

    async def move(self, call: MoveCall) -> MoveReport:
        """Returns when the user is the target's, or stays; goes on where its caller has gone away. Raises `WrongShard`,
        `Unavailable` where the user is not this shard's to begin with, and `InvalidRequest` for a target that is no
        other living shard."""
        if call.target == call.placement.shard or call.target not in await self.table.directory.shards():
            raise InvalidRequest(f"There is no other shard {call.target} to move to.", field="shard")
        report = await self.users.to_its_end(_Move(self, call.placement, call.target).run())
        self.moved_users += report.end is End.MOVED
        return report

    async def drain(self, me: ShardId, policy: PlacementPolicy, deadline_s: float) -> DrainReport:
        """Moves everybody away who has something here, each to where a new user would go, until the deadline. Raises
        `Unavailable`."""
        ends_at = time.monotonic() + deadline_s
        moved = 0
        left = await self._users_here()
        while left and time.monotonic() < ends_at:
            user = left.pop()
            others = [report for shard, report in (await self.table.directory.shards()).items() if shard != me]
            placement = await self.table.directory.lookup(user)
            if placement is None or placement.shard != me:
                continue
            report = await self.move(MoveCall(uuid.uuid4().hex, placement, policy.choose(others)))
            moved += report.end is End.MOVED
        return DrainReport(moved, len(left))

    async def _users_here(self) -> list[UserId]:
        """Whoever has facts in this process or chunks in a tier that is this shard's alone; the last used last."""
        names = {owner: None for ledger in (self.tiers.device, self.tiers.host) for owner in ledger.owner_names()}
        files = [await tier.owners() for tier in self.tiers.files if tier.exclusive]
        here = {owner: None for owners in files for owner in owners.values()} | names
        return [UserId(owner) for owner in here | {memory.placement.user: None for memory in self.table.memories()}]


class _Move:
    """One move while it goes on."""

    def __init__(self, mover: Mover, placement: Placement, target: ShardId) -> None:
        self._at = mover
        self._placement = placement
        self._target = target
        self._moved_to: Placement | None = None
        self._copy_there: Copy | None = None
        self._workers_copy = False
        self._copied = 0
        self._waiting = AsyncExitStack()  # ends what makes others wait
        self._paused_at = self._closed_at = 0.0
        self._copied_s = self._paused_s = self._closed_s = 0.0
        self._done: dict[Do, Callable[[], Awaitable[None]]] = {
            Do.COPY: self._copy,
            Do.PAUSE: self._pause,
            Do.COPY_TAIL: self._copy_tail,
            Do.CLOSE: self._close,
            Do.SWITCH: self._switch,
            Do.GO: self._forget_and_open,
            Do.STAY: self._open,
            Do.DISTRUST: self._forget_and_open,
            Do.UNDO: self._undo,
            Do.DROP: self._drop,
        }

    async def run(self) -> MoveReport:
        with self._at.users.moving(self._placement.user):
            return await self._run()

    async def _run(self) -> MoveReport:
        async with self._at.users.use(self._placement) as memory, self._waiting:
            self._memory = memory
            async with memory.write_lock:
                pass  # a deletion that began before this ends first
            self._copy_there = self._at.courier.copy(self._placement, self._target)
            moving = Moving()
            try:
                while moving.do is not None:
                    if moving.tries > 1:
                        await asyncio.sleep(RETRY_S)
                    moving = after(moving, await self._outcome(moving.do))
            except BaseException:
                self._at.table.drop(self._placement)  # perhaps it was the switch that was interrupted
                raise
            finally:
                self._leave_copy()
        assert moving.end is not None
        stands = self._moved_to or self._placement
        sent = (0, 0) if self._copy_there is None else (self._copy_there.sent_chunks, self._copy_there.sent_bytes)
        return MoveReport(moving.end, stands, self._copied, *sent, self._copied_s, self._paused_s, self._closed_s)

    async def _outcome(self, do: Do) -> Outcome:
        try:
            await self._done[do]()
        except WrongShard:
            return Outcome.REFUSED if do is Do.SWITCH else Outcome.FAILED
        except (MemshardError, TimeoutError) as error:
            log.warning("A move could not %s: %s", do, error)
            return Outcome.FAILED
        return Outcome.DONE

    async def _copy(self) -> None:
        began = time.perf_counter()
        self._workers_copy = await self._copied_by_workers(tries=2)
        if not self._workers_copy:
            self._copied += await self._at.tiers.share(self._placement.user)
        self._copied_s = time.perf_counter() - began

    async def _copy_tail(self) -> None:
        """Only what came meanwhile: what could not be sent before is not tried again while writes wait."""
        try:
            async with asyncio.timeout(TAIL_S):
                if self._workers_copy and await self._copied_by_workers(tries=1):
                    return
        except TimeoutError:
            log.warning("The rest of a user's chunks goes another way: it took too long")
        self._copied += await self._at.tiers.share(self._placement.user)

    async def _copied_by_workers(self, tries: int) -> bool:
        """Whether the target has all chunks. Raises `ShardGone` where there is no target any more."""
        for _ in range(tries if self._copy_there is not None else 0):
            assert self._copy_there is not None
            try:
                return await self._copy_there.run()
            except ShardGone:
                raise
            except MemshardError as error:  # a line that was kept may have been lost meanwhile; the next try opens one
                log.warning("Chunks did not go from worker to worker: %s", error)
        return False

    async def _pause(self) -> None:
        async with asyncio.timeout(PAUSE_DEADLINE_S):
            await self._waiting.enter_async_context(self._memory.write_lock)
        self._paused_at = time.perf_counter()

    async def _close(self) -> None:
        self._waiting.enter_context(self._at.users.closed(self._placement.user))
        self._closed_at = time.perf_counter()

    async def _switch(self) -> None:
        self._moved_to = await self._at.table.directory.switch(self._placement, self._target)

    async def _forget_and_open(self) -> None:
        self._leave_copy()
        self._at.users.rates.forget(self._placement.user)
        self._at.table.drop(self._placement)
        await self._open()

    async def _open(self) -> None:
        now = time.perf_counter()
        self._paused_s = now - self._paused_at if self._paused_at else 0.0
        self._closed_s = now - self._closed_at if self._closed_at else 0.0
        await self._waiting.aclose()

    async def _undo(self) -> None:
        """Files that both see are this shard's again, as they were."""
        if self._copy_there is not None:
            await self._copy_there.undo()

    def _leave_copy(self) -> None:
        """What the target has is its own matter from now on."""
        if self._copy_there is not None:
            self._copy_there.close()

    async def _drop(self) -> None:
        await self._at.residents.left(self._placement.user)
