"""/healthz, /readyz and /status: is the process up, can it serve, and what do the shards say of themselves.

`/healthz` touches nothing, so that a lost Redis never gets a gateway killed. `/readyz` asks Redis now. `/status` asks
every live shard and falls back on its last heartbeat.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from deployments.owners import Owners
from deployments.settings import GatewaySettings
from deployments.shard_client import Shards
from sharding.errors import MemshardError, Unavailable
from sharding.placement import ShardReport

JSONObject = dict[str, Any]


def health_routes(shards: Shards, owners: Owners, settings: GatewaySettings) -> APIRouter:
    """The routes; they answer within `status_deadline_s`, give or take one Redis time-out."""
    routes = APIRouter()

    @routes.get("/healthz")
    async def healthz() -> JSONObject:
        return {"status": "ok"}

    @routes.get("/readyz")
    async def readyz() -> JSONResponse:
        try:
            reason = await _not_ready(owners, settings)
        except TimeoutError:
            reason = f"Redis did not answer within {settings.status_deadline_s:g} s."
        except Unavailable as error:
            reason = error.message
        if reason is None:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready", "reason": reason}, 503, {"Retry-After": "1"})

    @routes.get("/status")
    async def status() -> JSONObject:
        reports = (await owners.live(newest=True)).values()
        return {
            "model": settings.model,
            "expected": settings.expected_shards,
            "shards": await asyncio.gather(*(_shard_status(report) for report in reports)),
        }

    async def _shard_status(report: ShardReport) -> JSONObject:
        try:
            return {**asdict(await shards.status(report.shard, settings.status_deadline_s)), "reachable": True}
        except MemshardError as error:
            heard = report.model_dump(exclude={"status"})
            return {**report.status, **heard, "reachable": False, "reason": error.message}

    return routes


async def _not_ready(owners: Owners, settings: GatewaySettings) -> str | None:
    """Why no chat could be answered now, or None. Raises Unavailable or TimeoutError."""
    async with asyncio.timeout(settings.status_deadline_s):
        reports = await owners.live(newest=True)
    if any(report.ready for report in reports.values()):
        return None
    return f"None of the {settings.expected_shards} shards is ready yet."
