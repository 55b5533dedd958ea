"""A worker's chunks on their way from one tier to another: device, host, files; over lines by `line_jobs.py`.

    begin ─► room in the target is taken ─► a thread copies, chunk by chunk ─► poll ─► published, or the room given back

The worker's main thread alone keeps the books (`ChunkStore`); a thread only fills rooms and files that nobody else
looks at. The main thread serves engine steps between `begin` and `poll`. What is read and what is written has a thread
each, so that a chat does not wait for another user's chunks being stored.

Decides nothing: the shard's process (`tiers.py`) says what goes where, and sees to it that no chunk is dropped while
it is on its way. Imports no vLLM. The side stream beside a GPU has never run on one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from connector.chunk import Chunk, ChunkId
from connector.chunk_file import HEADER_BYTES, ChunkFormat, Damaged, Label
from connector.files import name_of, open_files, owner_key
from connector.line_jobs import LineJobs
from connector.moves import DEVICE, HOST, Copied, Move, Outcome
from connector.store import ChunkStore

log = logging.getLogger(__name__)

open_once = cache(open_files)


@dataclass(slots=True)
class _Job:
    move: Move
    settled: dict[ChunkId, Outcome]  # known from the start
    copying: Future[dict[ChunkId, Copied]]


class TierJobs:
    """The moves of one worker, which is `rank` of its engine's. `format` is how it writes files, and takes them."""

    def __init__(self, device: ChunkStore, host: ChunkStore, rank: int) -> None:
        self._stores = {DEVICE: device, HOST: host}
        self.device = device.device
        self.rank = rank
        self.format = ChunkFormat()
        self._jobs: dict[str, _Job] = {}
        self._reader = ThreadPoolExecutor(1, "memshard-read")
        self._writer = ThreadPoolExecutor(1, "memshard-write")
        self._stream = torch.cuda.Stream(device.device) if device.device.type == "cuda" else None
        self.lines = LineJobs(self._stores, device.shape, rank, self._stream, self._load, self._store)

    def begin(self, job: str, move: Move) -> None:
        """Starts a move under a name that `poll` will know."""
        if move.over_line:
            self._jobs[job] = _Job(move, {}, self.lines.begin(move, self._ready()))
            return
        settled: dict[ChunkId, Outcome] = {}
        copies: dict[ChunkId, Callable[[], Copied]] = {}
        for id_, tokens in move.chunks:
            planned = self._plan(move, id_, tokens)
            if isinstance(planned, Outcome):
                settled[id_] = planned
            else:
                copies[id_] = planned
        pool = self._reader if move.target in self._stores else self._writer
        self._jobs[job] = _Job(move, settled, pool.submit(self._copy_all, copies, self._ready()))

    def poll(self, job: str, wait_s: float = 0.0) -> dict[ChunkId, Outcome] | None:
        """What became of each chunk, told once; None while the move goes on. `wait_s` is kept short: engine steps wait,
        too. A job that is not known has failed."""
        known = self._jobs.get(job)
        if known is None:
            return {}
        wait([known.copying], wait_s)
        if not known.copying.done():
            return None
        del self._jobs[job]
        move = known.move
        outcomes = known.settled
        # Cancelled: its line was closed before it began.
        unbegun = {id_: (Outcome.FAILED, 0) for id_, _ in move.chunks}
        for id_, (outcome, position) in (unbegun if known.copying.cancelled() else known.copying.result()).items():
            outcomes[id_] = outcome
            if (target := self._stores.get(move.target)) is not None:
                if outcome is Outcome.DONE:
                    target.publish(id_, position)
                target.settle([id_])
        if move.source in self._stores and move.target in self._stores:
            self._stores[move.source].drop([id_ for id_, outcome in outcomes.items() if outcome is Outcome.DONE])
        return outcomes

    def close(self) -> None:
        """Lets what runs end and begins nothing more."""
        self.lines.close()
        for pool in (self._reader, self._writer):
            pool.shutdown(wait=False, cancel_futures=True)

    def _ready(self) -> Any:
        """Happens on a GPU when what was begun there until now has run."""
        return self._stream and torch.cuda.current_stream(self._stream.device).record_event()

    def _plan(self, move: Move, id_: ChunkId, tokens: int) -> Outcome | Callable[[], Copied]:
        """How to copy one chunk, its room being taken; or why that cannot be."""
        label = Label(move.digest, self.rank, move.owner, id_, tokens)
        chunk: Chunk | None = None
        if (source := self._stores.get(move.source)) is not None:
            chunk = source.get(id_)
            if chunk is None or chunk.tokens != tokens:
                return Outcome.MISSING
        if (target := self._stores.get(move.target)) is None:
            assert chunk is not None, "files are not copied to files"
            return lambda: self._store(move.target, label, chunk)
        if target.get(id_) is not None:
            return Outcome.DONE
        room = target.arriving(id_, tokens, 0)
        if room is None:
            return Outcome.NO_ROOM
        if chunk is None:
            return lambda: self._load(move.source, label, room)
        return lambda: self._hand_over(chunk, room)

    # -- on a thread ------------------------------------------------------------------------------------------------

    def _copy_all(self, copies: dict[ChunkId, Callable[[], Copied]], ready: Any) -> dict[ChunkId, Copied]:
        if self._stream is not None:
            self._stream.wait_event(ready)
        return {id_: self._copied(copy) for id_, copy in copies.items()}

    def _copied(self, copy: Callable[[], Copied]) -> Copied:
        try:
            with torch.cuda.stream(self._stream):  # does nothing for None
                copied = copy()
            if self._stream is not None:
                self._stream.synchronize()
            return copied
        except FileNotFoundError:
            return Outcome.MISSING, 0
        except Damaged as damaged:
            log.warning("A chunk's file is passed over: %s", damaged)
            return Outcome.DAMAGED, 0
        except Exception as error:  # noqa: BLE001  # the thread's edge: whatever it is, this chunk did not get there
            log.warning("A chunk could not be moved: %s", error)
            return Outcome.FAILED, 0

    def _hand_over(self, chunk: Chunk, room: torch.Tensor) -> Copied:
        if self._stream is None:
            np.copyto(_bytes(room), _bytes(chunk.kv))  # one thread, beside the engine's
        else:
            room.copy_(chunk.kv, non_blocking=True)
        return Outcome.DONE, chunk.position

    def _store(self, root: str, label: Label, chunk: Chunk) -> Copied:
        payload = memoryview(_bytes(chunk.kv.cpu()))
        name = name_of(label.digest, owner_key(label.owner), label.id, label.rank)
        open_once(root).write(name, *self.format.writing(label, chunk.position, payload))
        return Outcome.DONE, chunk.position

    def _load(self, root: str, label: Label, room: torch.Tensor) -> Copied:
        staged = room if self._stream is None else torch.empty(room.shape, dtype=room.dtype, pin_memory=True)
        header, payload = bytearray(HEADER_BYTES), memoryview(_bytes(staged))
        open_once(root).read(name_of(label.digest, owner_key(label.owner), label.id, label.rank), header, payload)
        position = self.format.position_of(header, payload, label)
        if staged is not room:
            room.copy_(staged, non_blocking=True)
        return Outcome.DONE, position


def _bytes(kv: torch.Tensor) -> Any:
    """A contiguous tensor's memory as numpy's uint8, `[bytes]`."""
    return kv.view(-1).view(torch.uint8).numpy()
