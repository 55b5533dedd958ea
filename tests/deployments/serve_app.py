"""A real Serve application, as small as it gets: two tiny shards behind `PinnedRouter`, the gateway in front."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle, serve
from ray.serve.config import HTTPOptions, RequestRouterConfig

from deployments.gateway import GatewayReplica, GatewayStores
from deployments.memory_calls import AddCall, AddedFact
from deployments.messages import ChatCall, ChatDelta, ChatEvent, ChatFinished, ChatStarted, MemoryUse
from deployments.router import PinnedRouter
from deployments.settings import GatewaySettings
from deployments.shard_client import ShardClient
from deployments.telemetry import Carried
from sharding.api_keys import KnowsKeys
from sharding.errors import NotFound
from sharding.ids import Placement, ShardId, UserId
from sharding.limits import CountsMinutes
from sharding.placement import PlacementPolicy, ShardReport
from sharding.registry import OwnerNames

MODEL = "tiny"
MAX_ONGOING = 4


class TinyShard:
    """Answers with its own name. The last message's text says what to do: sleep, fail or return."""

    def __init__(self) -> None:
        self.id = serve.get_replica_context().replica_id.unique_id
        self.ended: list[str] = []  # how each chat and add ended

    async def chat(self, call: ChatCall, along: Carried) -> AsyncGenerator[ChatEvent, None]:
        word = call.messages[-1]["content"]
        use = MemoryUse(call.mode)
        try:
            if word == "sleep at once":
                await asyncio.sleep(60)
            yield ChatStarted(1, use)
            yield ChatDelta(self.id)
            if word == "sleep":
                await asyncio.sleep(60)
            yield ChatFinished("stop", 1, use)
            self.ended.append("finished")
        except BaseException as error:
            self.ended.append(type(error).__name__)
            raise

    async def ask(self, call: AddCall, along: Carried) -> tuple[AddedFact, ...]:
        try:
            for text in call.texts:
                if text == "sleep":
                    await asyncio.sleep(60)
                elif text == "not found":
                    raise NotFound("No such user.", field="user_id")
                elif text == "not found, as a value":
                    return NotFound("No such user.", field="user_id")  # type: ignore[return-value]
                elif text == "bug":
                    raise RuntimeError("a bug")
            return ()
        except BaseException as error:
            self.ended.append(type(error).__name__)
            raise

    async def status(self) -> dict[str, Any]:
        return {"shard": self.id, "pid": os.getpid(), "ended": list(self.ended)}


class FileDirectory:
    """Placements in the gateway's memory; the live shards are a JSON list in a file that the test writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._placements: dict[UserId, Placement] = {}

    async def lookup(self, user: UserId) -> Placement | None:
        return self._placements.get(user)

    async def remembers(self, user: UserId) -> bool:
        return False

    async def claim(self, user: UserId, shard: ShardId, expected: Placement | None) -> Placement:
        self._placements[user] = Placement(user, shard, expected.epoch + 1 if expected else 1)
        return self._placements[user]

    async def shards(self) -> dict[ShardId, ShardReport]:
        ids = [ShardId(id) for id in json.loads(self._path.read_text())]
        blank = {"model": MODEL, "ready": True, "free_bytes": 1, "users": 0, "requests_in_flight": 0}
        return {id: ShardReport(shard=id, **blank) for id in ids}


@dataclass
class Running:
    """The running application."""

    handle: Any
    client: ShardClient
    url: str
    first: ShardId
    second: ShardId


class NoNames(OwnerNames):
    """Nobody asks it."""


class NoKeys(KnowsKeys):
    """Keys are not required."""


class NoLimits(CountsMinutes):
    """Nothing is limited."""


def open_stores(live: Path) -> GatewayStores:
    return GatewayStores(FileDirectory(live), NoNames(), NoKeys(), NoLimits())


def start(port: int, live: Path) -> None:
    """Start Ray, Serve and the application; returns when it is deployed."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not have the tests on their path
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)
    serve.start(proxy_location="HeadOnly", http_options=HTTPOptions(host="127.0.0.1", port=port))
    shards = serve.deployment(TinyShard).options(
        name="Shard",
        num_replicas=2,
        max_ongoing_requests=MAX_ONGOING,
        ray_actor_options={"num_cpus": 0},
        request_router_config=RequestRouterConfig(
            request_router_class=PinnedRouter, request_router_kwargs={"grace_s": 0.3}
        ),
    )
    gateway = serve.deployment(serve.ingress()(GatewayReplica)).options(
        name="Gateway", max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0}
    )
    settings = GatewaySettings(model=MODEL, deadline_s=20.0)
    live.write_text("[]")
    bound = gateway.bind(shards.bind(), partial(open_stores, live), PlacementPolicy(), settings)
    serve.run(bound, name="memshard")


async def connect(port: int) -> Running:
    """Find the shards; the handle is made on this loop, which is where Serve may be told to route."""
    handle = serve.get_deployment_handle("Shard", "memshard")
    found = await handle.broadcast("status").results_async(timeout_s=20)
    first, second = sorted(ShardId(status["shard"]) for status in found)
    return Running(handle, ShardClient(handle), f"http://127.0.0.1:{port}", first, second)


def stop() -> None:
    serve.shutdown()
    ray.shutdown()
