from hypothesis import example, given
from hypothesis import strategies as st
from redis.crc import key_slot

from sharding.ids import ShardId, UserId
from sharding.keys import KeySpace

KEYS = KeySpace("memshard", "org/model")
any_text = st.text(st.characters(), min_size=1, max_size=256)


def keys_of(user: str, keys: KeySpace = KEYS) -> list[str]:
    id = UserId(user)
    return [
        *(keys.placement(id), keys.facts(id), keys.order(id)),
        *(keys.hashes(id), keys.embeddings(id), keys.seq(id)),
    ]


@given(any_text)
@example("}{")
@example("{}")
@example("a}:facts")
@example("\ud800")
@example("用户 🙂\n\0")
def test_all_keys_of_a_user_lie_in_one_slot(user: str) -> None:
    assert len({key_slot(key.encode()) for key in keys_of(user)}) == 1
    assert all(key.isascii() and key.isprintable() for key in keys_of(user))


@given(any_text, any_text)
def test_users_never_share_a_key(one: str, other: str) -> None:
    assert one == other or not set(keys_of(one)) & set(keys_of(other))


@given(any_text)
@example("shards:org%2Fmodel")
def test_no_user_reaches_the_keys_of_the_shards(user: str) -> None:
    assert not {KEYS.shards(), KEYS.shard(ShardId(user))} & set(keys_of(user))


def test_only_the_placement_depends_on_the_model() -> None:
    mine, theirs = keys_of("alice"), keys_of("alice", KeySpace("memshard", "other"))
    assert mine[0] != theirs[0]
    assert mine[1:] == theirs[1:]


def test_a_namespace_with_braces_does_not_take_the_hash_tag() -> None:
    keys = KeySpace("{team}", "m")
    assert len({key_slot(keys.facts(UserId(user)).encode()) for user in "abcdef"}) > 1


def test_the_keys_of_the_shards_lie_in_one_slot() -> None:
    slots = {key_slot(key.encode()) for key in (KEYS.shards(), KEYS.shard(ShardId("a")), KEYS.shard(ShardId("}b{")))}
    assert len(slots) == 1


def test_clusters_of_one_installation_share_users_and_not_shards() -> None:
    blue, green = KeySpace("memshard", "m", "blue"), KeySpace("memshard", "m", "green")
    assert keys_of("alice", blue) == keys_of("alice", green)
    assert len({KeySpace("memshard", "m").shards(), blue.shards(), green.shards()}) == 3
