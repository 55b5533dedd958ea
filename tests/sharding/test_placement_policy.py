import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding.errors import Unavailable
from sharding.ids import ShardId
from sharding.placement import PlacementPolicy, ShardReport


def report(
    shard: str, *, free_bytes: int = 100, users: int = 0, requests_in_flight: int = 0, ready: bool = True
) -> ShardReport:
    return ShardReport(
        shard=ShardId(shard),
        model="m",
        ready=ready,
        free_bytes=free_bytes,
        users=users,
        requests_in_flight=requests_in_flight,
    )


small = st.integers(0, 4)
some_reports = st.lists(
    st.builds(report, st.text("abc", min_size=1), free_bytes=small, users=small, requests_in_flight=small, ready=...),
    unique_by=lambda r: r.shard,
)


def test_the_shard_with_most_free_memory_gets_a_new_user() -> None:
    assert PlacementPolicy().choose([report("a", free_bytes=1), report("b", free_bytes=2)]) == "b"


def test_of_equally_free_shards_the_one_with_fewest_users_is_chosen() -> None:
    assert PlacementPolicy().choose([report("a", users=2), report("b", users=1)]) == "b"


def test_a_little_less_free_memory_counts_as_equal() -> None:
    reports = [report("a", free_bytes=1000, users=9), report("b", free_bytes=960, users=1)]
    assert PlacementPolicy(slack=0.05).choose(reports) == "b"
    assert PlacementPolicy(slack=0.03).choose(reports) == "a"


def test_ties_go_to_the_smallest_id() -> None:
    assert PlacementPolicy().choose([report("b"), report("a")]) == "a"


def test_a_shard_far_busier_than_another_gets_no_new_user() -> None:
    reports = [report("a", free_bytes=9, requests_in_flight=5), report("b", free_bytes=1, requests_in_flight=1)]
    assert PlacementPolicy(max_gap_requests=4).choose(reports) == "a"
    assert PlacementPolicy(max_gap_requests=3).choose(reports) == "b"


def test_the_load_of_a_shard_that_is_not_ready_counts_for_nothing() -> None:
    reports = [report("idle", ready=False), report("busy", requests_in_flight=50)]
    assert PlacementPolicy(max_gap_requests=0).choose(reports) == "busy"


@pytest.mark.parametrize("reports", [[], [report("a", ready=False)]])
def test_without_a_ready_shard_the_answer_is_unavailable_with_a_sentence(reports: list[ShardReport]) -> None:
    with pytest.raises(Unavailable, match="No shard is ready"):
        PlacementPolicy().choose(reports)


@given(some_reports, small, st.randoms(use_true_random=False))
def test_the_choice_is_ready_within_the_gap_and_unbeaten_in_any_order(reports, gap, random) -> None:
    policy = PlacementPolicy(max_gap_requests=gap)
    ready = [r for r in reports if r.ready]
    if not ready:
        with pytest.raises(Unavailable):
            policy.choose(reports)
        return
    chosen = next(r for r in reports if r.shard == policy.choose(reports))
    least = min(r.requests_in_flight for r in ready)
    assert chosen.ready
    assert chosen.requests_in_flight - least <= gap
    rivals = [r for r in ready if r.requests_in_flight - least <= gap]
    assert all((chosen.free_bytes, -chosen.users) >= (r.free_bytes, -r.users) for r in rivals)
    random.shuffle(reports)
    assert policy.choose(reports) == chosen.shard


def test_of_many_new_users_each_shard_gets_its_part_and_a_dead_one_none() -> None:
    choices = PlacementPolicy().choices([report("a", users=3), report("b"), report("c"), report("d", free_bytes=1)])
    taken = [choices.take(gone={ShardId("c")}) for _ in range(7)]
    assert taken == ["b", "b", "b", "a", "b", "a", "b"]


def test_a_choice_among_the_dead_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="No shard is ready"):
        PlacementPolicy().choices([report("a")]).take(gone={ShardId("a")})
