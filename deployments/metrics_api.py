"""/metrics: the whole cluster's numbers, from whichever gateway is asked. See `exposition.py`."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Protocol

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from deployments import exposition
from deployments.owners import Owners
from deployments.settings import GatewaySettings
from deployments.shard_client import Shards
from sharding.errors import MemshardError, Unavailable
from sharding.placement import ShardReport

Page = tuple[str, str, str]


class SharedPages(Protocol):
    """`sharding.pages.Pages`; each raises Unavailable where Redis is away."""

    async def publish(self, name: str, page: str) -> None: ...

    async def read(self) -> dict[str, str]: ...


class Metrics:
    """`me` is this gateway's id, and the name under which the others find its page."""

    def __init__(
        self, shards: Shards, owners: Owners, shared: SharedPages | None, me: str, settings: GatewaySettings
    ) -> None:
        self._shards = shards
        self._owners = owners
        self._shared = shared
        self._me = me
        self._settings = settings

    async def page(self) -> str:
        """Everything that can be had within `status_deadline_s`, give or take one Redis time-out."""
        redis_up = 1
        try:
            reports = await self._owners.live(newest=True)
        except Unavailable:
            redis_up, reports = 0, self._owners.known()
        pages = [("", "", self._cluster(redis_up, len(reports))), *await self._gateways()]
        for shard_pages in await asyncio.gather(*map(self._shard, reports.values())):
            pages += shard_pages
        return exposition.merged(pages)

    async def keep_publishing(self) -> None:
        """Show the other gateways this one's page, until cancelled."""
        while self._shared is not None:
            with suppress(Unavailable):
                await self._shared.publish(self._me, exposition.own())
            await asyncio.sleep(self._settings.pages_interval_s)

    def _cluster(self, redis_up: int, live: int) -> str:
        registry = CollectorRegistry()
        Gauge("memshard_redis_up", "1 where Redis answers the gateway.", registry=registry).set(redis_up)
        Gauge("memshard_live_shards", "Shards with a heartbeat.", registry=registry).set(live)
        expected = Gauge("memshard_expected_shards", "Shards that the cluster is meant to have.", registry=registry)
        expected.set(self._settings.expected_shards)
        return generate_latest(registry).decode()

    async def _gateways(self) -> list[Page]:
        others: dict[str, str] = {}
        if self._shared is not None:
            with suppress(Unavailable):
                others = await self._shared.read()
        others[self._me] = exposition.own()
        return [("gateway", name, page) for name, page in sorted(others.items())]

    async def _shard(self, report: ShardReport) -> list[Page]:
        try:
            page, up = await self._shards.metrics(report.shard, self._settings.status_deadline_s), 1
        except MemshardError:
            page, up = exposition.of_status({**report.model_dump(), **report.status}), 0
        registry = CollectorRegistry()
        Gauge("memshard_shard_up", "1 where the shard answers.", registry=registry).set(up)
        return [("shard", report.shard, page), ("shard", report.shard, generate_latest(registry).decode())]


def metrics_routes(metrics: Metrics) -> APIRouter:
    """The route."""
    routes = APIRouter()

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def page() -> PlainTextResponse:
        return PlainTextResponse(await metrics.page(), media_type=exposition.CONTENT_TYPE)

    return routes
