"""The pinned router: a request goes to the replica that its caller names, or fails at once.

The gateway knows from the directory which shard owns a user, and pins every call with
`handle.options(session_id=<ShardId>)`. This router, which Serve runs inside the calling process, decides nothing:

- the named replica is known              -> that replica, without a queue in front of it and without a probe
- it refused (its `max_ongoing_requests`) -> `Busy`; admission proper is the shard's own
- its actor is dead                       -> `ShardGone` with `certain=True`, so that its users can be claimed at once
- it lives, but is off Serve's list       -> that replica, and it is told so: Serve is about to stop it, answers what it
                                             was asked before, and its users are the replica's to hand over
- not known                               -> wait `grace_s` for Serve's next update, then `ShardGone`, not certain
- the name `ANY`                          -> the first replica that there is, however long that takes: Serve starts one
                                             where there is none, as for any call that waits
- no name                                 -> refused; balancing would break "one owner"

Serve's own machinery (`choose_replicas` in a bounded set of routing tasks) is bypassed by overriding the private
`_choose_replica_for_request`, as Ray's capacity queue router does: routing tasks are capped, so that one full
shard would delay every other, and an exception in `choose_replicas` leaves its request hanging (ray#64326).
`tests/deployments/test_router_contract.py` pins what this rests on. Next step: `shard_client.py`, the only caller.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError
from ray.serve._private.common import ReplicaID
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from sharding.errors import Busy, MemshardError, ShardGone
from sharding.ids import ShardId

ANY = ShardId("*")
"""Stands for no shard in particular, in a call that is about no user."""

TOLD_TO_LEAVE = frozenset({"chat", "ask"})
"""Methods that take `leaving`."""

DEFAULT_GRACE_S = 0.5
PROBE_PAUSE_S = 0.05
DEPARTED_KEPT = 64


class PinnedRouter(RequestRouter):  # type: ignore[misc]  # ray ships no types
    """Obeys `session_id`. Option (`request_router_kwargs`): `grace_s`, seconds to wait for an unknown replica."""

    _grace_s = DEFAULT_GRACE_S

    def initialize_state(self, grace_s: float = DEFAULT_GRACE_S) -> None:
        """Called once by Serve with `request_router_kwargs`."""
        self._grace_s = grace_s
        self._departed: dict[ReplicaID, RunningReplica] = {}  # once on Serve's list, now off it
        self._dead: set[ReplicaID] = set()  # for ever: a replica that Serve starts anew has a new id

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve's list of the running replicas changed."""
        self._departed |= self.curr_replicas
        super().update_replicas(replicas)
        departed = [(id, replica) for id, replica in self._departed.items() if id not in self.curr_replicas]
        self._departed = dict(departed[-DEPARTED_KEPT:])

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A call to this replica found its actor dead, perhaps before Serve's controller did."""
        self._dead.add(replica_id)
        self._departed.pop(replica_id, None)
        super().on_replica_actor_died(replica_id)

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """The pinned replica. Raises ShardGone, Busy, or MemshardError for a call without a pin.

        `is_retry` means that the replica refused, died or could not be reached when the request was sent.
        """
        shard = ShardId(pending_request.metadata.session_id)
        if not shard:
            raise MemshardError("A call to a shard must name it: use handle.options(session_id=<ShardId>).")
        if shard == ANY:
            return await self._first()
        replica_id = ReplicaID(unique_id=shard, deployment_id=self._deployment_id)
        replica = self.curr_replicas.get(replica_id)
        if replica is not None and not is_retry:
            return replica
        # A refusal leaves the length of the replica's queue in the cache, a failure to reach it erases that.
        if replica is not None and self.replica_queue_len_cache.get(replica_id) is not None:
            raise Busy(f"Shard {shard} takes no more requests at the moment.", shard=shard)
        if await self._is_dead(replica_id):
            raise ShardGone(f"Shard {shard} died.", shard=shard, certain=True)
        if replica is None and not is_retry and (leaving := self._departed.get(replica_id)):
            if pending_request.metadata.call_method in TOLD_TO_LEAVE:
                pending_request.kwargs["leaving"] = True
            return leaving
        if replica is None and (arrived := await self._wait_for(replica_id)):
            return arrived
        raise ShardGone(f"Shard {shard} cannot be reached.", shard=shard, certain=False)

    async def _is_dead(self, replica_id: ReplicaID) -> bool:
        """Whether Ray says that the replica's actor is dead; asks it, where the replica was ever known."""
        suspect = self.curr_replicas.get(replica_id) or self._departed.get(replica_id)
        if suspect is not None and replica_id not in self._dead:
            with contextlib.suppress(TimeoutError, RayError):
                try:
                    async with asyncio.timeout(self._grace_s):
                        await self._probe(suspect)
                except ActorDiedError:
                    self.on_replica_actor_died(replica_id)
        return replica_id in self._dead

    async def _probe(self, suspect: RunningReplica) -> None:
        """Return once the replica answers; raises ActorDiedError. For a while after its end it is "unavailable"."""
        while True:
            try:
                await suspect.get_queue_len(deadline_s=self._grace_s)
                return
            except ActorUnavailableError:
                await asyncio.sleep(PROBE_PAUSE_S)

    async def _first(self) -> RunningReplica:
        """Any replica, as soon as there is one; the caller's deadline ends the wait."""
        while not self.curr_replicas:
            self._replicas_updated_event.clear()
            await self._replicas_updated_event.wait()
        return next(iter(self.curr_replicas.values()))

    async def _wait_for(self, replica_id: ReplicaID) -> RunningReplica | None:
        """The replica as soon as it is on Serve's list, or None after the grace."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._grace_s):
                while replica_id not in self.curr_replicas:
                    self._replicas_updated_event.clear()
                    await self._replicas_updated_event.wait()
        return self.curr_replicas.get(replica_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Never reached: see the module's docstring. Abstract in the base class, so it has to exist."""
        raise NotImplementedError("PinnedRouter does not choose: it is told.")

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Nothing to keep: the shard counts its own requests."""
