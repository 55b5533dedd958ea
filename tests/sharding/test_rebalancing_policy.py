from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.ids import ShardId, UserId
from sharding.rebalance import HOUR_S, POWER, Move, Moved, RebalancingPolicy, ShardLoad, UserLoad

BUDGET = 10_000


class Cluster:
    """Shards that are the sum of their users."""

    def __init__(self, shards: list[list[tuple[int, int]]], in_flight: list[int] | None = None) -> None:
        names = [ShardId(f"s{n}") for n in range(len(shards))]
        self.users = {
            name: [UserLoad(UserId(f"{name}-{i}"), size, float(load)) for i, (size, load) in enumerate(users)]
            for name, users in zip(names, shards, strict=True)
        }
        self.in_flight = dict(zip(names, in_flight or [0] * len(names), strict=True))

    def shards(self) -> list[ShardLoad]:
        return [
            ShardLoad(name, sum(u.bytes for u in users), BUDGET, sum(u.load for u in users), self.in_flight[name])
            for name, users in self.users.items()
        ]

    def worst(self) -> float:
        """The largest over the mean, of bytes or load."""
        ratios = []
        for values in ([s.bytes for s in self.shards()], [s.load for s in self.shards()]):
            mean = sum(values) / len(values)
            ratios.append(max(values) / mean if mean else 0.0)
        return max(ratios)

    def powers(self) -> float:
        mean_bytes = sum(s.bytes for s in self.shards()) / len(self.users) or 1
        mean_load = sum(s.load for s in self.shards()) / len(self.users) or 1.0
        return sum((s.bytes / mean_bytes) ** POWER + (s.load / mean_load) ** POWER for s in self.shards())

    def apply(self, move: Move) -> None:
        user = next(u for u in self.users[move.source] if u.user == move.user)
        self.users[move.source].remove(user)
        self.users[move.target].append(user)


some_users = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 10)), max_size=12)
clusters = st.lists(some_users, min_size=1, max_size=6).map(Cluster)
policy = RebalancingPolicy(rest_s=0.0)


def test_a_shard_far_above_the_mean_sheds_users_to_the_emptiest() -> None:
    cluster = Cluster([[(100, 1)] * 8, [(100, 1)] * 4, []])
    moves = policy.plan(cluster.shards(), cluster.users, [], 0.0)
    assert {move.source for move in moves} == {"s0"}
    assert {move.target for move in moves} == {"s2"}
    for move in moves:
        cluster.apply(move)
    assert cluster.worst() <= policy.begin


def test_load_alone_is_reason_to_move_and_the_users_that_make_it_go() -> None:
    cluster = Cluster([[(100, 0)] * 3 + [(1, 50)] * 2, [(100, 0)] * 3])
    (move,) = policy.plan(cluster.shards(), cluster.users, [], 0.0)
    assert (move.bytes, move.load) == (1, 50.0)


@given(clusters)
def test_within_the_hysteresis_nothing_moves_and_nobody_is_asked(cluster: Cluster) -> None:
    if cluster.worst() <= policy.begin:
        assert policy.overloaded(cluster.shards()) == []
        assert policy.plan(cluster.shards(), cluster.users, [], 0.0) == []


@given(clusters, st.data())
def test_targets_are_ready_cold_and_not_full_and_users_belong_to_their_source(cluster: Cluster, data) -> None:
    names = list(cluster.users)
    cluster.in_flight = {name: data.draw(st.integers(0, 20)) for name in names}
    ready = {name: data.draw(st.booleans()) for name in names}
    shards = [replace(shard, ready=ready[shard.shard]) for shard in cluster.shards()]
    moves = policy.plan(shards, cluster.users, [], 0.0)
    for move in moves:
        assert move.user in {user.user for user in cluster.users[move.source]}
        cluster.apply(move)
    least = min((cluster.in_flight[name] for name in names if ready[name]), default=0)
    for name in {move.target for move in moves}:
        assert ready[name]
        assert cluster.in_flight[name] - least <= policy.max_gap_requests
        assert sum(user.bytes for user in cluster.users[name]) <= policy.full * BUDGET
    assert len({move.user for move in moves}) == len(moves)


@given(clusters)
def test_planning_again_and_again_comes_to_an_end_and_each_round_is_better(cluster: Cluster) -> None:
    for _ in range(200):
        before = cluster.powers()
        moves = policy.plan(cluster.shards(), cluster.users, [], 0.0)
        if not moves:
            break
        for move in moves:
            cluster.apply(move)
        assert cluster.powers() < before
    else:
        raise AssertionError("it never ends")


@settings(max_examples=15)
@given(st.integers(2, 5), st.integers(0, 2**32))
def test_many_small_users_end_within_the_hysteresis(count: int, seed: int) -> None:
    """Each is at most 4 % of a mean shard: finer grains than the hysteresis."""
    generated = [(1 + (seed >> i % 32) % 5, 1 + (seed >> i % 31) % 3) for i in range(200)]
    cluster = Cluster([generated * 2, *([[]] * (count - 1))])
    while moves := policy.plan(cluster.shards(), cluster.users, [], 0.0):
        for move in moves:
            cluster.apply(move)
    assert cluster.worst() <= policy.begin


@given(clusters, st.integers(0, 20), st.floats(0, 4 * HOUR_S))
def test_moves_an_hour_are_bounded_by_what_moved_before(cluster: Cluster, limit: int, gap_s: float) -> None:
    bounded = RebalancingPolicy(max_moves_per_hour=limit, max_moves_at_once=3, rest_s=0.0)
    past: list[Moved] = []
    by_hour: defaultdict[float, int] = defaultdict(int)
    now = 0.0
    for _ in range(10):
        moves = bounded.plan(cluster.shards(), cluster.users, past, now)
        assert len(moves) <= 3
        for move in moves:
            cluster.apply(move)
            past.append(Moved(move.user, now))
        by_hour[now] = sum(now - moved.at_s < HOUR_S for moved in past)
        now += gap_s
    assert max(by_hour.values()) <= limit


def test_a_user_who_just_moved_rests() -> None:
    cluster = Cluster([[(100, 1)] * 4, []])
    resting = RebalancingPolicy(rest_s=600)
    past = [Moved(user.user, 100.0) for user in cluster.users[ShardId("s0")]]
    assert resting.plan(cluster.shards(), cluster.users, past, 699.0) == []
    assert resting.plan(cluster.shards(), cluster.users, past, 700.0)


@given(clusters, st.randoms(use_true_random=False))
def test_the_plan_does_not_depend_on_the_order_of_the_reports(cluster: Cluster, random) -> None:
    expected = policy.plan(cluster.shards(), cluster.users, [], 0.0)
    shuffled = cluster.shards()
    random.shuffle(shuffled)
    for users in cluster.users.values():
        random.shuffle(users)
    assert policy.plan(shuffled, cluster.users, [], 0.0) == expected
