from sharding.directory import PlacementCache
from sharding.ids import Placement, ShardId, UserId


def at(user: str, shard: str = "s", epoch: int = 1) -> Placement:
    return Placement(UserId(user), ShardId(shard), epoch)


def test_a_placement_is_remembered_until_it_is_forgotten() -> None:
    cache = PlacementCache(10)
    cache.put(at("a"))
    assert cache.get(UserId("a")) == at("a")
    cache.forget(UserId("a"))
    cache.forget(UserId("a"))
    assert cache.get(UserId("a")) is None


def test_beyond_its_capacity_the_least_recently_used_is_dropped() -> None:
    cache = PlacementCache(2)
    cache.put(at("a"))
    cache.put(at("b"))
    cache.get(UserId("a"))
    cache.put(at("c"))
    assert [cache.get(UserId(u)) is not None for u in "abc"] == [True, False, True]
    assert len(cache) == 2


def test_a_late_answer_does_not_replace_a_newer_epoch() -> None:
    cache = PlacementCache(2)
    cache.put(at("a", "new", 2))
    cache.put(at("a", "old", 1))
    assert cache.get(UserId("a")) == at("a", "new", 2)


def test_the_users_of_a_dead_shard_are_forgotten_together() -> None:
    cache = PlacementCache(10)
    for user, shard in (("a", "dead"), ("b", "alive"), ("c", "dead")):
        cache.put(at(user, shard))
    cache.forget_shard(ShardId("dead"))
    assert [cache.get(UserId(u)) is not None for u in "abc"] == [False, True, False]
