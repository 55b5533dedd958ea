"""Which chunks a shard keeps in one tier: ids, bytes, pins. The tensors are the workers'; this decides, they obey.

A chunk's life:  reserve ─► commit ─► (pin ⇄ unpin)* ─► evicted, or forgotten
                    └────► abort

Bytes are counted from the reservation on and never exceed the budget: what does not fit is refused, not squeezed in.
Eviction takes from users in the order of a policy (the least recently used first), no more than it must, and never a
pinned chunk: a chunk is pinned from the plan that names it until its request is over, and held while it is copied to
another tier (`tiers.py`). Forgetting (a fact was deleted) does not wait for pins: a request that still wanted the chunk
prefills the text instead.

Heads belong to nobody (`SHARED`) and every prompt starts with one: users never evict them. They have a share of the
budget; within it a head may evict users, beyond it only the heads least recently used.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from connector.chunk import ChunkId, ChunkRef
from connector.eviction import Evicted, EvictionPolicy, LeastRecentlyUsed, Usage

SHARED = ""
"""The owner of chunks that belong to nobody: the prompts' heads."""

EVICTED_REMEMBERED = 1 << 16
"""Chunks of which it is remembered that they were evicted: ids only."""

SHARED_PART = 8
"""One part in so many of the budget is the most that heads take."""


class _Holder(NamedTuple):
    """What is used, and therefore evicted, together: all of a user's chunks, or one head."""

    owner: str
    head: ChunkId | None


@dataclass(slots=True)
class _Held:
    sizes: dict[ChunkId, int] = field(default_factory=dict)  # in bytes, the least recently used first
    bytes: int = 0  # of all of them
    used_at: float = 0.0


