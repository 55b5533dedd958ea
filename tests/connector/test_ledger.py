"""The ledger of chunks: never over budget, pinned chunks stay, forgotten ones go at once, in whatever order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from connector.chunk import ChunkId
from connector.ledger import SHARED, SHARED_PART, ChunkLedger

TOKEN_BYTES = 3
BUDGET = 40 * TOKEN_BYTES
SPARE_S = 5.0
OWNERS = [SHARED, "alice", "bob", "carol"]
LENGTHS = {ChunkId(f"{owner or 'head'}-{n}"): n for owner in OWNERS for n in (1, 2, 4, 9)}
IDS = {owner: [id_ for id_ in LENGTHS if id_.startswith(owner or "head")] for owner in OWNERS}
OWNER = {id_: owner for owner, ids in IDS.items() for id_ in ids}


def used_as(id_: ChunkId) -> str:
    """What is used and evicted together: a user's chunks, each head alone."""
    return id_ if OWNER[id_] == SHARED else OWNER[id_]


owners = st.sampled_from(OWNERS)
ids = st.sampled_from(list(LENGTHS))


class LedgerMachine(RuleBasedStateMachine):
    """Beside the ledger, the sets that a reader of its docstring would keep."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ledger = ChunkLedger(BUDGET, TOKEN_BYTES, clock=lambda: self.now)
        self.reserved: set[ChunkId] = set()
        self.resident: set[ChunkId] = set()
        self.used: dict[str, float] = {}  # when users and heads were used last, the latest last
        self.requests: list[tuple[AbstractContextManager[None], list[ChunkId]]] = []

    def _use(self, owner: str, some: list[ChunkId]) -> None:
        here = self.reserved | self.resident
        heads = [id_ for id_ in some if id_ in IDS[SHARED] and id_ in here]
        for used in [owner, *heads] if here & set(IDS[owner]) and owner != SHARED else heads:
            self.used.pop(used, None)
            self.used[used] = self.now

    def _pinned(self) -> set[ChunkId]:
        return {id_ for _, pins in self.requests for id_ in pins}

    def _size(self, some: set[ChunkId]) -> int:
        return sum(LENGTHS[id_] for id_ in some) * TOKEN_BYTES

    def _evictable(self, owners: list[str], spare_s: float) -> set[ChunkId]:
        idle = {used for used, at in self.used.items() if at <= self.now - spare_s}
        free = self.resident - self._pinned()
        return {id_ for id_ in free if OWNER[id_] in owners and used_as(id_) in idle}

    def _check_order(self, evicted: list[ChunkId], evictable: set[ChunkId], over: int) -> None:
        assert set(evicted) <= evictable
        if evicted:
            assert self._size(set(evicted[:-1])) < over <= self._size(set(evicted)), "evicts no more than it must"
        order = [list(self.used).index(used_as(id_)) for id_ in evicted]
        assert order == sorted(order), "the least recently used go first"
        older = list(self.used)[: max(order, default=0)]
        left_of_older = {id_ for id_ in evictable if used_as(id_) in older}
        assert left_of_older <= set(evicted), "an older user gives all before the next gives any"

    @rule(passed_s=st.floats(0, 2 * SPARE_S))
    def time_passes(self, passed_s: float) -> None:
        self.now += passed_s

    @rule(owner=owners, data=st.data(), spare_s=st.sampled_from([0.0, SPARE_S]))
    def reserve(self, owner: str, data: st.DataObject, spare_s: float) -> None:
        wanted = data.draw(st.lists(st.sampled_from(IDS[owner]), max_size=3))
        here = self.reserved | self.resident
        new = set(wanted) - here
        heads_over = self._size((here & set(IDS[SHARED])) | new) - BUDGET // SHARED_PART if owner == SHARED else 0
        heads = self._evictable([SHARED], spare_s) - set(wanted)
        users = self._evictable([o for o in OWNERS if o not in (owner, SHARED)], spare_s)
        before = (self.ledger.bytes, len(self.ledger))
        leaving = self.ledger.reserve(owner, [(id_, LENGTHS[id_]) for id_ in wanted], spare_s=spare_s)
        evicted = None if leaving is None else list(leaving)
        evicted_heads = [id_ for id_ in evicted or () if id_ in IDS[SHARED]]
        over = self._size(here | new) - self._size(set(evicted_heads)) - BUDGET
        if evicted is None:
            assert heads_over > self._size(heads) or over > self._size(users)
            assert (self.ledger.bytes, len(self.ledger)) == before
            return
        assert leaving == {id_: (OWNER[id_], LENGTHS[id_]) for id_ in evicted}
        self._check_order(evicted_heads, heads, heads_over)
        self._check_order([id_ for id_ in evicted if id_ not in IDS[SHARED]], users, over)
        self.resident -= set(evicted)
        self.reserved |= new
        self._use(owner, wanted)

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
        self._use(owner, [])

    @rule(owner=owners, data=st.data())
    def begin_request(self, owner: str, data: st.DataObject) -> None:
        some = st.sampled_from(IDS[SHARED] + IDS[owner])
        pins = data.draw(st.lists(some, max_size=3))  # repetition is a retry's second plan
        request = self.ledger.pinned(owner, pins)
        request.__enter__()
        self.requests.append((request, pins))
        self._use(owner, pins)

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


LedgerMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=30)
TestLedgerMachine = LedgerMachine.TestCase


@pytest.fixture
def ledger() -> Iterator[ChunkLedger]:
    """Room for ten tokens, full with five of Alice, told first, and five of Bob."""
    ledger = ChunkLedger(10, 1)
    for owner in ("alice", "bob"):
        ids = [ChunkId(f"{owner}-{n}") for n in range(5)]
        assert list(ledger.reserve(owner, [(id_, 1) for id_ in ids])) == []
        assert ledger.commit(ids) == []
    yield ledger
    ledger.check_integrity()


def test_the_user_who_was_active_last_keeps_the_chunks(ledger: ChunkLedger) -> None:
    ledger.touch("alice")
    assert list(ledger.reserve("carol", [(ChunkId("carol-0"), 2)])) == ["bob-0", "bob-1"]


def test_a_request_keeps_its_chunks_from_eviction_until_it_ends(ledger: ChunkLedger) -> None:
    new = [(ChunkId("carol-0"), 6)]
    alice, bob = ledger.ids_of("alice"), ledger.ids_of("bob")
    with ledger.pinned("alice", alice):
        assert ledger.reserve("carol", new) is None
        with ledger.pinned("bob", bob[:1]):
            assert list(ledger.reserve("carol", [(ChunkId("carol-0"), 4)])) == bob[1:]
    assert list(ledger.reserve("carol", [(ChunkId("carol-1"), 1)])) in ([alice[0]], [bob[0]])


def test_a_user_never_evicts_the_own_chunks(ledger: ChunkLedger) -> None:
    with ledger.pinned("bob", ledger.ids_of("bob")):
        assert ledger.reserve("alice", [(ChunkId("alice-9"), 1)]) is None


def test_who_was_active_a_moment_ago_keeps_the_chunks_where_that_is_asked_for() -> None:
    now = 0.0
    ledger = ChunkLedger(4, 1, clock=lambda: now)
    assert list(ledger.reserve("alice", [(ChunkId("alice-0"), 4)])) == []
    ledger.commit(["alice-0"])
    now = 9.0
    assert ledger.reserve("bob", [(ChunkId("bob-0"), 1)], spare_s=10.0) is None
    ledger.touch("alice")
    now = 18.0
    assert ledger.reserve("bob", [(ChunkId("bob-0"), 1)], spare_s=10.0) is None
    now = 19.0
    assert list(ledger.reserve("bob", [(ChunkId("bob-0"), 1)], spare_s=10.0)) == ["alice-0"]


# -- heads ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def crowded() -> Iterator[ChunkLedger]:
    """Room for 32 tokens, four of them for heads; Alice has 28, and three heads one each."""
    ledger = ChunkLedger(32, 1)
    for owner, ids in (("alice", [f"alice-{n}" for n in range(28)]), (SHARED, ["head-0", "head-1", "head-2"])):
        assert list(ledger.reserve(owner, [(ChunkId(id_), 1) for id_ in ids])) == []
        ledger.commit([ChunkId(id_) for id_ in ids])
    yield ledger
    ledger.check_integrity()


def test_a_user_never_evicts_a_head(crowded: ChunkLedger) -> None:
    with crowded.pinned("alice", crowded.ids_of("alice")):
        assert crowded.reserve("bob", [(ChunkId("bob-0"), 2)]) is None


def test_a_head_within_the_heads_share_evicts_users(crowded: ChunkLedger) -> None:
    assert list(crowded.reserve("bob", [(ChunkId("bob-0"), 1)])) == []
    assert list(crowded.reserve(SHARED, [(ChunkId("head-3"), 1)])) == ["alice-0"]


def test_beyond_their_share_heads_evict_the_head_used_longest_ago_and_no_user(crowded: ChunkLedger) -> None:
    with crowded.pinned("alice", [ChunkId("head-0")]):
        pass
    assert list(crowded.reserve(SHARED, [(ChunkId("head-3"), 2)])) == ["head-1"]


def test_a_head_in_use_is_not_evicted(crowded: ChunkLedger) -> None:
    with crowded.pinned("alice", [ChunkId("head-1")]):
        assert crowded.reserve(SHARED, [(ChunkId("head-3"), 4)]) is None
        assert list(crowded.reserve(SHARED, [(ChunkId("head-3"), 3)])) == ["head-0", "head-2"]


def test_a_head_larger_than_the_heads_share_is_refused(crowded: ChunkLedger) -> None:
    assert crowded.reserve(SHARED, [(ChunkId("head-3"), 5)]) is None
    assert len(crowded) == 31


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
    assert list(ledger.reserve("dave", [(ChunkId("dave-0"), 10)])) == []


def test_what_gave_its_room_to_others_is_remembered_as_evicted_until_it_is_encoded_again() -> None:
    ledger = ChunkLedger(2, 1)
    first, second, third = ((ChunkId(name), 1) for name in "abc")
    for ref in (first, second, third):
        ledger.reserve(ref[0], [ref])
        ledger.commit([ref[0]])
    assert [ledger.was_evicted(id_) for id_, _ in (first, second, third)] == [True, False, False]
    ledger.forget([second[0]])
    assert not ledger.was_evicted(second[0]), "its fact was deleted"
    ledger.reserve("a", [first])
    assert not ledger.was_evicted(first[0])


def test_the_audit_notices_bytes_that_do_not_add_up() -> None:
    ledger = ChunkLedger(10, 1)
    ledger.bytes += 1
    with pytest.raises(AssertionError, match="bytes do not add up"):
        ledger.check_integrity()
