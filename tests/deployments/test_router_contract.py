"""What `PinnedRouter` rests on in Ray and Ray does not promise. If one of these fails, read Ray's router again."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve._private.router import AsyncioRouter
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from deployments.router import PinnedRouter
from sharding.errors import Busy, MemshardError, ShardGone

DEPLOYMENT = DeploymentID(name="Shard", app_name="memshard")


class Replica:
    """As much of a RunningReplica as a router looks at."""

    def __init__(self, unique_id: str) -> None:
        self.replica_id = ReplicaID(unique_id=unique_id, deployment_id=DEPLOYMENT)
        self.died = False
        self.probes = 0  # since it died; Ray needs a moment to know

    async def get_queue_len(self, *, deadline_s: float) -> int:
        if self.died:
            self.probes += 1
            raise ActorDiedError if self.probes > 1 else ActorUnavailableError("not reached", b"x" * 16)
        return 0


@pytest.fixture
async def router() -> PinnedRouter:
    router = PinnedRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
    router.initialize_state(grace_s=0.05)
    return router


def pinned_to(unique_id: str, method: str = "ask") -> PendingRequest:
    metadata = RequestMetadata(request_id="r", internal_request_id="i", session_id=unique_id, call_method=method)
    return PendingRequest(args=[], kwargs={}, metadata=metadata)


def test_this_is_the_version_that_was_read() -> None:
    assert ray.__version__ == "2.60.0"


def test_the_private_method_has_the_signature_that_is_overridden() -> None:
    theirs = inspect.signature(RequestRouter._choose_replica_for_request)
    ours = inspect.signature(PinnedRouter._choose_replica_for_request)
    assert list(theirs.parameters) == list(ours.parameters) == ["self", "pending_request", "is_retry"]
    assert theirs.parameters["is_retry"].kind is inspect.Parameter.KEYWORD_ONLY
    assert inspect.iscoroutinefunction(RequestRouter._choose_replica_for_request)


def test_it_is_called_by_the_path_that_sends_requests_and_nothing_there_swallows_its_errors() -> None:
    source = inspect.getsource(AsyncioRouter._route_and_send_request_once)
    assert "_choose_replica_for_request(\n                    pr, is_retry=is_retry\n" in source
    assert "except Exception" not in source


def test_the_names_it_uses_exist(router: PinnedRouter) -> None:
    assert {field.name for field in dataclasses.fields(ReplicaID)} == {"unique_id", "deployment_id"}
    assert "session_id" in {field.name for field in dataclasses.fields(RequestMetadata)}
    assert isinstance(router._replicas_updated_event, asyncio.Event)
    assert router._deployment_id == DEPLOYMENT
    assert list(inspect.signature(RunningReplica.get_queue_len).parameters) == ["self", "deadline_s"]


async def test_a_known_replica_is_returned_however_busy(router: PinnedRouter) -> None:
    router.update_replicas([Replica("a"), Replica("b")])
    router.replica_queue_len_cache.update(Replica("b").replica_id, 10**6)
    chosen = await router._choose_replica_for_request(pinned_to("b"))
    assert chosen.replica_id.unique_id == "b"


async def test_a_replica_that_appears_within_the_grace_is_waited_for(router: PinnedRouter) -> None:
    waiting = asyncio.ensure_future(router._choose_replica_for_request(pinned_to("a")))
    await asyncio.sleep(0.01)
    router.update_replicas([Replica("b")])
    await asyncio.sleep(0.01)
    router.update_replicas([Replica("a"), Replica("b")])
    assert (await waiting).replica_id.unique_id == "a"


async def test_an_unknown_replica_is_gone_but_not_for_certain(router: PinnedRouter) -> None:
    router.update_replicas([Replica("a")])
    with pytest.raises(ShardGone) as gone:
        await router._choose_replica_for_request(pinned_to("never"))
    assert gone.value.details["certain"] is False


@pytest.mark.parametrize("how", ["off Serve's list", "on Serve's list", "found by a call"])
async def test_a_dead_replica_is_gone_for_certain_and_without_a_wait(router: PinnedRouter, how: str) -> None:
    replica = Replica("a")
    router.update_replicas([replica, Replica("b")])
    await asyncio.sleep(0)
    replica.died = True
    router.on_replica_actor_unavailable(replica.replica_id)
    if how == "off Serve's list":
        router.update_replicas([Replica("b")])
    elif how == "found by a call":
        router.on_replica_actor_died(replica.replica_id)
    router._grace_s = 60
    for _ in range(2):
        with pytest.raises(ShardGone) as gone:
            await asyncio.wait_for(router._choose_replica_for_request(pinned_to("a"), is_retry=True), timeout=1)
        assert gone.value.details["certain"] is True


@pytest.mark.parametrize("method", ["chat", "ask", "status"])
async def test_a_replica_that_serve_stops_is_still_asked_and_told(router: PinnedRouter, method: str) -> None:
    replica = Replica("a")
    router.update_replicas([replica])
    router.update_replicas([])
    call = pinned_to("a", method)
    assert await router._choose_replica_for_request(call) is replica
    assert call.kwargs == ({} if method == "status" else {"leaving": True})
    with pytest.raises(ShardGone) as gone:  # it takes no more
        await router._choose_replica_for_request(call, is_retry=True)
    assert gone.value.details["certain"] is False
    router.update_replicas([replica])
    again = pinned_to("a", method)
    assert await router._choose_replica_for_request(again) is replica
    assert again.kwargs == {}


async def test_any_replica_is_waited_for_as_long_as_there_is_none(router: PinnedRouter) -> None:
    waiting = asyncio.ensure_future(router._choose_replica_for_request(pinned_to("*")))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    router.update_replicas([Replica("a")])
    assert (await waiting).replica_id.unique_id == "a"


def test_a_call_that_waits_for_a_replica_counts_as_queued_and_wakes_serve() -> None:
    source = inspect.getsource(AsyncioRouter._route_and_send_request_once)
    counted = source.index("wrap_queued_request(is_retry, num_curr_replicas)")
    assert counted < source.index("_choose_replica_for_request(") < source.index("try_send_request(pr")


async def test_a_replica_that_refused_is_busy_and_one_that_was_not_reached_is_gone(router: PinnedRouter) -> None:
    replica: Any = Replica("a")
    router.update_replicas([replica])
    router.on_new_queue_len_info(replica.replica_id, 7)
    with pytest.raises(Busy):
        await router._choose_replica_for_request(pinned_to("a"), is_retry=True)
    router.on_replica_actor_unavailable(replica.replica_id)  # which stays alive
    with pytest.raises(ShardGone):
        await router._choose_replica_for_request(pinned_to("a"), is_retry=True)


async def test_a_call_that_names_no_replica_is_refused(router: PinnedRouter) -> None:
    router.update_replicas([Replica("a")])
    with pytest.raises(MemshardError, match="session_id"):
        await router._choose_replica_for_request(pinned_to(""))
