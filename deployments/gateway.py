"""The gateway: HTTP on one side, the owners' shards on the other. Stateless but for what it caches.

`create_app` builds the FastAPI application around a `Gateway`, for Serve, uvicorn and tests alike. `GatewayReplica`
is the class to deploy, plain as it is:

    serve.deployment(serve.ingress()(GatewayReplica)).bind(shards_handle, open_directory, policy, settings)

Serve builds it inside the replica, on the event loop that serves requests, and then calls
`__serve_build_asgi_app__`. The shard deployment must use `router.PinnedRouter`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from deployments import telemetry
from deployments.access import Access
from deployments.admin_api import admin_routes
from deployments.api_docs import ERRORS, install_openapi
from deployments.chat_api import chat_routes
from deployments.health_api import health_routes
from deployments.http_edge import RequestEdge
from deployments.http_errors import install_error_handlers
from deployments.limits import Limits
from deployments.mem0_bodies import (
    AddRequest,
    BatchRequest,
    FeedbackRequest,
    ListRequest,
    SearchRequest,
    UpdateRequest,
)
from deployments.mem0_oss_api import oss_routes
from deployments.mem0_platform_api import platform_routes
from deployments.memories import Memories
from deployments.memories_api import memory_routes
from deployments.metering import Meter
from deployments.metrics_api import Metrics, SharedPages, metrics_routes
from deployments.openai_api import ChatRequest
from deployments.owner_calls import OwnerCalls
from deployments.owners import Owners, PlacementDirectory, Policy
from deployments.settings import GatewaySettings
from deployments.shard_client import ShardClient, Shards
from deployments.tenants import Tenants
from deployments.unattended import Unattended
from sharding.api_keys import KnowsKeys
from sharding.directory import PlacementCache
from sharding.limits import CountsMinutes
from sharding.registry import OwnerNames

BODIES: list[type[BaseModel]] = [
    AddRequest,
    BatchRequest,
    ChatRequest,
    FeedbackRequest,
    ListRequest,
    SearchRequest,
    UpdateRequest,
]


@dataclass(frozen=True, slots=True)
class GatewayStores:
    """What a gateway asks Redis."""

    directory: PlacementDirectory
    names: OwnerNames
    api_keys: KnowsKeys
    minutes: CountsMinutes
    pages: SharedPages | None = None  # None: this gateway is the only one
    unattended: Unattended | None = None  # takes adds while no shard lives; None: they are refused


class Gateway:
    """What a gateway process holds: the way to the shards, the directory's cache, its settings."""

    def __init__(
        self, shards: Shards, stores: GatewayStores, policy: Policy, settings: GatewaySettings, me: str = "gateway"
    ) -> None:
        """`me`: this process' id among the gateways."""
        directory = stores.directory
        self.shards = shards
        self.settings = settings
        self.owners = Owners(directory, policy, PlacementCache(settings.cached_users), settings.reports_ttl_s)
        self.calls = OwnerCalls(
            shards,
            self.owners,
            settings.deadline_s,
            settings.patience_s,
            settings.wake_s,
            or_nobody=stores.unattended is not None,
        )
        self.api_keys = stores.api_keys
        self.limits = Limits(stores.minutes, settings)
        self.memories = Memories(shards, self.calls, stores.names, self.limits, stores.unattended)
        self.tenants = Tenants(self.memories, stores.names, stores.api_keys)
        self.metrics = Metrics(shards, self.owners, stores.pages, me, settings)


def create_app(gateway: Gateway, stamps_request_id: bool = True) -> FastAPI:
    """The HTTP application. `stamps_request_id`: put X-Request-ID on responses (Serve's proxy does so itself)."""
    settings = gateway.settings
    app = FastAPI(title="Memshard", redirect_slashes=False, docs_url=None, redoc_url=None, responses=ERRORS)
    app.add_middleware(Access, keys=gateway.api_keys, limits=gateway.limits, required=settings.require_keys)
    app.add_middleware(Meter)
    app.add_middleware(RequestEdge, max_body_bytes=settings.max_body_bytes, stamps_request_id=stamps_request_id)
    install_error_handlers(app)
    app.include_router(chat_routes(gateway.calls, settings, gateway.limits))
    app.include_router(platform_routes(gateway.memories, settings))
    app.include_router(oss_routes(gateway.memories, settings))
    app.include_router(memory_routes(gateway.memories, settings))
    app.include_router(admin_routes(gateway.shards, gateway.calls, gateway.owners, gateway.tenants, settings))
    app.include_router(health_routes(gateway.shards, gateway.owners, settings))
    app.include_router(metrics_routes(gateway.metrics))
    install_openapi(app, BODIES)
    return app


class GatewayReplica:
    """The class that Serve deploys; it makes its clients where they are used."""

    def __init__(
        self,
        shards: Any,
        open_stores: Callable[[], GatewayStores],
        policy: Policy,
        settings: GatewaySettings,
    ) -> None:
        """`shards`: the shard deployment's DeploymentHandle. `open_stores`: called once, in the replica."""
        from ray import serve

        me = serve.get_replica_context().replica_id.unique_id
        telemetry.begin(settings.telemetry, "gateway", me)
        self._gateway = Gateway(ShardClient(shards), open_stores(), policy, settings, me)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve after the constructor, on the loop that serves requests."""
        self._publishing = asyncio.get_running_loop().create_task(self._gateway.metrics.keep_publishing())
        return create_app(self._gateway, stamps_request_id=False)
