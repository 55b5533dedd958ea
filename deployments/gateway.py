"""The gateway: HTTP on one side, the owners' shards on the other. Stateless but for what it caches.

`create_app` builds the FastAPI application around a `Gateway`, for Serve, uvicorn and tests alike. `GatewayReplica`
is the class to deploy, plain as it is:

    serve.deployment(serve.ingress()(GatewayReplica)).bind(shards_handle, open_directory, policy, settings)

Serve builds it inside the replica, on the event loop that serves requests, and then calls
`__serve_build_asgi_app__`. The shard deployment must use `router.PinnedRouter`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI

from deployments.chat_api import chat_routes
from deployments.health_api import health_routes
from deployments.http_edge import RequestEdge
from deployments.http_errors import install_error_handlers
from deployments.memories_api import memory_routes
from deployments.owner_calls import OwnerCalls
from deployments.owners import Owners, PlacementDirectory, Policy
from deployments.settings import GatewaySettings
from deployments.shard_client import ShardClient, Shards
from sharding.directory import PlacementCache


class Gateway:
    """What a gateway process holds: the way to the shards, the directory's cache, its settings."""

    def __init__(
        self, shards: Shards, directory: PlacementDirectory, policy: Policy, settings: GatewaySettings
    ) -> None:
        self.shards = shards
        self.settings = settings
        self.owners = Owners(directory, policy, PlacementCache(settings.cached_users), settings.reports_ttl_s)
        self.calls = OwnerCalls(shards, self.owners, settings.deadline_s)


def create_app(gateway: Gateway, stamps_request_id: bool = True) -> FastAPI:
    """The HTTP application. `stamps_request_id`: put X-Request-ID on responses (Serve's proxy does so itself)."""
    settings = gateway.settings
    app = FastAPI(title="Memshard", redirect_slashes=False, docs_url=None, redoc_url=None)
    app.add_middleware(RequestEdge, max_body_bytes=settings.max_body_bytes, stamps_request_id=stamps_request_id)
    install_error_handlers(app)
    app.include_router(chat_routes(gateway.calls, settings))
    app.include_router(memory_routes(gateway.shards, gateway.calls, settings))
    app.include_router(health_routes(gateway.shards, gateway.owners, settings))
    return app


class GatewayReplica:
    """The class that Serve deploys; it makes its clients where they are used."""

    def __init__(
        self,
        shards: Any,
        open_directory: Callable[[], PlacementDirectory],
        policy: Policy,
        settings: GatewaySettings,
    ) -> None:
        """`shards`: the shard deployment's DeploymentHandle. `open_directory`: called once, in the replica."""
        self._gateway = Gateway(ShardClient(shards), open_directory(), policy, settings)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve after the constructor."""
        return create_app(self._gateway, stamps_request_id=False)
