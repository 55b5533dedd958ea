"""How many shards there should be, on virtual time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.autoscaling import ACTIVE_BYTES, ASKED_LATELY, ENCODE_BACKLOG, REQUESTS, Reports, ShardScaling

UP_S, DOWN_S, TICK_S = 4.0, 60.0, 0.5
MIN, MAX = 1, 8

POLICY = ShardScaling(bytes_a_shard=100, backlog_a_shard=50, requests_a_shard=10, up_s=UP_S, down_s=DOWN_S)


@dataclass
class Said:
    """One sample of a shard's."""

    value: float


@dataclass
class Context:
    """What Serve hands over."""

    raw_metrics: dict[str, dict[Any, list[Said]]] | None
    target_num_replicas: int
    policy_state: dict[str, Any] = field(default_factory=dict)
    current_time: float | None = 0.0


@dataclass
class Cluster:
    """Serve's part: it calls the policy in turns and bounds what it says."""

    shards: int = MIN
    least: int = MIN
    now: float = 1_000.0
    state: dict[str, Any] = field(default_factory=dict)

    def run(self, seconds: float, load: Callable[[float], float]) -> list[int]:
        """The number of shards after each tick; `load(now)` chats are in flight over all of them."""
        history = []
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            reports = {REQUESTS: {n: [Said(999.0), Said(load(self.now) / self.shards)] for n in range(self.shards)}}
            wanted, self.state = POLICY(Context(reports, self.shards, self.state, self.now))
            self.shards = min(MAX, max(self.least, wanted))
            history.append(self.shards)
        return history


def changes(history: Iterable[int]) -> int:
    return sum(one != other for one, other in itertools.pairwise(history))


@pytest.mark.parametrize(
    ("reports", "wanted"),
    [
        ({}, 0),
        ({REQUESTS: {"a": 0.0}, ACTIVE_BYTES: {"a": 0.0}}, 0),
        ({REQUESTS: {"a": 1.0}}, 1),
        ({REQUESTS: {"a": 10.0, "b": 1.0}}, 2),
        ({ACTIVE_BYTES: {"a": 90.0, "b": 250.0}, REQUESTS: {"a": 1.0}}, 4),
        ({ENCODE_BACKLOG: {"a": 101.0}}, 3),
        ({ASKED_LATELY: {"a": 1.0, "b": 1.0}}, 1),
        ({ASKED_LATELY: {"a": 0.0}}, 0),
    ],
)
def test_the_scarcest_need_counts(reports: Reports, wanted: int) -> None:
    assert POLICY.wanted(reports) == wanted


def test_it_grows_at_once_to_what_lasts_and_is_back_in_one_window() -> None:
    cluster = Cluster()
    cluster.run(DOWN_S, lambda _: 0)
    assert cluster.run(UP_S + 2 * TICK_S, lambda _: 35)[-1] == 4
    assert set(cluster.run(10 * DOWN_S, lambda _: 35)) == {4}
    down = cluster.run(DOWN_S + 2 * TICK_S, lambda _: 0)
    assert (down[0], down[-1], changes(down)) == (4, MIN, 1)


def test_a_peak_of_a_moment_starts_nothing() -> None:
    cluster = Cluster()
    cluster.run(DOWN_S, lambda _: 0)
    assert set(cluster.run(UP_S - 2 * TICK_S, lambda _: 70)) == {MIN}
    assert set(cluster.run(DOWN_S, lambda _: 0)) == {MIN}


@given(
    period_s=st.floats(2 * TICK_S, DOWN_S / 2),
    low=st.integers(0, 80),
    high=st.integers(0, 80),
)
def test_it_does_not_flap_on_a_sawtooth(period_s: float, low: int, high: int) -> None:
    low, high = sorted((low, high))
    cluster = Cluster()
    saw = lambda now: low + (high - low) * (now % period_s) / period_s  # noqa: E731
    cluster.run(2 * DOWN_S, saw)
    history = cluster.run(12 * DOWN_S, saw)
    assert history == sorted(history), "it grows in steps to what lasts `up_s`, and never comes down"


@given(loads=st.lists(st.integers(0, 200), min_size=1, max_size=20))
def test_whatever_was_before_one_window_without_load_ends_at_the_minimum(loads: list[int]) -> None:
    cluster = Cluster()
    for load in loads:
        cluster.run(7.0, lambda _, load=load: load)  # type: ignore[misc]
    assert cluster.run(DOWN_S + 2 * TICK_S, lambda _: 0)[-1] == MIN


@given(loads=st.lists(st.integers(0, 200), max_size=200))
def test_it_never_stops_a_shard_that_the_last_window_needed(loads: list[int]) -> None:
    cluster, seen = Cluster(shards=3), []
    for load in loads:
        before = cluster.shards
        seen.append(load)
        cluster.run(TICK_S, lambda _, load=load: load)  # type: ignore[misc]
        window = seen[-round(DOWN_S / TICK_S) :]
        if cluster.shards < before:
            assert cluster.shards >= min(MAX, max(POLICY.wanted({REQUESTS: {"a": load}}) for load in window))


def test_what_it_remembers_stays_small() -> None:
    cluster = Cluster()
    cluster.run(20 * DOWN_S, lambda now: now % 80)
    assert len(cluster.state["wanted"]) <= DOWN_S / TICK_S + 2


def test_a_controller_that_forgot_waits_a_window_before_it_stops_any() -> None:
    cluster = Cluster(shards=5)
    assert set(cluster.run(DOWN_S - TICK_S, lambda _: 0)) == {5}


def test_a_shard_that_was_woken_stays_for_a_window_and_goes_if_nobody_asks() -> None:
    cluster = Cluster(shards=0, least=0)
    assert set(cluster.run(3 * DOWN_S, lambda _: 0)) == {0}
    cluster.shards = 1  # Serve's doing: a call waited
    assert set(cluster.run(DOWN_S - TICK_S, lambda _: 0)) == {1}
    assert cluster.run(3 * TICK_S, lambda _: 0)[-1] == 0
