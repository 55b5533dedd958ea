"""What a shard holds of its users in its own process, and how it makes sure that they are still its users.

    a call with a placement ─ UserTable.use ─┬ held, verified in this lease ────────────────► UserMemory, pinned
                                             ├ held, but the lease ran out ─ ask the directory ──┤
                                             └ not held, or a newer epoch ── ask, then load ─────┘

A `UserMemory` is a cache over `FactStore`: losing one costs a load. While Redis is away, users are served without
asking for a while, but only to callers who say that it is away for them, too (`Placement.redis_away`): a shard that is
alone in not reaching Redis has lost its users to others, and cannot know. Refused with `WrongShard`: another shard's
users, epochs older than the one held, epochs the directory does not confirm.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from sharding.directory import Directory, not_owner
from sharding.errors import Busy, Unavailable
from sharding.facts import FactStore
from sharding.ids import Placement, ShardId, UserId
from sharding.lease import Lease
from sharding.memory import UserMemory

__all__ = ["UserMemory", "UserTable"]

ASK_AGAIN_S = 1.0  # after Redis failed to answer, how long the grace period serves without asking again


@dataclass(slots=True)
class _Resident:
    memory: UserMemory
    term: int  # the lease term in which the directory last confirmed the placement


class UserTable:
    """The users whose memory is in this process: at most `capacity`, least recently used evicted, never one in use.

    Single-threaded: everything runs on one event loop, and only awaits are points where others run.
    """

    def __init__(
        self,
        me: ShardId,
        directory: Directory,
        store: FactStore,
        lease: Lease,
        *,
        dim: int,
        capacity: int,
        embedding_model: bytes = b"",
    ) -> None:
        self.lease = lease
        self.me = me
        self.directory = directory
        self._store = store
        self._dim = dim
        self._capacity = capacity
        self._embedding_model = embedding_model
        self._residents: OrderedDict[UserId, _Resident] = OrderedDict()
        self._admissions: dict[Placement, asyncio.Task[UserMemory]] = {}
        self._pins: Counter[UserId] = Counter()
        self._ask_again_at = -math.inf

    def __len__(self) -> int:
        return len(self._residents)

    def __contains__(self, user: object) -> bool:
        """Whether the user's memory is resident, under whatever placement."""
        return user in self._residents

    def memories(self) -> list[UserMemory]:
        """Every resident memory, least recently used first; for status and background work."""
        return [resident.memory for resident in self._residents.values()]

    @asynccontextmanager
    async def use(self, placement: Placement) -> AsyncIterator[UserMemory]:
        """The user's memory, kept from eviction while in use. Raises as `get` does."""
        user = placement.user
        self._pins[user] += 1  # before the load, so that it is not evicted between being loaded and handed out
        try:
            yield await self.get(placement)
        finally:
            self._pins[user] -= 1
            if not self._pins[user]:
                del self._pins[user]

    async def get(self, placement: Placement) -> UserMemory:
        """The user's memory, loaded on first touch; the caller may rely on it until its next await (else: `use`).

        Raises `WrongShard` if this shard does not own the user under this epoch, `Busy` if every place is taken
        by a user in use, `Unavailable` if Redis is needed and away (with `unconfirmed` where the user is held).
        """
        if placement.shard != self.me:
            raise not_owner(placement)
        resident = self._residents.get(placement.user)
        if resident and placement.epoch < resident.memory.placement.epoch:
            raise not_owner(placement)
        held = resident if resident and resident.memory.placement == placement else None
        if held and held.term == self.lease.term and self._may_serve_unasked(placement):
            self._residents.move_to_end(placement.user)
            return held.memory
        try:
            return await self._admitted(placement)
        except Unavailable as error:
            self._ask_again_at = self.lease.clock() + ASK_AGAIN_S
            if held and held.term == self.lease.term and self.lease.in_grace():
                if placement.redis_away:
                    return held.memory
                raise Unavailable(error.message, **error.details, unconfirmed=True) from error
            raise

    def drop(self, placement: Placement) -> None:
        """Forget a user under a placement this shard lost (moved away, fenced): also one in use, and one being loaded.

        What is held under another epoch stays: a second copy loaded beside it would miss what is being written to it.
        """
        resident = self._residents.get(placement.user)
        if resident and resident.memory.placement == placement:
            del self._residents[placement.user]
        self._admissions.pop(placement, None)

    def owns(self, placement: Placement | None) -> bool:
        """Whether a placement names this shard."""
        return placement is not None and placement.shard == self.me

    def drop_user(self, user: UserId) -> None:
        """As `drop`, whatever the placement that the user is held under."""
        self._residents.pop(user, None)
        for placement in [one for one in self._admissions if one.user == user]:
            del self._admissions[placement]

    def check_integrity(self) -> None:
        """Raise AssertionError unless residents, pins and admissions add up; for tests, after each."""
        assert len(self._occupants()) <= self._capacity, "more users than places"
        assert all(count > 0 for count in self._pins.values()), "a pin was released twice"
        assert not any(task.done() for task in self._admissions.values()), "an admission was left behind"
        for user, resident in self._residents.items():
            placement = resident.memory.placement
            assert (placement.user, placement.shard) == (user, self.me), "a user of someone else is resident"
            assert resident.term <= self.lease.term, "a user was verified in a lease that is yet to come"
            resident.memory.check_integrity()

    def _may_serve_unasked(self, placement: Placement) -> bool:
        away = placement.redis_away and self.lease.clock() < self._ask_again_at
        return self.lease.valid() or (away and self.lease.in_grace())

    async def _admitted(self, placement: Placement) -> UserMemory:
        """Verify and load once for all who ask at the same time; one who gives up does not stop it for the others."""
        task = self._admissions.get(placement)
        if task is None:
            self._make_room(placement.user)
            task = asyncio.create_task(self._admit(placement))
            self._admissions[placement] = task
            task.add_done_callback(_retrieve)
        return await asyncio.shield(task)

    async def _admit(self, placement: Placement) -> UserMemory:
        admission = asyncio.current_task()
        try:
            term = self.lease.term  # before asking: what is confirmed later may belong to a later term
            await self._confirm(placement)
            resident = self._residents.get(placement.user)
            if resident and resident.memory.placement == placement:
                memory = resident.memory
            else:
                facts = await self._store.load(placement.user)
                memory = UserMemory(placement, self._dim, facts, embedding_model=self._embedding_model)
            if self._admissions.get(placement) is not admission or self._outdated(placement):
                raise not_owner(placement)  # dropped, or overtaken by a newer epoch, while it was loading
            self._residents[placement.user] = _Resident(memory, term)
            self._residents.move_to_end(placement.user)
            return memory
        finally:
            if self._admissions.get(placement) is admission:
                del self._admissions[placement]

    async def _confirm(self, placement: Placement) -> None:
        standing = await self.directory.lookup(placement.user)
        if standing == placement:
            return
        resident = self._residents.get(placement.user)
        if resident and resident.memory.placement != standing:
            del self._residents[placement.user]
        raise not_owner(placement)

    def _outdated(self, placement: Placement) -> bool:
        resident = self._residents.get(placement.user)
        return resident is not None and resident.memory.placement.epoch > placement.epoch

    def _occupants(self) -> set[UserId]:
        return {*self._residents, *(placement.user for placement in self._admissions)}

    def _make_room(self, user: UserId) -> None:
        """Evict until `user` has a place; raises `Busy` if everyone is in use."""
        occupants = self._occupants()
        while user not in occupants and len(occupants) >= self._capacity:
            evicted = next((u for u in self._residents if not self._pins[u]), None)
            if evicted is None:
                raise Busy("Every place for a user on this shard is in use; retry shortly.", retry_after_s=1.0)
            del self._residents[evicted]
            occupants = self._occupants()


def _retrieve(task: asyncio.Task[UserMemory]) -> None:
    if not task.cancelled():
        task.exception()  # everyone who asked may have given up: then nobody else would
