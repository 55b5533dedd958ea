import pytest

from sharding.lease import Lease


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lease(clock: Clock) -> Lease:
    return Lease(ttl_s=10, grace_s=30, clock=clock)


def test_there_is_no_lease_before_the_first_heartbeat(lease: Lease) -> None:
    assert not lease.valid()
    assert not lease.in_grace()


def test_a_lease_counts_from_when_the_heartbeat_was_sent(lease: Lease, clock: Clock) -> None:
    clock.now = 104
    lease.acknowledged(sent_at=100)
    clock.now = 109.9
    assert lease.valid()
    clock.now = 110
    assert not lease.valid()


def test_grace_ends_a_stated_time_after_the_lease(lease: Lease, clock: Clock) -> None:
    lease.acknowledged(100)
    clock.now = 139.9
    assert lease.in_grace()
    clock.now = 140
    assert not lease.in_grace()


def test_renewed_in_time_it_is_the_same_term_and_after_a_gap_a_new_one(lease: Lease, clock: Clock) -> None:
    lease.acknowledged(100)
    clock.now = 109
    lease.acknowledged(108)
    assert lease.term == 1
    clock.now = 119
    lease.acknowledged(117.9)  # sent in time, but nobody knows that Redis had it in time
    assert lease.term == 2


def test_an_answer_out_of_order_does_not_shorten_the_lease(lease: Lease, clock: Clock) -> None:
    lease.acknowledged(105)
    lease.acknowledged(100)
    clock.now = 112
    assert lease.valid()


def test_a_redis_with_another_history_begins_a_new_term_and_an_unknown_one_does_not(lease: Lease) -> None:
    first, second = frozenset({"a", "b"}), frozenset({"a", "c"})
    lease.acknowledged(100, first)
    lease.acknowledged(101, first)
    lease.acknowledged(102, None)
    assert lease.term == 1
    lease.acknowledged(103, second)
    assert lease.term == 2
    lease.acknowledged(104, second)
    assert lease.term == 2
