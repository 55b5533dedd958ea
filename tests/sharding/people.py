"""Who the tests of `sharding` are about."""

from sharding.ids import ShardId, UserId

ALICE = UserId("alice")
BOB = UserId("bob")
HERE = ShardId("shard-here")
ELSEWHERE = ShardId("shard-elsewhere")
