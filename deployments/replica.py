"""The shard as a process: it builds a `Shard` in its own event loop, keeps its heartbeat, and says when it is ill.

vLLM reads its environment when it is imported, so nothing that imports it may be imported before `bind_cores`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from ray import serve

from deployments import autoscaling, exposition, telemetry
from deployments.copies import Others
from deployments.cores import bind_cores, take_slot
from deployments.memory_calls import DrainReport, MemoryCall
from deployments.messages import ChatCall, ChatEvent, ShardStatus
from deployments.settings import ShardSettings
from deployments.shard_client import ShardClient
from deployments.telemetry import Carried, continued
from sharding.client import connect
from sharding.directory import Directory
from sharding.errors import EngineFailed, MemshardError, ShardGone, Unavailable
from sharding.facts import FactStore
from sharding.ids import ShardId, UserId
from sharding.keys import KeySpace
from sharding.lease import Lease
from sharding.move_turns import MoveTurns
from sharding.placement import PlacementPolicy, ShardReport
from sharding.sealing import Seal

if TYPE_CHECKING:
    from deployments.shard import Shard

OpenShard = Callable[[ShardSettings, ShardId, Directory, FactStore, Lease], "Awaitable[Shard]"]
"""What `deployments.shard_start.open_shard` is."""

ALL_STOP_S = 1.0
"""Within such a time, shards that stop together have said that they are not ready."""

FLUSH_S = 5.0
"""How long a shard that stops waits for its chunks' files."""

LEAVE_S = 15.0
"""How long a shard that is about to be stopped moves its users, while it answers what it was asked."""

STILL_CHECKED_S = 1.0
"""A shard that Serve checks later than this after it seemed to stop it is not being stopped: the controller is back."""

log = logging.getLogger(__name__)


