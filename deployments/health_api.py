"""/healthz, /readyz and /status: is the process up, can it serve, and what do the shards say of themselves.

`/healthz` touches nothing, so that a lost Redis never gets a gateway killed. `/readyz` asks Redis now, and says whether
memory is injected, or that no shard runs and the next chat starts one. `/status` asks every live shard and falls back
on its last heartbeat; `/canary` has every live shard prove its model again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse, JSONResponse

from deployments.messages import ShardStatus
from deployments.owners import Owners
from deployments.settings import GatewaySettings
from deployments.shard_client import Shards
from sharding.errors import MemshardError, Unavailable
from sharding.ids import ShardId
from sharding.placement import ShardReport

JSONObject = dict[str, Any]
Ask = Callable[[ShardId, float], Awaitable[ShardStatus]]

PAGE = Path(__file__).with_name("status_page.html").read_text()
"""What a person sees at `/`: `/status`, drawn and kept up to date."""


def health_routes(shards: Shards, owners: Owners, settings: GatewaySettings) -> APIRouter:
    """The routes; all but `/canary` answer within `status_deadline_s`, give or take one Redis time-out."""
    routes = APIRouter()

    @routes.get("/healthz")
    async def healthz() -> JSONObject:
        return {"status": "ok"}

    @routes.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE)

    @routes.get("/readyz")
    async def readyz() -> JSONResponse:
        reports: list[ShardReport] = []
        try:
            reports = await _ready(owners, settings)
            reason = None if reports or settings.expected_shards == 0 else _none_ready(settings)
        except TimeoutError:
            reason = f"Redis did not answer within {settings.status_deadline_s:g} s."
        except Unavailable as error:
            reason = error.message
        if reason is None:
            return JSONResponse({"status": "ready", "memory": _memory(reports) if reports else "asleep"})
        return JSONResponse({"status": "not ready", "reason": reason}, 503, {"Retry-After": "1"})

    @routes.get("/status")
    async def status() -> JSONObject:
        return await _all_say(shards.status, settings.status_deadline_s)

    @routes.post("/canary")
    async def canary() -> JSONObject:
        return await _all_say(shards.prove, settings.deadline_s)

    async def _all_say(ask: Ask, deadline_s: float) -> JSONObject:
        reports = (await owners.live(newest=True)).values()
        return {
            "model": settings.model,
            "expected": settings.expected_shards,
            "most": max(settings.expected_shards, settings.most_shards),
            "shards": await asyncio.gather(*(_says(ask, report, deadline_s) for report in reports)),
        }

    async def _says(ask: Ask, report: ShardReport, deadline_s: float) -> JSONObject:
        try:
            return {**asdict(await ask(report.shard, deadline_s)), "reachable": True}
        except MemshardError as error:
            heard = report.model_dump(exclude={"status"})
            return {**report.status, **heard, "reachable": False, "reason": error.message}

    return routes


async def _ready(owners: Owners, settings: GatewaySettings) -> list[ShardReport]:
    """The shards that could answer a chat now. Raises Unavailable or TimeoutError."""
    async with asyncio.timeout(settings.status_deadline_s):
        reports = await owners.live(newest=True)
    return [report for report in reports.values() if report.ready]


def _none_ready(settings: GatewaySettings) -> str:
    return f"None of the {settings.expected_shards} shards is ready yet."


def _memory(reports: Iterable[ShardReport]) -> str:
    """How these shards serve memory where the caller does not say: "injected", or "text" where one of them does not."""
    served = [(report.status.get("canary") or {}).get("prefill_nearest") for report in reports]
    return "text" if None in served else "injected"
