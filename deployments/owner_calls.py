"""Calls to the shard that owns a user, with the one retry that makes stale placements invisible to clients.

`WrongShard` and `ShardGone` mean "not there", and so does a shard whose heartbeat ran out while it was waited for, or
that does not reach Redis where this gateway does. Before a chat's first event, and for every other call (all of them
may be repeated: adding a fact twice is one fact, and answered as the first time), the directory is asked again and the
call is sent once more.
After the first token nothing is retried, unless the client gets the answer as a whole. Where that fails, too, it is
tried again for a while, until the shard answers or its heartbeat has run out and another shard can claim the user; then
it is `Unavailable`.

Only `add` makes a user: every other call for one whom nobody has stored anything for is `NotFound`, and a chat is
answered by any shard, without memory.

Where no shard runs, because nobody asked for a while, one is woken and waited for, up to `wake_s`. An add need not wait
(`unattended.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TypeVar

from deployments.messages import ChatCall, ChatEvent, ChatStarted
from deployments.owners import Owners
from deployments.shard_client import Shards
from deployments.telemetry import FIRST_TOKEN, RETRIES, about, step
from sharding.errors import (
    DeadlineExceeded,
    EngineFailed,
    MemshardError,
    NotFound,
    ShardGone,
    Unavailable,
    WrongShard,
)
from sharding.ids import Placement, ShardId, UserId

T = TypeVar("T")

DEFAULT_PATIENCE_S = 8.0  # longer than it takes a heartbeat to run out, and shorter than a client waits
PAUSE_S = 0.25  # between tries after the second
ASLEEP_RETRY_S = 10.0

log = logging.getLogger(__name__)

Misplaced = WrongShard | ShardGone
Hop = Callable[[Placement, float], Awaitable[T]]


class OwnerCalls:
    """Sends calls to owners. `deadline_s`: the longest that a request may take in all, retries included. `patience_s`:
    how long a shard that cannot be reached, but has a heartbeat, is tried again. `wake_s`: how long a first shard is
    waited for where none is ready; 0 refuses at once. `or_nobody`: whether adds may be nobody's."""

    def __init__(
        self,
        shards: Shards,
        owners: Owners,
        deadline_s: float,
        patience_s: float = DEFAULT_PATIENCE_S,
        wake_s: float = 0.0,
        or_nobody: bool = False,
    ) -> None:
        self._shards = shards
        self._owners = owners
        self._deadline_s = deadline_s
        self._patience_s = patience_s
        self._wake_s = wake_s
        self._or_nobody = or_nobody
        self._waking: asyncio.Task[None] | None = None

    async def add(self, user: UserId, hop: Hop[T]) -> T:
        """`hop(placement, deadline_s)` sends one call to `placement.shard` and returns its answer; a user who has no
        shard yet gets one."""

        async def owner(user: UserId) -> Placement:
            return await self._owners.owner(user, self._or_nobody)

        return await self._send(owner, user, hop)

    async def call(self, user: UserId, hop: Hop[T]) -> T:
        """As `add`, for a user who is there already. Raises NotFound."""

        async def placed(user: UserId) -> Placement:
            if (placement := await self._owners.placed(user)) is None:
                raise NotFound("There is no such user: nothing was ever stored under this id.", field="user_id")
            return placement

        return await self._send(placed, user, hop)

    async def delete(self, user: UserId, hop: Hop[None]) -> None:
        """As `call`. Where the answer to a first attempt was lost, what the second does not find was deleted by it."""
        lost = False

        async def attempt(placement: Placement, deadline_s: float) -> None:
            nonlocal lost
            try:
                await hop(placement, deadline_s)
            except WrongShard:
                raise  # refused: nothing was done
            except NotFound:
                if not lost:
                    raise
            except BaseException:  # cancelled, where the shard's heartbeat ran out meanwhile
                lost = True
                raise

        await self.call(user, attempt)

    def forgetting(self, hop: Hop[T]) -> Hop[T]:
        """`hop`, sent when no shard but the owner has anything of the user: those who owned it before may have left
        chunks on their disks, or not know yet that they lost it. Raises `Unavailable` where one of them does not say
        so."""

        async def forget(placement: Placement, deadline_s: float) -> T:
            began = time.perf_counter()
            if placement.epoch > 1:  # else nobody ever had it but this one
                others = [shard for shard in await self._owners.live(newest=True) if shard != placement.shard]
                await asyncio.gather(*(self._leave(shard, placement.user, deadline_s) for shard in others))
            return await hop(placement, deadline_s - (time.perf_counter() - began))

        return forget

    async def _leave(self, shard: ShardId, user: UserId, deadline_s: float) -> None:
        """Returns when the shard has said so or has ended. One that cannot be reached is asked again until its
        heartbeat has run out: most deletions have nothing to do with it."""
        began = time.perf_counter()
        while True:
            try:
                async with self._owners.watched(shard):
                    return await self._shards.leave(shard, user, deadline_s)
            except (ShardGone, EngineFailed) as error:
                if error.details.get("certain") or shard not in await self._owners.live(newest=True):
                    return None
                if time.perf_counter() - began > min(self._patience_s, deadline_s / 2):
                    why = "A shard that may have had this memory does not answer; retry shortly."
                    raise Unavailable(why) from error
            await asyncio.sleep(PAUSE_S)

    async def _send(self, place: Callable[[UserId], Awaitable[Placement]], user: UserId, hop: Hop[T]) -> T:
        left_s = self._countdown()
        began = time.perf_counter()
        failures: list[Misplaced] = []
        while await self._again(failures, began):
            with step("memories", "owner"):
                placement = await self._awake(partial(place, user), left_s)
            about(user=user, shard=placement.shard, epoch=placement.epoch)
            try:
                async with self._owners.watched(placement.shard):
                    return await hop(placement, left_s())
            except (WrongShard, ShardGone, Unavailable) as error:
                failures.append(await self._misplaced(placement.shard, user, error))
                RETRIES.labels(type(error).__name__).inc()
        raise _unavailable() from failures[-1]

    async def whole_chat(self, user: UserId | None, call: ChatCall) -> list[ChatEvent]:
        """As `chat`, for a client that sees nothing before the end: a shard that is lost on the way costs a retry."""
        left_s = self._countdown()
        try:
            return [event async for event in self._chat(user, call, left_s)]
        except Unavailable as error:
            if "lost" not in error.details:
                raise
        return [event async for event in self._chat(user, call, left_s)]

    def chat(self, user: UserId | None, call: ChatCall) -> AsyncGenerator[ChatEvent, None]:
        """The events of `call`, whose placement is filled in here: None for a caller without identity or memory."""
        return self._chat(user, call, self._countdown())

    async def _chat(
        self, user: UserId | None, call: ChatCall, left_s: Callable[[], float]
    ) -> AsyncGenerator[ChatEvent, None]:
        began = time.perf_counter()
        failures: list[Misplaced] = []
        while await self._again(failures, began):
            with step("chat", "owner"):
                placement, shard = await self._awake(partial(self._for_chat, user), left_s)
            about(user=user, shard=shard, epoch=placement.epoch if placement is not None else None)
            started = False
            held: list[ChatEvent] = []  # goes out with the first token: until then nothing was sent
            try:
                events = self._shards.chat(shard, replace(call, placement=placement), left_s())
                async with aclosing(events):
                    while True:
                        async with self._owners.watched(shard):
                            event = await anext(events, None)
                        if isinstance(event, ChatStarted):
                            held.append(event)
                            continue
                        if event is not None and not started:
                            FIRST_TOKEN.labels(call.mode, "gateway").observe(time.perf_counter() - began)
                            started = True
                        for one in held:
                            yield one
                        held.clear()
                        if event is None:
                            return
                        yield event
            except (WrongShard, ShardGone, Unavailable) as error:
                failures.append(await self._misplaced(shard, user, error))
                if started:
                    lost = "The shard was lost while it answered; send the request again."
                    raise Unavailable(lost, lost=1) from error
                RETRIES.labels(type(error).__name__).inc()
        raise _unavailable() from failures[-1]

    async def _for_chat(self, user: UserId | None) -> tuple[Placement | None, ShardId]:
        placement = await self._owners.placed(user) if user is not None else None
        return placement, placement.shard if placement is not None else await self._owners.any_shard(user)

    async def _awake(self, place: Callable[[], Awaitable[T]], left_s: Callable[[], float]) -> T:
        """What `place` finds, once a shard is ready. Raises `Unavailable`."""
        try:
            return await place()
        except Unavailable:
            if not self._wake_s or not await self._owners.asleep():
                raise
        try:
            async with asyncio.timeout(min(self._wake_s, left_s())):
                while await self._owners.asleep():
                    self._wake()
                    await asyncio.sleep(PAUSE_S)
        except TimeoutError:
            asleep = "No shard runs at the moment, and none has started yet; send the request again shortly."
            raise Unavailable(asleep, retry_after_s=ASLEEP_RETRY_S) from None
        return await place()

    def _wake(self) -> None:
        """Sees to it that a call for a first shard is under way; one for all who wait."""
        if self._waking is None or self._waking.done():
            self._waking = asyncio.create_task(self._woken())

    async def _woken(self) -> None:
        try:
            await self._shards.wake(self._wake_s)
        except MemshardError as error:
            log.warning("No shard could be woken: %s", error)

    async def _again(self, failures: list[Misplaced], began: float) -> bool:
        """Whether to try (again): once more at once, then with pauses, until the patience ends. A shard that lies on a
        node that crashed cannot be told from one that is slow before its heartbeat has run out."""
        if len(failures) < 2 or (len(failures) == 2 and failures[-1].details.get("certain")):
            return True
        if time.perf_counter() - began > self._patience_s:
            return False
        await asyncio.sleep(PAUSE_S)
        return True

    async def _misplaced(
        self, shard: ShardId, user: UserId | None, error: WrongShard | ShardGone | Unavailable
    ) -> Misplaced:
        """What a failed call says of the placement it went by. Raises `error` where it says nothing."""
        if not isinstance(error, Unavailable):
            self._owners.distrust(shard, user, error)
            return error
        unconfirmed = "unconfirmed" in error.details  # the shard will serve, if we found Redis away, too
        reaches_redis = ("cause" in error.details or unconfirmed) and await self._owners.reaches_redis()
        if not (reaches_redis or unconfirmed):
            raise error
        alone = ShardGone(f"Shard {shard} does not reach Redis.", shard=shard, certain=False)
        if reaches_redis:
            self._owners.distrust(shard, user, alone)
        return alone

    def _countdown(self) -> Callable[[], float]:
        """A function that returns the seconds left; raises DeadlineExceeded when there are none."""
        now = asyncio.get_running_loop().time
        ends_at = now() + self._deadline_s

        def left_s() -> float:
            if (left := ends_at - now()) <= 0:
                raise DeadlineExceeded("The request took longer than it may.")
            return left

        return left_s


def _unavailable() -> Unavailable:
    return Unavailable("The shard that holds this memory is being replaced; send the request again shortly.")
