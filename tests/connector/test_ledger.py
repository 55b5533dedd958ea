"""The ledger of chunks: never over budget, pinned chunks stay, forgotten ones go at once, in whatever order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from connector.chunk import ChunkId
from connector.ledger import SHARED, ChunkLedger

TOKEN_BYTES = 3
BUDGET = 20 * TOKEN_BYTES
OWNERS = [SHARED, "alice", "bob", "carol"]
LENGTHS = {ChunkId(f"{owner or 'head'}-{n}"): n for owner in OWNERS for n in (1, 2, 4, 7)}
IDS = {owner: [id_ for id_ in LENGTHS if id_.startswith(owner or "head")] for owner in OWNERS}

owners = st.sampled_from(OWNERS)
ids = st.sampled_from(list(LENGTHS))


class LedgerMachine(RuleBasedStateMachine):
    """Beside the ledger, the sets that a reader of its docstring would keep."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = ChunkLedger(BUDGET, TOKEN_BYTES)
        self.reserved: set[ChunkId] = set()
        self.resident: set[ChunkId] = set()
        self.used: list[str] = []  # the latest last
        self.requests: list[tuple[AbstractContextManager[None], list[ChunkId]]] = []

    def _use(self, owner: str) -> None:
        self.used = [*(o for o in self.used if o != owner), owner]

    def _pinned(self) -> set[ChunkId]:
        return {id_ for _, pins in self.requests for id_ in pins}

    def _size(self, some: set[ChunkId]) -> int:
        return sum(LENGTHS[id_] for id_ in some) * TOKEN_BYTES

    def _evictable(self, but: str) -> set[ChunkId]:
        safe = {*IDS[but], *IDS[SHARED], *self._pinned(), *self.reserved}
        return self.resident - safe

    @rule(owner=owners, data=st.data())
    def reserve(self, owner: str, data: st.DataObject) -> None:
        wanted = data.draw(st.lists(st.sampled_from(IDS[owner]), max_size=3))
        new = set(wanted) - self.reserved - self.resident
        evictable = self._evictable(owner)
        over = self._size(self.reserved | self.resident | new) - BUDGET
        before = (self.ledger.bytes, len(self.ledger))
        evicted = self.ledger.reserve(owner, [(id_, LENGTHS[id_]) for id_ in wanted])
        assert (evicted is None) == (over > self._size(evictable))
        if evicted is None:
            assert (self.ledger.bytes, len(self.ledger)) == before
            return
        assert set(evicted) <= evictable
        if evicted:
            assert self._size(set(evicted[:-1])) < over <= self._size(set(evicted)), "evicts no more than it must"
        order = [self.used.index(next(o for o in OWNERS if id_ in IDS[o])) for id_ in evicted]
        assert order == sorted(order), "the least recently used go first"
        left_of_older = [id_ for o in self.used[: max(order, default=0)] for id_ in IDS[o] if id_ in evictable]
        assert set(left_of_older) <= set(evicted), "an older user gives all before the next gives any"
        self.resident -= set(evicted)
        self.reserved |= new
        if self.ledger.ids_of(owner):
            self._use(owner)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        some = data.draw(st.sets(ids, max_size=4))
        assert set(self.ledger.commit(some)) == some - self.reserved - self.resident
        self.resident |= some & self.reserved
        self.reserved -= some

    @rule(some=st.sets(ids, max_size=4))
    def abort(self, some: set[ChunkId]) -> None:
        self.ledger.abort(some)
        self.reserved -= some

    @rule(some=st.sets(ids, max_size=2))
    def forget(self, some: set[ChunkId]) -> None:
        assert set(self.ledger.forget(some)) == some & (self.reserved | self.resident), "pins do not hold it up"
        self.resident -= some
        self.reserved -= some

    @rule(owner=owners)
    def touch(self, owner: str) -> None:
        self.ledger.touch(owner)
        if self.ledger.ids_of(owner):
            self._use(owner)

    @rule(owner=owners, data=st.data())
    def begin_request(self, owner: str, data: st.DataObject) -> None:
        pins = data.draw(st.lists(st.sampled_from(IDS[owner]), max_size=3))  # repetition is a retry's second plan
        request = self.ledger.pinned(owner, pins)
        request.__enter__()
        self.requests.append((request, pins))
        if self.ledger.ids_of(owner):
            self._use(owner)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), failed=st.booleans())
    def end_request(self, data: st.DataObject, failed: bool) -> None:
        request, _ = self.requests.pop(data.draw(st.integers(0, len(self.requests) - 1)))
        error = RuntimeError("aborted") if failed else None
        assert not request.__exit__(type(error) if error else None, error, None), "swallows nothing"

    @invariant()
    def it_agrees_with_itself(self) -> None:
        self.ledger.check_integrity()

    @invariant()
    def it_agrees_with_the_model(self) -> None:
        assert self.ledger.bytes == self._size(self.reserved | self.resident) <= BUDGET
        assert {id_ for id_ in LENGTHS if self.ledger.peek_resident(id_)} == self.resident
        assert len(self.ledger) == len(self.resident)
        for owner in OWNERS:
            assert set(self.ledger.ids_of(owner)) == (self.resident | self.reserved) & set(IDS[owner])
        held = [owner for owner in OWNERS if owner != SHARED and self.ledger.ids_of(owner)]
        assert self.ledger.owners() == len(held)


LedgerMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=30)
TestLedgerMachine = LedgerMachine.TestCase


@pytest.fixture
def ledger() -> Iterator[ChunkLedger]:
    """Room for ten tokens, full with five of Alice, told first, and five of Bob."""
    ledger = ChunkLedger(10, 1)
    for owner in ("alice", "bob"):
        ids = [ChunkId(f"{owner}-{n}") for n in range(5)]
        assert ledger.reserve(owner, [(id_, 1) for id_ in ids]) == []
        assert ledger.commit(ids) == []
    yield ledger
    ledger.check_integrity()


def test_the_user_who_was_active_last_keeps_the_chunks(ledger: ChunkLedger) -> None:
    ledger.touch("alice")
    assert ledger.reserve("carol", [(ChunkId("carol-0"), 2)]) == ["bob-0", "bob-1"]


def test_a_request_keeps_its_chunks_from_eviction_until_it_ends(ledger: ChunkLedger) -> None:
    new = [(ChunkId("carol-0"), 6)]
    alice, bob = ledger.ids_of("alice"), ledger.ids_of("bob")
    with ledger.pinned("alice", alice):
        assert ledger.reserve("carol", new) is None
        with ledger.pinned("bob", bob[:1]):
            assert ledger.reserve("carol", [(ChunkId("carol-0"), 4)]) == bob[1:]
    assert ledger.reserve("carol", [(ChunkId("carol-1"), 1)]) in ([alice[0]], [bob[0]])


def test_a_user_never_evicts_the_own_chunks_nor_the_shared_heads(ledger: ChunkLedger) -> None:
    ledger.forget(ledger.ids_of("bob"))
    assert ledger.reserve(SHARED, [(ChunkId("head"), 5)]) == []
    ledger.commit([ChunkId("head")])
    assert ledger.reserve("alice", [(ChunkId("alice-9"), 1)]) is None


def test_a_chunk_forgotten_while_it_was_encoded_is_reported_when_it_comes(ledger: ChunkLedger) -> None:
    ledger.forget(ledger.ids_of("bob"))
    late = ChunkId("bob-9")
    ledger.reserve("bob", [(late, 1)])
    assert ledger.forget([late]) == [late], "the workers may hold a part of it"
    assert ledger.commit([late]) == [late]
    assert not ledger.peek_resident(late)


def test_a_chunk_larger_than_the_budget_is_refused_and_nothing_is_evicted_for_it(ledger: ChunkLedger) -> None:
    assert ledger.reserve("carol", [(ChunkId("carol-0"), 11)]) is None
    assert len(ledger) == 10


def test_a_reservation_counts_before_its_chunk_comes_and_is_not_evicted(ledger: ChunkLedger) -> None:
    assert ledger.reserve("carol", [(ChunkId("carol-0"), 10)]) is not None
    assert ledger.reserve("dave", [(ChunkId("dave-0"), 1)]) is None
    ledger.abort([ChunkId("carol-0")])
    assert ledger.reserve("dave", [(ChunkId("dave-0"), 10)]) == []


def test_the_audit_notices_bytes_that_do_not_add_up() -> None:
    ledger = ChunkLedger(10, 1)
    ledger.bytes += 1
    with pytest.raises(AssertionError, match="bytes do not add up"):
        ledger.check_integrity()
