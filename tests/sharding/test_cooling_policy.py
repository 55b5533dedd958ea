"""Cold users leave a full shard for one with room, the coldest first, and nobody is moved back and forth."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from sharding.cooling import CoolingPolicy, IdleUser, ShardMemory
from sharding.ids import ShardId, UserId
from sharding.rebalance import Moved

POLICY = CoolingPolicy()
FULL, ROOMY, BUSY = ShardId("full"), ShardId("roomy"), ShardId("busy")


def full(held: int = 1000) -> ShardMemory:
    return ShardMemory(FULL, held, 1000)


def users(*idle_s: float, size: int = 50) -> list[IdleUser]:
    return [IdleUser(UserId(f"u{n}"), size, idle) for n, idle in enumerate(idle_s)]


def test_the_coldest_go_to_where_most_is_free_until_there_is_room_again() -> None:
    others = [ShardMemory(ROOMY, 100, 1000), ShardMemory(BUSY, 300, 1000)]
    moves = POLICY.plan(full(), others, users(400, 10, 900, 500, 600, 700), [], 0.0)
    assert [move.user for move in moves] == ["u2", "u5", "u4"]  # 1000 - 3 * 50 = 850
    assert {(move.source, move.target) for move in moves} == {(FULL, ROOMY)}


def test_who_was_active_lately_or_moved_lately_stays() -> None:
    others = [ShardMemory(ROOMY, 0, 1000)]
    past = [Moved(UserId("u1"), 0.0)]
    moves = POLICY.plan(full(), others, users(POLICY.cold_s - 1, 999, 500), past, POLICY.rest_s - 1)
    assert [move.user for move in moves] == ["u2"]


def test_a_shard_that_is_not_full_sends_nobody() -> None:
    held = full(int(1000 * POLICY.begin))
    assert not POLICY.is_full(held)
    assert POLICY.plan(held, [ShardMemory(ROOMY, 0, 1000)], users(999), [], 0.0) == []


def test_nobody_goes_where_there_is_no_room_or_to_who_is_not_ready() -> None:
    others = [ShardMemory(ROOMY, 0, 1000, ready=False), ShardMemory(BUSY, int(1000 * POLICY.room) - 49, 1000), full()]
    assert POLICY.plan(full(), others, users(999), [], 0.0) == []


def test_no_more_move_than_may_in_an_hour() -> None:
    past = [Moved(UserId(f"past{n}"), 0.0) for n in range(POLICY.max_moves_per_hour - 1)]
    others = [ShardMemory(ROOMY, 0, 10_000)]
    assert len(POLICY.plan(full(), others, users(999, 998, 997), past, 3599.0)) == 1
    assert len(POLICY.plan(full(), others, users(999, 998, 997), past, 3600.0)) == 3


@given(
    st.lists(st.tuples(st.integers(0, 400), st.floats(0, 2000)), max_size=30),
    st.lists(st.integers(0, 1000), max_size=5),
)
def test_no_target_is_filled_beyond_its_room_and_no_user_moves_twice(
    told: list[tuple[int, float]], held: list[int]
) -> None:
    people = [IdleUser(UserId(f"u{n}"), size, idle) for n, (size, idle) in enumerate(told)]
    others = [ShardMemory(ShardId(f"s{n}"), size, 1000) for n, size in enumerate(held)]
    moves = POLICY.plan(full(), others, people, [], 0.0)
    taken: defaultdict[str, int] = defaultdict(int, {other.shard: other.bytes for other in others})
    for move in moves:
        taken[move.target] += move.bytes
        assert taken[move.target] <= POLICY.room * 1000
    assert len({move.user for move in moves}) == len(moves) <= POLICY.max_moves_at_once
    assert all(user.idle_s >= POLICY.cold_s for user in people if user.user in {move.user for move in moves})
