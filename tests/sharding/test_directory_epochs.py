"""Whatever gateways and controllers do, in any order and with any stale belief: epochs only grow, one owner each."""

import asyncio
import uuid

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule
from people import ALICE
from real_valkey import Valkey

from sharding.client import connect
from sharding.directory import Directory
from sharding.errors import WrongShard
from sharding.ids import Placement, ShardId
from sharding.keys import KeySpace

shards = st.sampled_from([ShardId("a"), ShardId("b"), ShardId("c")])


class Epochs(RuleBasedStateMachine):
    """The model beside the real directory: `owner` and `epoch` as they should be."""

    url: str
    seen = Bundle("seen")  # every placement that anybody ever saw, mostly stale

    @initialize()
    def start(self) -> None:
        self.runner = asyncio.Runner()
        self.client = connect(self.url)
        self.directory = Directory(self.client, KeySpace(uuid.uuid4().hex, "m"))
        self.owner: ShardId | None = None
        self.epoch = 0

    @property
    def standing(self) -> Placement | None:
        return Placement(ALICE, self.owner, self.epoch) if self.owner else None

    @rule(target=seen, shard=shards, expected=st.none() | seen)
    def claim(self, shard: ShardId, expected: Placement | None) -> Placement:
        if self.standing in (None, expected):
            self.owner, self.epoch = shard, self.epoch + 1
        placement = self.runner.run(self.directory.claim(ALICE, shard, expected))
        assert placement == self.standing
        return placement

    @rule(target=seen, placement=seen, to=shards)
    def switch(self, placement: Placement, to: ShardId):
        switched = Placement(ALICE, to, placement.epoch + 1)
        if self.standing == placement:
            self.owner, self.epoch = to, self.epoch + 1
        try:
            assert self.runner.run(self.directory.switch(placement, to)) == switched
        except WrongShard:
            assert self.standing != switched
            return multiple()
        assert self.standing == switched
        return switched

    @rule(placement=seen)
    def release(self, placement: Placement) -> None:
        self.runner.run(self.directory.release(placement))
        if self.standing == placement:
            self.owner = None

    @invariant()
    def the_directory_says_what_stands(self) -> None:
        assert self.runner.run(self.directory.lookup(ALICE)) == self.standing

    def teardown(self) -> None:
        self.runner.run(self.client.aclose())
        self.runner.close()


def test_epochs_only_grow_and_a_user_has_one_owner(valkey: Valkey) -> None:
    class OnThisServer(Epochs):
        url = valkey.url

    case = OnThisServer.TestCase
    case.settings = settings(
        max_examples=40,
        stateful_step_count=20,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    case("runTest").runTest()
