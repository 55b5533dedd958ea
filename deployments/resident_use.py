"""Using a resident user's memory: kept while in use, forgotten where it turns out to be another shard's; and work that
goes on when whoever asked for it has gone."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from deployments.resident import Residents
from deployments.telemetry import said
from deployments.usage import UsageNotes
from sharding.errors import WrongShard
from sharding.ids import Placement, UserId
from sharding.user_memory import UserMemory, UserTable

T = TypeVar("T")
log = logging.getLogger(__name__)


class ResidentUse:
    """The table of a shard's users, and what runs for them in the background."""

    def __init__(self, table: UserTable, residents: Residents, usage: UsageNotes) -> None:
        self._table = table
        self._usage = usage
        self.rates = usage.rates
        self._residents = residents
        self._closed: dict[UserId, asyncio.Event] = {}
        self._moving: defaultdict[UserId, list[asyncio.Event]] = defaultdict(list)
        self._background: set[asyncio.Task[Any]] = set()
        self.wrong_shard = 0  # calls that were refused as another shard's

    @asynccontextmanager
    async def use(self, placement: Placement) -> AsyncIterator[UserMemory]:
        """The user's memory, kept while in use; a user that turns out to be another shard's is forgotten here."""
        while (open_again := self._closed.get(placement.user)) is not None:
            await open_again.wait()
        try:
            async with self._table.use(placement) as memory:
                self._usage.served(placement)
                yield memory
        except WrongShard:
            self.wrong_shard += 1
            self._table.drop(placement)
            if placement.user not in self._table:  # may be held under another placement
                self.soon("Chunks of a user who left are dropped later", self._residents.left(placement.user))
            raise

    async def leave(self, user: UserId) -> None:
        """Nothing of a user who is not this shard's is here when this returns: neither facts nor chunks, nor a file on
        this machine. Nothing is done to one who is. Raises `EngineFailed`, `Unavailable`."""
        if not self._table.owns(await self._table.directory.lookup(user)):
            self._table.drop_user(user)
            await self._residents.left(user)

    @contextmanager
    def closed(self, user: UserId) -> Iterator[None]:
        """Whoever comes for this user waits until this ends; whoever has come already is not disturbed."""
        open_again = self._closed[user] = asyncio.Event()
        try:
            yield
        finally:
            del self._closed[user]
            open_again.set()

    @contextmanager
    def moving(self, user: UserId) -> Iterator[None]:
        """Deletions of this user wait until this ends: what was copied to another shard is its own by then, or gone."""
        ended = asyncio.Event()
        self._moving[user].append(ended)
        try:
            yield
        finally:
            self._moving[user].remove(ended)
            if not self._moving[user]:
                del self._moving[user]
            ended.set()

    async def moved(self, user: UserId) -> None:
        """Returns when no move of this user goes on."""
        while moves := self._moving.get(user):
            await moves[0].wait()

    async def to_its_end(self, write: Coroutine[Any, Any, T]) -> T:
        """A write goes on where its caller has gone away: what is done in Redis has to be done here, too."""
        task = asyncio.create_task(write)
        self._background.add(task)

        def done(task: asyncio.Task[T]) -> None:
            self._background.discard(task)
            if not task.cancelled():
                task.exception()  # where the caller has gone away, nobody else asks for it

        task.add_done_callback(done)
        return await asyncio.shield(task)

    def soon(self, else_: str, work: Coroutine[Any, Any, None]) -> None:
        """Work that nobody waits for; `else_` says what its failure means."""

        def done(task: asyncio.Task[None]) -> None:
            self._background.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.warning("%s: %s", else_, said(error))

        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(done)

    async def background_done(self) -> None:
        """Returns when nothing runs in the background."""
        while self._background:
            await asyncio.wait(self._background)