class ShardReplica:
    """The class that Serve deploys. Its shard's id is the replica's own unique id.

    Expected errors are returned (by `chat`: yielded) as values: raised, each would write a traceback into the log.
    """

    _running: AsyncExitStack | None = None  # ends what the start began
    _held: socket.socket | None = None
    _ready = True
    _asked_at = -math.inf
    _leaving: asyncio.Task[None] | None = None
    _left_at = 0.0

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: ShardSettings, open_shard: OpenShard | None = None
    ) -> None:
        """Starts the engine, proves the model, and appears in the directory. Raises `StartupError`.

        `open_shard`: what starts the shard, by default the product's own.
        """
        context = serve.get_replica_context()
        self._settings = settings
        self._me = ShardId(context.replica_id.unique_id)
        self._started_at = datetime.now(UTC).isoformat(timespec="seconds")
        telemetry.begin(settings.telemetry, "shard", self._me)
        slot, self._held = take_slot(settings)
        bind_cores(settings, slot)
        async with AsyncExitStack() as undo:
            redis = connect(settings.redis_url)
            undo.push_async_callback(redis.aclose)
            keys = KeySpace(settings.namespace, settings.model, settings.cluster)
            self._directory = Directory(redis, keys)
            self._lease = Lease(settings.heartbeat_ttl_s, settings.redis_grace_s)
            start = open_shard or _product()
            store = FactStore(redis, keys, Seal(settings.encryption_key))
            self._shard = shard = await start(settings, self._me, self._directory, store, self._lease)
            undo.callback(shard.close)
            undo.push_async_callback(shard.flush, FLUSH_S)
            shard.courier.shards = cache(partial(_others, context))
            sweeping = asyncio.create_task(shard.janitor(self._me, self._directory).run())
            undo.callback(sweeping.cancel)
            settle_s = 2 * settings.heartbeat_interval_s
            turns = MoveTurns(redis, keys)
            self._rebalancer = shard.rebalancer(self._me, turns, settle_s=settle_s, active_s=settings.active_s)
            if settings.rebalance:
                balancing = asyncio.create_task(self._rebalancer.run(settings.rebalance_every_s))
                undo.callback(balancing.cancel)
            await self._beat()
            undo.push_async_callback(self._retire)
            self._beating = asyncio.create_task(self._keep_beating())
            undo.callback(self._beating.cancel)
            undo.push_async_callback(self._hand_over)
            self._running = undo.pop_all()

    async def chat(
        self, call: ChatCall, along: Carried | None = None, leaving: bool = False
    ) -> AsyncGenerator[ChatEvent | MemshardError, None]:
        """See `Shard.chat`. `leaving`: Serve has taken this replica off its list."""
        self._asked(leaving)
        continued(along, user=call.asker, epoch=call.placement.epoch if call.placement is not None else None)
        async with aclosing(self._shard.chat(call)) as events:
            try:
                async for event in events:
                    yield event
            except Exception as error:  # noqa: BLE001  # the process' edge
                yield self._told(error)

    async def ask(self, call: MemoryCall[Any], along: Carried | None = None, leaving: bool = False) -> Any:
        """See `Shard.ask`. `leaving`: as for `chat`."""
        self._asked(leaving)
        continued(along, user=call.placement.user, epoch=call.placement.epoch)
        try:
            return await self._shard.ask(call)
        except Exception as error:  # noqa: BLE001  # likewise
            return self._told(error)

    async def leave(self, user: UserId) -> MemshardError | None:
        """See `ResidentUse.leave`."""
        try:
            await self._shard.users.leave(user)
        except MemshardError as error:
            return self._told(error)
        return None

    def _told(self, error: Exception) -> MemshardError:
        """A shard whose engine died is gone. Serve takes seconds to replace its replica; its users need not wait. What
        nobody expected is logged here, by us: raised, Ray would log all that it quotes."""
        if not isinstance(error, MemshardError):
            log.error("A call failed", exc_info=error)
            return EngineFailed("The shard failed to answer this request.")
        if isinstance(error, EngineFailed) and self._shard.engine.dead:
            return ShardGone(error.message, certain=True)
        return error

    async def status(self) -> ShardStatus:
        """What this shard is and does now."""
        shard = self._shard
        memories = shard.table.memories()
        stale_chunks, stale_tokens = shard.rebuilds.stale()
        return ShardStatus(
            shard=self._me,
            model=self._settings.model,
            ready=self._ready,
            started_at=self._started_at,
            users=len(memories),
            facts=sum(len(memory) for memory in memories),
            chunks=len(shard.ledger),
            requests_in_flight=shard.requests_in_flight,
            encode_backlog=shard.encoder.backlog(),
            tiers=shard.tiers.usage(),
            counters={
                **shard.counters,
                "facts_added": shard.writes.facts_added,
                "wrong_shard": shard.users.wrong_shard,
                "moved_users": shard.mover.moved_users,
                **shard.courier.counters,
                **shard.arrivals.counters,
                **self._rebalancer.counters,
                **shard.memory_counts.plain(),
                **shard.tiers.counters,
                **shard.rebuilds.counters,
            },
            canary=shard.canary.verdict,
            active_bytes=shard.ledger.bytes_used_within(self._settings.active_s),
            load_per_s=shard.usage.rates.all(),
            latencies=telemetry.RECENT.summary(),
            stale_chunks=stale_chunks,
            stale_tokens=stale_tokens,
        )

    async def drain(self, deadline_s: float) -> DrainReport | MemshardError:
        """See `Mover.drain`; from now on nobody is placed here. Raises nothing of ours."""
        self._ready = False
        try:
            await self._beat()
            return await self._shard.mover.drain(self._me, PlacementPolicy(), deadline_s)
        except MemshardError as error:
            self._ready = True  # where there is nobody else, it goes on
            return self._told(error)

    async def metrics(self) -> str:
        """What this shard counts and measures, vLLM's own metrics included, in Prometheus' text format."""
        return exposition.of_status(asdict(await self.status())) + exposition.own()

    async def prove(self) -> ShardStatus | MemshardError:
        """Asks the canary again, which takes some seconds; the status with what it found."""
        try:
            await self._shard.canary.prove()
            return await self.status()
        except MemshardError as error:
            return self._told(error)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve every few seconds, where the number of shards follows the load."""
        shard = self._shard
        asked_lately = shard.requests_in_flight > 0 or time.monotonic() - self._asked_at < self._settings.active_s
        return {
            autoscaling.ASKED_LATELY: float(asked_lately),
            autoscaling.ACTIVE_BYTES: shard.ledger.bytes_used_within(self._settings.active_s),
            autoscaling.ENCODE_BACKLOG: shard.encoder.backlog(),
            autoscaling.REQUESTS: shard.requests_in_flight,
        }

    async def check_health(self) -> None:
        """Called by Serve; raising makes it replace this replica. Of one that it stops it asks no more."""
        if self._leaving is not None and time.monotonic() - self._left_at > STILL_CHECKED_S:
            self._leaving.cancel()
            self._leaving, self._ready, self._lease.ended = None, True, False
        if self._shard.engine.dead:
            self._free_cores()
        await self._shard.engine.check_health()
        if self._beating.done():
            raise RuntimeError("the heartbeat has stopped")

    async def __del__(self) -> None:
        """Called by Serve once requests have drained: leave the directory, end the engine."""
        if self._running is not None:  # else the start failed, and has undone itself
            await self._running.aclose()
        self._free_cores()

    def _free_cores(self) -> None:
        """For the replacement, which may start before this process has ended; the engine is gone."""
        if self._held is not None:
            self._held.close()

    def _asked(self, leaving: bool) -> None:
        """Serve ends a replica when all that was asked of it is answered, and kills it when that takes too long. It
        does not tell it so; whoever still asks does. Its users have to go elsewhere, or they keep it until it is
        killed."""
        self._asked_at = time.monotonic()
        if leaving and self._leaving is None:
            self._left_at = self._asked_at
            self._leaving = asyncio.create_task(self._leave())

    async def _leave(self) -> None:
        """Moves users to others, as far as there is time and anybody else; the rest are free to be claimed then."""
        report = await self.drain(LEAVE_S)
        log.info("This shard is being stopped: %s", report)
        self._ready = False
        self._lease.ended = True  # before anybody may claim them: from now on the directory is asked for each call
        with suppress(Unavailable):  # the next heartbeat says it
            await self._beat()

    async def _hand_over(self) -> None:
        """Users go on elsewhere with their chunks. Nothing rests on it: whom there is no time for is claimed with the
        next request, and this machine's files wait for its next shard. Where all shards stop, nobody moves: in a moment
        none of them is ready."""
        if self._leaving is not None:
            await asyncio.wait({self._leaving}, timeout=self._settings.drain_s)
        shard = self._shard
        alone = all(tier.exclusive for tier in shard.tiers.files)
        if shard.engine.dead or (alone and shard.engine.refusal is not None):
            return
        if alone:
            self._ready = False
            with suppress(Unavailable):
                await self._beat()
            await asyncio.sleep(ALL_STOP_S)
        report = await self.drain(self._settings.drain_s)
        if isinstance(report, MemshardError):
            log.info("Nobody was moved away: %s", report)

    async def _retire(self) -> None:
        with suppress(Unavailable):
            await self._directory.retire(self._me)

    async def _keep_beating(self) -> None:
        while not self._shard.engine.dead:
            await asyncio.sleep(self._settings.heartbeat_interval_s)
            try:
                await self._beat()
            except Unavailable as error:
                log.warning("No heartbeat: %s", error)
            else:
                with suppress(Unavailable):  # is told with a later one
                    await self._shard.usage.tell(self._directory)
        self._free_cores()
        await self._retire()

    async def _beat(self) -> None:
        status = await self.status()
        report = ShardReport(
            shard=self._me,
            model=self._settings.model,
            ready=self._ready,
            leaving=self._lease.ended,
            free_bytes=self._shard.ledger.budget_bytes - self._shard.ledger.bytes,
            users=status.users,
            requests_in_flight=status.requests_in_flight,
            status=asdict(status),
        )
        sent_at = time.monotonic()
        await self._directory.heartbeat(report.model_dump_json(), self._me, self._settings.heartbeat_ttl_s)
        histories = None
        with suppress(Unavailable):  # one of several primaries may be away
            histories = await self._directory.histories()
        self._lease.acknowledged(sent_at, histories)


def _others(context: Any) -> Others:
    """How this replica calls the others of its deployment."""
    return ShardClient(serve.get_deployment_handle(context.deployment, context.app_name))


def _product() -> OpenShard:
    from deployments.shard_start import open_shard

    return open_shard