class ChunkLedger:
    """`token_bytes` is what one token of a chunk takes over all ranks of the engine, `chunk_bytes` what each chunk
    takes beside its tokens."""

    def __init__(
        self,
        budget_bytes: int,
        token_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        chunk_bytes: int = 0,
        policy: EvictionPolicy | None = None,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.shared_budget_bytes = budget_bytes // SHARED_PART
        self.token_bytes = token_bytes
        self.chunk_bytes = chunk_bytes
        self.bytes = 0
        self._clock = clock
        self._policy = policy or LeastRecentlyUsed()
        self._holders: OrderedDict[_Holder, _Held] = OrderedDict()  # least recently used first
        self._holder_of: dict[ChunkId, _Holder] = {}
        self._reserved: set[ChunkId] = set()  # counted, but not there yet
        self._pins: Counter[ChunkId] = Counter()
        self._evicted: OrderedDict[ChunkId, None] = OrderedDict()  # since then not reserved again; the latest last

    def __len__(self) -> int:
        return len(self._holder_of) - len(self._reserved)

    def __contains__(self, id_: object) -> bool:
        """Whether the chunk is counted: here, or reserved."""
        return id_ in self._holder_of

    def peek_resident(self, id_: ChunkId) -> bool:
        """Whether the chunk can be injected now."""
        return id_ in self._holder_of and id_ not in self._reserved

    def was_evicted(self, id_: ChunkId) -> bool:
        """Whether the chunk is not here because it gave its room to others; of those longest ago it is forgotten."""
        return id_ in self._evicted

    def owner(self, id_: ChunkId) -> str:
        """Whose chunk it is that is here or reserved. Raises KeyError."""
        return self._holder_of[id_].owner

    def tokens(self, id_: ChunkId) -> int:
        """The length of a chunk that is here or reserved. Raises KeyError."""
        return (self._size(id_) - self.chunk_bytes) // self.token_bytes

    def size_of(self, tokens: int) -> int:
        """What a chunk takes here, in bytes."""
        return self.chunk_bytes + tokens * self.token_bytes

    def owner_names(self) -> list[str]:
        """The users who have chunks here, least recently used first."""
        return [holder.owner for holder in self._holders if holder.owner != SHARED]

    def reserve(
        self, owner: str, refs: Sequence[ChunkRef], *, spare_s: float = 0.0, own: bool = False
    ) -> dict[ChunkId, Evicted] | None:
        """Makes room for chunks of `owner` that are about to come; who was active within `spare_s` keeps theirs.

        With `own`, where the others' room is not enough, the owner's other chunks give theirs, the least recently used
        first. Returns the evicted chunks, which must have left before the others arrive; or None where the chunks do
        not fit even so: then nothing has changed. Ids that are here already are passed over.
        """
        new = {id_: self.size_of(tokens) for id_, tokens in refs if id_ not in self._holder_of}
        needed = sum(new.values())
        evicted: list[ChunkId] = []
        if owner == SHARED:
            heads = [holder for holder in self._holders if holder.owner == SHARED and holder.head not in dict(refs)]
            over = needed + self._shared_bytes() - self.shared_budget_bytes
            if not self._choose(over, heads, spare_s, evicted):
                return None
        over = needed + self.bytes - sum(map(self._size, evicted)) - self.budget_bytes
        if not self._choose(over, self._others(owner) if over > 0 else (), spare_s, evicted):
            over = needed + self.bytes - sum(map(self._size, evicted)) - self.budget_bytes
            if not (own and self._choose_own(over, owner, dict(refs), evicted)):
                return None
        leaving = {id_: Evicted(self._holder_of[id_].owner, self.tokens(id_)) for id_ in evicted}
        self.forget(evicted)
        self._evicted.update(dict.fromkeys(evicted))
        while len(self._evicted) > EVICTED_REMEMBERED:
            self._evicted.popitem(last=False)
        for id_, size in new.items():
            self._evicted.pop(id_, None)
            self._put(owner, id_, size)
            self._reserved.add(id_)
        self.touch(owner)
        self._touch(_holder(owner, id_) for id_, _ in refs)
        return leaving

    def commit(self, ids: Iterable[ChunkId]) -> list[ChunkId]:
        """Chunks are complete on every worker. Returns those forgotten meanwhile, which the workers must drop."""
        ids = list(ids)
        self._reserved.difference_update(ids)
        return [id_ for id_ in ids if id_ not in self._holder_of]

    def abort(self, ids: Iterable[ChunkId]) -> None:
        """Reserved chunks did not come."""
        self.forget([id_ for id_ in ids if id_ in self._reserved])

    def forget(self, ids: Iterable[ChunkId]) -> list[ChunkId]:
        """Strikes chunks out at once; returns those that were here, which the workers must drop."""
        gone: list[ChunkId] = []
        for id_ in ids:
            holder = self._holder_of.pop(id_, None)
            if holder is None:
                continue
            held = self._holders[holder]
            size = held.sizes.pop(id_)
            held.bytes -= size
            self.bytes -= size
            self._reserved.discard(id_)
            if not held.sizes:
                del self._holders[holder]
            gone.append(id_)
        return gone

    def evict(self, owner: str) -> dict[ChunkId, Evicted]:
        """Strikes out what an owner has here and no request uses. Returns it: it must leave."""
        leaving = [id_ for id_ in self.ids_of(owner) if id_ not in self._pins and id_ not in self._reserved]
        evicted = {id_: Evicted(owner, self.tokens(id_)) for id_ in leaving}
        self.forget(leaving)
        return evicted

    def adopt(self, owner: str, sizes: Mapping[ChunkId, int]) -> list[ChunkId]:
        """Counts chunks that were found in this tier, by their bytes. Returns those that there is no room for, none
        being evicted for them; they must go."""
        rest: list[ChunkId] = []
        for id_, size in sizes.items():
            if id_ in self._holder_of:
                continue
            if self.bytes + size > self.budget_bytes:
                rest.append(id_)
            else:
                self._put(owner, id_, size)
        self._touch(_holder(owner, id_) for id_ in sizes)
        return rest

    def ids_of(self, owner: str) -> list[ChunkId]:
        """Everything of one owner, reserved chunks included."""
        if owner == SHARED:
            return [holder.head for holder in self._holders if holder.head is not None]
        held = self._holders.get(_Holder(owner, None))
        return list(held.sizes) if held is not None else []

    def idle(self) -> dict[str, tuple[int, float]]:
        """What each user has here, in bytes, and how many seconds ago they were active."""
        now = self._clock()
        users = {holder.owner: held for holder, held in self._holders.items() if holder.owner != SHARED}
        return {owner: (held.bytes, now - held.used_at) for owner, held in users.items()}

    def bytes_used_within(self, seconds: float) -> int:
        """Bytes of the users who were active within the last `seconds`, and of the heads that they used."""
        since = self._clock() - seconds
        recent = itertools.takewhile(lambda held: held.used_at >= since, reversed(self._holders.values()))
        return sum(sum(held.sizes.values()) for held in recent)

    def bytes_of(self, owner: str) -> int:
        """What a user's chunks take, reserved ones included."""
        held = self._holders.get(_Holder(owner, None))
        return held.bytes if held is not None else 0

    def touch(self, owner: str) -> None:
        """The user was active."""
        self._touch([_Holder(owner, None)])

    @contextmanager
    def pinned(self, owner: str, ids: Sequence[ChunkId]) -> Iterator[None]:
        """Keeps chunks from eviction for the life of a request of this user."""
        self.touch(owner)
        here = [(id_, self._holder_of[id_]) for id_ in ids if id_ in self._holder_of]
        self._touch(holder for _, holder in here)
        for id_, holder in here:
            sizes = self._holders[holder].sizes
            sizes[id_] = sizes.pop(id_)
        with self.held(ids):
            yield

    @contextmanager
    def held(self, ids: Sequence[ChunkId]) -> Iterator[None]:
        """As `pinned`, without the user counting as active."""
        self._pins.update(ids)
        try:
            yield
        finally:
            self._pins.subtract(ids)
            for id_ in ids:
                if self._pins[id_] <= 0:
                    del self._pins[id_]

    def _put(self, owner: str, id_: ChunkId, size: int) -> None:
        holder = self._holder_of[id_] = _holder(owner, id_)
        held = self._holders.setdefault(holder, _Held())
        held.sizes[id_] = size
        held.bytes += size
        self.bytes += size

    def _touch(self, holders: Iterable[_Holder]) -> None:
        for holder in holders:
            if holder in self._holders:
                self._holders.move_to_end(holder)
                self._holders[holder].used_at = self._clock()

    def _choose(self, needed_bytes: int, holders: Collection[_Holder], spare_s: float, chosen: list[ChunkId]) -> bool:
        """Adds to `chosen` what to evict of `holders`, in their order; whether that is enough."""
        active_since = self._clock() - spare_s
        for holder in holders:
            if needed_bytes <= 0:
                break
            if self._holders[holder].used_at > active_since:
                continue
            for id_, size in self._holders[holder].sizes.items():
                if needed_bytes > 0 and id_ not in self._pins and id_ not in self._reserved:
                    chosen.append(id_)
                    needed_bytes -= size
        return needed_bytes <= 0

    def _choose_own(self, needed_bytes: int, owner: str, kept: Mapping[ChunkId, int], chosen: list[ChunkId]) -> bool:
        """As `_choose`, among the owner's own chunks but `kept`."""
        for id_, size in self._holders.get(_Holder(owner, None), _Held()).sizes.items():
            if needed_bytes > 0 and id_ not in kept and id_ not in self._pins and id_ not in self._reserved:
                chosen.append(id_)
                needed_bytes -= size
        return needed_bytes <= 0

    def _others(self, owner: str) -> list[_Holder]:
        """The other users as the policy has them give."""
        users = [
            Usage(holder.owner, held.bytes, held.used_at)
            for holder, held in self._holders.items()
            if holder.owner not in (owner, SHARED)
        ]
        return [_Holder(user.owner, None) for user in self._policy.order(users)]

    def _size(self, id_: ChunkId) -> int:
        return self._holders[self._holder_of[id_]].sizes[id_]

    def _shared_bytes(self) -> int:
        return sum(held.bytes for holder, held in self._holders.items() if holder.owner == SHARED)

    def check_integrity(self) -> None:
        """Raises AssertionError where bytes, holders, reservations and pins do not add up."""
        holder_of = {id_: holder for holder, held in self._holders.items() for id_ in held.sizes}
        assert holder_of == self._holder_of, "lookup and holders differ"
        assert all(holder == _holder(holder.owner, id_) for id_, holder in holder_of.items()), "a head in company"
        assert self.bytes == sum(map(self._size, holder_of)), "bytes do not add up"
        assert all(held.bytes == sum(held.sizes.values()) for held in self._holders.values()), "a holder's bytes"
        assert self.bytes <= self.budget_bytes, "over budget"
        assert self._shared_bytes() <= self.shared_budget_bytes, "heads over their share"
        assert self._reserved <= holder_of.keys(), "a reservation of an unknown chunk"
        assert all(count > 0 for count in self._pins.values()), "a pin was released twice"
        assert all(held.sizes for held in self._holders.values()), "a holder without chunks"


def _holder(owner: str, id_: ChunkId) -> _Holder:
    return _Holder(owner, id_ if owner == SHARED else None)
