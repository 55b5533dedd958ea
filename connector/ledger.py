"""Which chunks a shard keeps: ids, bytes, pins. The tensors are the workers'; this decides, they obey.

A chunk's life:  reserve ─► commit ─► (pin ⇄ unpin)* ─► evicted, or forgotten
                    └────► abort

Bytes are counted from the reservation on and never exceed the budget: what does not fit is refused, not squeezed in.
Eviction takes from the users least recently used, no more than it must, and never a pinned chunk: a chunk is pinned
from the plan that names it until its request is over. Forgetting (a fact was deleted) does not wait for pins: a request
that still wanted the chunk prefills the text instead.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from connector.chunk import ChunkId, ChunkRef

SHARED = ""
"""The owner of chunks that belong to nobody: the prompts' heads."""


class ChunkLedger:
    """`token_bytes` is what one token of a chunk takes over all ranks of the engine."""

    def __init__(self, budget_bytes: int, token_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.token_bytes = token_bytes
        self.bytes = 0
        self._owners: OrderedDict[str, dict[ChunkId, int]] = OrderedDict()  # least recently used first; in bytes
        self._owner_of: dict[ChunkId, str] = {}
        self._reserved: set[ChunkId] = set()  # counted, but not there yet
        self._pins: Counter[ChunkId] = Counter()

    def __len__(self) -> int:
        return len(self._owner_of) - len(self._reserved)

    def peek_resident(self, id_: ChunkId) -> bool:
        """Whether the chunk can be injected now."""
        return id_ in self._owner_of and id_ not in self._reserved

    def owners(self) -> int:
        """How many users have chunks here."""
        return sum(owner != SHARED for owner in self._owners)

    def reserve(self, owner: str, refs: Sequence[ChunkRef]) -> list[ChunkId] | None:
        """Makes room for chunks of `owner` that are about to be encoded.

        Returns the evicted ids, which the workers must drop before the chunks arrive; or None where the chunks do not
        fit even so: then nothing has changed. Ids that are here already are passed over.
        """
        new = {id_: tokens * self.token_bytes for id_, tokens in refs if id_ not in self._owner_of}
        needed = self.bytes + sum(new.values()) - self.budget_bytes
        evicted: list[ChunkId] = []
        if needed > 0:
            for id_, size in self._evictable(owner):
                if needed <= 0:
                    break
                evicted.append(id_)
                needed -= size
            if needed > 0:
                return None
            self.forget(evicted)
        for id_, size in new.items():
            self._owners.setdefault(owner, {})[id_] = size
            self._owner_of[id_] = owner
            self._reserved.add(id_)
            self.bytes += size
        self.touch(owner)
        return evicted

    def commit(self, ids: Iterable[ChunkId]) -> list[ChunkId]:
        """Chunks are complete on every worker. Returns those forgotten meanwhile, which the workers must drop."""
        ids = list(ids)
        self._reserved.difference_update(ids)
        return [id_ for id_ in ids if id_ not in self._owner_of]

    def abort(self, ids: Iterable[ChunkId]) -> None:
        """Reserved chunks did not come."""
        self.forget([id_ for id_ in ids if id_ in self._reserved])

    def forget(self, ids: Iterable[ChunkId]) -> list[ChunkId]:
        """Strikes chunks out at once; returns those that were here, which the workers must drop."""
        gone: list[ChunkId] = []
        for id_ in ids:
            owner = self._owner_of.pop(id_, None)
            if owner is None:
                continue
            held = self._owners[owner]
            self.bytes -= held.pop(id_)
            self._reserved.discard(id_)
            if not held:
                del self._owners[owner]
            gone.append(id_)
        return gone

    def ids_of(self, owner: str) -> list[ChunkId]:
        """Everything of one user, reserved chunks included."""
        return list(self._owners.get(owner, ()))

    def touch(self, owner: str) -> None:
        """The user was active."""
        if owner in self._owners:
            self._owners.move_to_end(owner)

    @contextmanager
    def pinned(self, owner: str, ids: Sequence[ChunkId]) -> Iterator[None]:
        """Keeps chunks from eviction for the life of a request."""
        self.touch(owner)
        self._pins.update(ids)
        try:
            yield
        finally:
            self._pins.subtract(ids)
            for id_ in ids:
                if self._pins[id_] <= 0:
                    del self._pins[id_]

    def _evictable(self, but: str) -> Iterator[tuple[ChunkId, int]]:
        for owner, held in self._owners.items():
            if owner in (but, SHARED):
                continue
            for id_, size in held.items():
                if id_ not in self._pins and id_ not in self._reserved:
                    yield id_, size

    def check_integrity(self) -> None:
        """Raises AssertionError where bytes, owners, reservations and pins do not add up."""
        held = {id_: owner for owner, chunks in self._owners.items() for id_ in chunks}
        assert held == self._owner_of, "lookup and owners differ"
        assert self.bytes == sum(sum(chunks.values()) for chunks in self._owners.values()), "bytes do not add up"
        assert self.bytes <= self.budget_bytes, "over budget"
        assert self._reserved <= held.keys(), "a reservation of an unknown chunk"
        assert all(count > 0 for count in self._pins.values()), "a pin was released twice"
        assert all(self._owners.values()), "an owner without chunks"
