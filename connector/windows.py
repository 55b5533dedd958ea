"""Behind which facts a fact is encoded (context-window encoding), and what has to be prefilled for it.

Encoded apart, facts lose the attention between them; a window of earlier facts in front, which is not kept, gives most
of it back. The window is anchored rather than sliding, so that neighbours share it and vLLM's prefix cache computes it
once:

    seq        0 … w-1 │ w … 2w-1 │ 2w … 3w-1 │ …          blocks of w facts, by the order they were told in
    fact in block b    prefix = head + block b-1 + the earlier facts of block b      (between w and 2w-1 facts)

One prompt a block, `[head | block b-1 | block b]`, captures every fact of block b; a fact that is told next is one
more line behind a prefix that is cached already. Deleting or changing a fact changes the prefix, and so the id, of the
later facts of its block and the next, of nothing else: 2w-1 at most, however much is remembered. What was encoded
behind a fact that changed may be kept until it is rebuilt (`stale.py`).

Pure: facts in, ids and prompts out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from connector.chunk import CaptureRange, ChunkId, chunk_id
from connector.plan import Piece
from connector.stale import Former, Resident, StaleChunks
from sharding.ids import FactId


@dataclass(frozen=True, slots=True)
class Line:
    """A fact as it stands in a prompt. `seq` is its place in the order of telling, with gaps where facts went."""

    fact: FactId
    seq: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """A prefill that captures several facts. `known_tokens`: how many of the first are likely to be in vLLM's prefix
    cache, under the owner's salt and `salt`. `facts`: those that the prompt would be cut along if all were captured."""

    token_ids: tuple[int, ...]
    captures: tuple[CaptureRange, ...]
    known_tokens: int = 0
    facts: tuple[CaptureRange, ...] = ()
    salt: str = ""


@dataclass(frozen=True, slots=True)
class _Layout:
    """One prompt of lines behind the head: the first `window` of them only give context."""

    lines: tuple[Line, ...]
    window: int


