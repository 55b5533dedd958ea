"""A worker's chunks on their way over lines (`line.py`): to another shard's workers, or from there.

What is sent stays here, from whichever tier it is read. What is received has a room of its own, which the main thread
publishes where all of it came (`TierJobs.poll`), or is written to a file. Imports no vLLM.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from connector.chunk import Chunk, ChunkId, KVShape
from connector.chunk_file import Damaged, Label
from connector.groups import LineFailed
from connector.line import Connect, Line, Sent
from connector.moves import MOST_LINES, PEER, Copied, Move, Outcome
from connector.store import ChunkStore

Load = Callable[[str, Label, torch.Tensor], Copied]
Store = Callable[[str, Label, Chunk], Copied]
Room = tuple[Outcome | None, torch.Tensor]
"""Where a chunk is received, and what is said of it whether it comes or not, where that is known."""

log = logging.getLogger(__name__)


class LineJobs:
    """The lines of one worker. `load` and `store` read and write a chunk's file."""

    def __init__(
        self, stores: Mapping[str, ChunkStore], shape: KVShape, rank: int, stream: Any, load: Load, store: Store
    ) -> None:
        self._stores = stores
        self._shape = shape
        self._rank = rank
        self._stream = stream
        self._load = load
        self._store = store
        self._lines: OrderedDict[str, Line] = OrderedDict()  # the one unused longest first
        self.counters = {"line_bytes": 0, "line_us": 0}  # what went over lines, and how long that took
        self.last = (0.0, 0.0)  # when the last transfer began and ended, in seconds of this machine's monotonic clock

    def open(self, name: str, connect: Connect) -> None:
        """From now on moves may name the line; one that had this name is closed."""
        self.hang_up(name)
        self._lines[name] = Line(connect)
        while len(self._lines) > MOST_LINES:
            self.hang_up(next(iter(self._lines)))

    def hang_up(self, name: str) -> None:
        """What is on its way over the line fails."""
        if (line := self._lines.pop(name, None)) is not None:
            line.close()

    def close(self) -> None:
        """Hangs up all."""
        for name in list(self._lines):
            self.hang_up(name)

    def begin(self, move: Move, ready: Any) -> Future[dict[ChunkId, Copied]]:
        """Begins to send or to receive, behind what the line was asked for before; `ready` is waited for on a GPU."""
        sends = move.target.startswith(PEER)
        name = (move.target if sends else move.source).removeprefix(PEER)
        line = self._lines.get(name)
        if line is None:
            failed: Future[dict[ChunkId, Copied]] = Future()
            failed.set_result(_failed(move))
            return failed
        self._lines.move_to_end(name)
        if sends:
            chunks = [self._to_send(move, id_, tokens) for id_, tokens in move.chunks]
            return line.run(partial(self._run, move, ready, partial(self._send, move, chunks)))
        rooms = [self._room(move, id_, tokens) for id_, tokens in move.chunks]
        return line.run(partial(self._run, move, ready, partial(self._receive, move, rooms)))

    def _to_send(self, move: Move, id_: ChunkId, tokens: int) -> Callable[[], Sent | None]:
        """What gives a chunk when it is its turn. One in memory is held from now on, whatever becomes of it here."""
        if (source := self._stores.get(move.source)) is not None:
            chunk = source.get(id_)
            return lambda: Sent(chunk.position, chunk.kv) if chunk is not None else None
        return partial(self._read, move.source, self._label(move, id_, tokens))

    def _room(self, move: Move, id_: ChunkId, tokens: int) -> Room:
        if (target := self._stores.get(move.target)) is None:
            return None, self._empty(tokens)
        if (room := target.arriving(id_, tokens, 0)) is not None:
            return None, room
        return Outcome.DONE if target.get(id_) is not None else Outcome.NO_ROOM, self._empty(tokens)

    # -- on a line's thread -----------------------------------------------------------------------------------------

    def _run(
        self, move: Move, ready: Any, work: Callable[[Line], dict[ChunkId, Copied]], line: Line
    ) -> dict[ChunkId, Copied]:
        began = time.perf_counter()
        try:
            if ready is not None:
                ready.synchronize()  # whatever stream the group has: chunks are there, rooms are nobody else's
            with torch.cuda.stream(self._stream):  # does nothing for None
                return work(line)
        except LineFailed as error:
            log.warning("Chunks did not go over a line: %s", error)
        except Exception:  # the thread's edge: whatever it is, nothing of it got there
            log.exception("Chunks did not go over a line")
        finally:
            self.counters["line_bytes"] += sum(tokens for _, tokens in move.chunks) * self._shape.token_bytes
            self.last = (began, time.perf_counter())
            self.counters["line_us"] += round((self.last[1] - began) * 1e6)
        return _failed(move)

    def _send(self, move: Move, chunks: Sequence[Callable[[], Sent | None]], line: Line) -> dict[ChunkId, Copied]:
        sizes = [tokens * self._shape.token_bytes for _, tokens in move.chunks]
        sent = line.send(move.hello(self._rank), chunks, sizes)
        here = zip(move.chunks, sent, strict=True)
        return {id_: (Outcome.DONE if came else Outcome.MISSING, 0) for (id_, _), came in here}

    def _receive(self, move: Move, rooms: Sequence[Room], line: Line) -> dict[ChunkId, Copied]:
        positions = line.receive(move.hello(self._rank), [room for _, room in rooms])
        if self._stream is not None:
            self._stream.synchronize()
        copied: dict[ChunkId, Copied] = {}
        for (id_, tokens), (known, room), position in zip(move.chunks, rooms, positions, strict=True):
            if known is not None or position is None:
                copied[id_] = (known or Outcome.MISSING, 0)
            elif move.target in self._stores:
                copied[id_] = (Outcome.DONE, position)
            else:
                copied[id_] = self._write(move.target, self._label(move, id_, tokens), Chunk(id_, position, room))
        return copied

    def _read(self, root: str, label: Label) -> Sent | None:
        """A chunk out of its file; None where that is not there, or is another's."""
        kv = self._empty(label.tokens)
        try:
            _, position = self._load(root, label, kv)
        except (OSError, Damaged) as error:
            log.warning("A chunk's file is passed over: %s", error)
            return None
        return Sent(position, kv)

    def _write(self, root: str, label: Label, chunk: Chunk) -> Copied:
        try:
            return self._store(root, label, chunk)
        except OSError as error:
            log.warning("A chunk could not be written: %s", error)
            return Outcome.FAILED, 0

    def _label(self, move: Move, id_: ChunkId, tokens: int) -> Label:
        return Label(move.digest, self._rank, move.owner, id_, tokens)

    def _empty(self, tokens: int) -> torch.Tensor:
        return torch.empty(self._shape.of(tokens), dtype=self._shape.dtype)


def _failed(move: Move) -> dict[ChunkId, Copied]:
    return {id_: (Outcome.FAILED, 0) for id_, _ in move.chunks}
