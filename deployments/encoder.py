"""Turning durable facts into chunks, in the background, at lower priority than chats.

    submit(owner, jobs) ─► queue, each owner once ─► up to ENCODES_AT_ONCE owners at a time, one job each:
                                     reserve bytes ─► drop the evicted ─► prefill with captures ─► commit or abort

Until its chunk is there a fact is served as text. What does not fit the budget stays text, and is tried again when
the owner is submitted again: with each chat that misses a chunk.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterable, Sequence

from connector.chunk import ChunkId, text_salt
from connector.engine import MemoryEngine
from connector.ledger import ChunkLedger
from connector.windows import EncodeJob
from sharding.errors import EngineFailed

ENCODES_AT_ONCE = 4

Jobs = Callable[[], Iterable[EncodeJob]]
"""Asked when the owner's turn comes: what is missing then."""

log = logging.getLogger(__name__)


class Encoder:
    """The only one that changes what the ledger holds. Made on the event loop that it runs on."""

    def __init__(self, engine: MemoryEngine, ledger: ChunkLedger) -> None:
        self._engine = engine
        self._ledger = ledger
        self._waiting: dict[str, Jobs] = {}  # by owner, in the order of arrival
        self._running: dict[str, Jobs] = {}
        self._changed = asyncio.Condition()
        self._tasks = [asyncio.create_task(self._run()) for _ in range(ENCODES_AT_ONCE)]

    def backlog(self) -> int:
        """Chunks that are waited for."""
        pending = {**self._running, **self._waiting}
        return sum(len(job.captures) for jobs in pending.values() for job in jobs())

    async def submit(self, owner: str, jobs: Jobs) -> None:
        """Encode what `owner` lacks, soon; replaces what the owner submitted before, but for the job that runs.

        Chunks that the owner no longer wants are forgotten after this, not before: until then the earlier jobs may go
        on, and a job that runs is told when it ends what was forgotten meanwhile.
        """
        if self._engine.refusal is None:
            async with self._changed:
                self._waiting[owner] = jobs
                self._changed.notify_all()

    def idle(self, owner: str) -> bool:
        """Whether nothing of `owner` is waiting or running."""
        return owner not in self._waiting and owner not in self._running

    async def settled(self, owner: str) -> None:
        """Returns when nothing of `owner` is waiting or running any more."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.idle(owner))

    async def forget(self, ids: Sequence[ChunkId]) -> None:
        """Drops chunks here and on the workers; when this returns they are gone."""
        await self._engine.drop(self._ledger.forget(ids))

    def close(self) -> None:
        """Stops encoding; what runs is aborted."""
        for task in self._tasks:
            task.cancel()

    async def _run(self) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._next() is not None)
                owner = self._next()
                assert owner is not None
                jobs = self._running[owner] = self._waiting.pop(owner)
            try:
                for job in jobs():
                    await self._encode(owner, job)
                    if owner in self._waiting:
                        break  # the rest may name facts that are deleted by now
            except EngineFailed as error:
                log.error("Encoding stopped: %s", error)  # the health check ends this replica
            except Exception:  # the loop's edge: one owner's failure must not end encoding for the others
                log.exception("Encoding failed; these facts stay text until their user changes")
            finally:
                del self._running[owner]
                async with self._changed:
                    self._changed.notify_all()

    def _next(self) -> str | None:
        return next((owner for owner in self._waiting if owner not in self._running), None)

    async def _encode(self, owner: str, job: EncodeJob) -> None:
        evicted = self._ledger.reserve(owner, [(range_.id, range_.tokens) for range_ in job.captures])
        if evicted is None:
            log.info("The chunk budget is used up; %d facts stay text", len(job.captures))
            return
        ids = [range_.id for range_ in job.captures]
        done: set[ChunkId] = set()
        try:
            await self._engine.drop(evicted)
            done = await self._engine.encode(
                f"encode-{uuid.uuid4().hex}", job.token_ids, job.captures, text_salt(owner)
            )
        finally:
            unwanted = self._ledger.commit(done)
            self._ledger.abort(ids)
        await self._engine.drop(unwanted)