class FactChunks:
    """One user's facts as pieces of prompt: which chunk each one is, given those around it.

    `head` are the tokens that facts are encoded behind; `room_tokens` bounds an encoding prompt. With `keep_stale`,
    what was encoded behind a fact's old text is kept, and made anew with the next rebuild.
    """

    def __init__(
        self,
        owner: str,
        model_digest: str,
        head: Sequence[int],
        *,
        window_facts: int,
        room_tokens: int,
        keep_stale: bool = False,
    ) -> None:
        self._owner = owner
        self._digest = model_digest
        self._head = tuple(head)
        self._window_facts = window_facts
        self._room = room_tokens
        self._layouts: dict[_Layout, tuple[ChunkId, ...]] = {}  # ids of the lines behind the window
        self._pieces: dict[FactId, Piece] = {}
        self._keep_stale = keep_stale
        self._stale = StaleChunks()
        self._salt = ""

    def update(self, lines: Sequence[Line]) -> set[ChunkId]:
        """The facts are these now, in the order of telling. Returns the ids that no longer stand for any of them."""
        before, known, layouts = self.standing(), self._pieces, self._layouts
        self._layouts = {layout: layouts.get(layout) or self._ids(layout) for layout in self._lay_out(lines)}
        self._pieces = {
            line.fact: Piece(line.token_ids, id_)
            for layout, ids in self._layouts.items()
            for line, id_ in zip(layout.lines[layout.window :], ids, strict=True)
        }
        if self._keep_stale:
            gone = {layout: ids for layout, ids in layouts.items() if layout not in self._layouts}
            self._stale.follow(_formers(gone), known, self._pieces)
        return before - self.standing()

    def piece(self, fact: FactId) -> Piece:
        """The fact's tokens and the id of its chunk, resident or not. Raises KeyError for a fact not held."""
        return self._pieces[fact]

    def ids(self) -> list[ChunkId]:
        """Every fact's chunk, in the order of telling."""
        return [id_ for ids in self._layouts.values() for id_ in ids]

    def standing(self) -> set[ChunkId]:
        """Every chunk that may be served for a fact, stale ones included."""
        return {piece.chunk for piece in self._pieces.values() if piece.chunk is not None} | self._stale.ids()

    def served(self, fact: FactId, resident: Resident) -> ChunkId | None:
        """The chunk that stands for the fact until its own is resident. Raises KeyError for a fact not held."""
        own = self._pieces[fact].chunk
        return own if own is None or resident(own) else self._stale.chunk(fact) or own

    def serving(self, resident: Resident) -> list[ChunkId]:
        """The chunk that stands for each fact, in the order of telling."""
        return [id_ for fact in self._pieces if (id_ := self.served(fact, resident)) is not None]

    def corrected(self, fact: FactId) -> bool:
        """Whether others may still tell of the fact's old text."""
        return self._stale.corrected(fact)

    def stale_ids(self) -> set[ChunkId]:
        """Chunks that were encoded behind a fact's old text."""
        return self._stale.ids()

    @property
    def stale_facts(self) -> int:
        """How many a rebuild would encode."""
        return len(self._stale.facts())

    @property
    def stale_tokens(self) -> int:
        """Of the facts that a rebuild would encode."""
        return sum(len(self._pieces[fact].token_ids) for fact in self._stale.facts())

    @property
    def tokens(self) -> int:
        """Of all facts."""
        return sum(len(piece.token_ids) for piece in self._pieces.values())

    @property
    def full_tokens(self) -> int:
        """Of the prompts that encode all facts."""
        prompts = (len(self._head) + sum(len(line.token_ids) for line in layout.lines) for layout in self._layouts)
        return sum(tokens for tokens in prompts if tokens <= self._room)

    def renew(self, salt: str = "") -> None:
        """From now on `jobs` names what is stale, too, to be computed as a full build computes it: rounding follows how
        a prompt is cut into steps, so it is cut as if all of it were captured, and with a `salt` that was never used
        nothing is found in the prefix cache."""
        self._stale.renew()
        self._salt = salt

    def settle(self, resident: Resident) -> None:
        """Stale chunks whose successors are resident stand for nothing any more, and those that are not themselves."""
        self._stale.settle(self._pieces, resident)

    def lacks(self, resident: Resident) -> bool:
        """Whether some fact has no chunk, not even a stale one, and should."""
        return any(not resident(id_) and not self._stale.held_back(fact, resident) for fact, id_ in self._chunks())

    def jobs(self, resident: Resident) -> Iterator[EncodeJob]:
        """What to prefill so that every fact has its chunk, the latest told first; a fact that is longer than the room
        even alone has none. What waits for a rebuild is captured where it is prefilled anyway. Ends where the facts
        change meanwhile, so that no deleted one is encoded after all."""
        layouts = self._layouts
        for layout, ids in reversed(layouts.items()):
            if layouts is not self._layouts:
                return
            start = len(self._head) + sum(len(line.token_ids) for line in layout.lines[: layout.window])
            facts: list[CaptureRange] = []
            end = 0
            for line, id_ in zip(layout.lines[layout.window :], ids, strict=True):
                facts.append(CaptureRange(id_, start, len(line.token_ids)))
                start += len(line.token_ids)
                if not resident(id_) and not self._stale.held_back(line.fact, resident):
                    end = start
            facts = [range_ for range_ in facts if range_.start < end]
            captures = tuple(range_ for range_ in facts if not resident(range_.id))
            if not captures or end > self._room:
                continue
            prompt = self._tokens(layout.lines)[:end]
            if not self._stale.facts().isdisjoint(line.fact for line in layout.lines[layout.window :]):
                yield EncodeJob(prompt, captures, 0, tuple(facts), self._salt)
            else:
                # Where earlier facts of this prompt have their chunks, it was prefilled up to here.
                yield EncodeJob(prompt, captures, captures[0].start if resident(ids[0]) else 0)

    def _chunks(self) -> Iterator[tuple[FactId, ChunkId]]:
        return ((fact, piece.chunk) for fact, piece in self._pieces.items() if piece.chunk is not None)

    def _lay_out(self, lines: Sequence[Line]) -> Iterator[_Layout]:
        if self._window_facts == 0:
            yield from (_Layout((line,), 0) for line in lines)
            return
        window: list[Line] = []
        for _, members in groupby(lines, key=lambda line: line.seq // self._window_facts):
            block: list[Line] = []
            for line in members:
                if self._fits([*window, *block, line]):
                    block.append(line)
                    continue
                if block:
                    yield _Layout((*window, *block), len(window))
                window, block = [], [line]  # no room for more context
            yield _Layout((*window, *block), len(window))
            window = block

    def _fits(self, lines: Iterable[Line]) -> bool:
        return len(self._head) + sum(len(line.token_ids) for line in lines) <= self._room

    def _tokens(self, lines: Iterable[Line]) -> tuple[int, ...]:
        return (*self._head, *(token for line in lines for token in line.token_ids))

    def _ids(self, layout: _Layout) -> tuple[ChunkId, ...]:
        prefix = self._tokens(layout.lines[: layout.window])
        ids: list[ChunkId] = []
        for line in layout.lines[layout.window :]:
            ids.append(chunk_id(self._digest, self._owner, prefix, line.token_ids))
            prefix = (*prefix, *line.token_ids)
        return tuple(ids)


def _formers(layouts: dict[_Layout, tuple[ChunkId, ...]]) -> Iterator[Former]:
    for layout, ids in layouts.items():
        for place, id_ in enumerate(ids, start=layout.window):
            line, behind = layout.lines[place], frozenset(other.fact for other in layout.lines[:place])
            yield Former(line.fact, line.token_ids, id_, behind)
