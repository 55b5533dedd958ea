"""Turning durable facts into chunks, in the background, at lower priority than chats.

    submit(owner, wishes) ─► queue, each owner once ─► up to ENCODES_AT_ONCE owners at a time, one job each, in steps:
         wait until no chat waits ─► reserve bytes ─► evict others ─► prefill with captures ─► commit or abort

Steps are short (`connector.encode_steps`), and `encode_pace` says when one may begin.

Until its chunk is there a fact is served as text. What does not fit the budget stays text, and is tried again when
the owner is submitted again: with each chat that misses a chunk.

The ledger forgets a chunk at once, the workers when they answer. What they have not confirmed is dropped again with
every later drop, and nothing is encoded before: a chunk never outlives its fact unnoticed.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from connector.chunk import ChunkId, text_salt
from connector.encode_steps import steps
from connector.ledger import ChunkLedger
from connector.port import Engine
from connector.tiers import Tiers
from connector.windows import EncodeJob
from deployments import telemetry
from deployments.encode_pace import EncodePace
from deployments.salts import Salts
from sharding.errors import EngineFailed

ENCODES_AT_ONCE = 4

log = logging.getLogger(__name__)


class Wishes(Protocol):
    """What an owner wants encoded, as it is when asked: `connector.windows.FactChunks`, `heads.Heads`."""

    def ids(self) -> Iterable[ChunkId]:
        """Every chunk, here or not."""

    def jobs(self, resident: Callable[[ChunkId], bool]) -> Iterator[EncodeJob]:
        """What to prefill so that all are here."""


class _Submission(NamedTuple):
    wishes: Wishes
    spare_s: float


class Encoder:
    """The only one that changes what the ledger holds. Made on the event loop that it runs on."""

    def __init__(self, engine: Engine, ledger: ChunkLedger, pace: EncodePace, tiers: Tiers | None = None) -> None:
        """`tiers` around the `ledger`; without them what is evicted is gone."""
        self._engine = engine
        self.pace = pace
        self.salts = Salts()
        self._ledger = ledger
        self._tiers = tiers or Tiers(engine, ledger)
        self._waiting: dict[str, _Submission] = {}  # by owner, in the order of arrival
        self._running: dict[str, _Submission] = {}
        self._changed = asyncio.Condition()
        self._to_drop: set[ChunkId] = set()  # forgotten here, and perhaps still on a worker
        self._dropping = asyncio.Lock()
        self._closed = False
        self._tasks = [asyncio.create_task(self._run()) for _ in range(ENCODES_AT_ONCE)]

    def backlog(self) -> int:
        """Chunks that are waited for."""
        pending = {**self._running, **self._waiting}.values()
        return sum(not self._tiers.peek_held(id_) for submission in pending for id_ in submission.wishes.ids())

    async def submit(self, owner: str, wishes: Wishes, *, spare_s: float = 0.0) -> None:
        """Encode what `owner` lacks, soon; replaces what the owner submitted before, but for the job that runs.

        Nobody who was active within `spare_s` loses chunks to it. Chunks that the owner no longer wants are forgotten
        after this, not before: until then the earlier jobs may go on, and a job that runs is told when it ends what was
        forgotten meanwhile.
        """
        if self._engine.refusal is None:
            async with self._changed:
                self._waiting[owner] = _Submission(wishes, spare_s)
                self._changed.notify_all()

    def idle(self, owner: str) -> bool:
        """Whether nothing of `owner` is waiting or running."""
        return owner not in self._waiting and owner not in self._running

    async def settled(self, owner: str) -> None:
        """Returns when nothing of `owner` is waiting or running any more."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.idle(owner))

    async def forget(self, ids: Sequence[ChunkId]) -> None:
        """Drops chunks here, on the workers and from files; when this returns they are gone, and so is all that was
        forgotten before. Raises `EngineFailed` where the workers did not confirm it, `Unavailable` where a file system
        did not."""
        await self._drop(self._tiers.strike(ids))

    def close(self) -> None:
        """Stops encoding; what runs is aborted."""
        self._closed = True
        for task in self._tasks:
            task.cancel()

    async def _run(self) -> None:
        while not self._closed:  # an engine that fails while a job is aborted hides the cancellation
            async with self._changed:
                await self._changed.wait_for(lambda: self._next() is not None)
                owner = self._next()
                assert owner is not None
                submission = self._running[owner] = self._waiting.pop(owner)
            try:
                await self._encode_all(owner, submission)
            except EngineFailed as error:
                log.error("Encoding stopped: %s", error)  # the health check ends this replica
            finally:
                del self._running[owner]
                async with self._changed:
                    self._changed.notify_all()

    def _next(self) -> str | None:
        return next((owner for owner in self._waiting if owner not in self._running), None)

    async def _encode_all(self, owner: str, submission: _Submission) -> None:
        for job in submission.wishes.jobs(self._tiers.peek_held):
            try:
                await self._encode(owner, job, submission.spare_s)
            except EngineFailed:
                raise
            except Exception:  # the loop's edge: one job's failure must not end encoding for the others
                log.exception("Encoding failed; up to %d chunks stay text", len(job.captures))
            if owner in self._waiting:
                return  # the rest may name facts that are deleted by now

    async def _encode(self, owner: str, job: EncodeJob, spare_s: float) -> None:
        refs = {range_.id: range_.tokens for range_ in job.captures}
        await self._drop(())
        if not await self._tiers.make_room(owner, list(refs.items()), spare_s=spare_s, own=not spare_s):
            log.info("The chunk budget is used up; %d chunks stay text", len(refs))
            return
        try:
            sizes = {"step_tokens": self.pace.step_tokens, "block_tokens": self._engine.block_tokens}
            for step in steps(job, **sizes):
                async with self.pace.turn(len(step.token_ids) - step.known_tokens):
                    if owner in self._waiting:
                        return
                    await self._prefill(owner, step, job.salt)
        finally:
            self._ledger.abort(refs)

    async def _prefill(self, owner: str, step: EncodeJob, salt: str) -> None:
        ids = [range_.id for range_ in step.captures]
        done: set[ChunkId] = set()
        try:
            with telemetry.step("remember", "encode"):
                done = await self._engine.encode(
                    f"encode-{uuid.uuid4().hex}",
                    step.token_ids,
                    step.captures,
                    text_salt(self.salts.name(owner) + salt),
                )
        except BaseException:
            self._to_drop.update(ids)  # nobody said that the workers hold nothing of it
            raise
        finally:
            unwanted = self._ledger.commit(done)
        await self._drop(unwanted)
        await self._tiers.writer.encoded(owner, done)

    async def _drop(self, ids: Iterable[ChunkId]) -> None:
        self._to_drop.update(ids)
        async with self._dropping:  # whoever waits here finds the own ids dropped, or drops them
            due, self._to_drop = self._to_drop, set()
            try:
                await self._tiers.remove(due)
            except BaseException:
                self._to_drop |= due
                raise
