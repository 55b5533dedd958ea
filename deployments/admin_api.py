"""POST /v1/admin/moves and /v1/admin/drains: an operator moves users between living shards.
POST /v1/admin/rebuilds: what corrections left stale of a user's memory is encoded anew.
DELETE /v1/admin/tenants: all of a tenant is deleted."""

from __future__ import annotations

import uuid
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel

from deployments.api_docs import both_forms
from deployments.bodies import as_user_id, parse_body
from deployments.callers import caller_of
from deployments.memory_calls import ListCall, MoveCall, MoveReport, RebuildCall, Rebuilt
from deployments.owner_calls import OwnerCalls
from deployments.owners import Owners
from deployments.settings import GatewaySettings
from deployments.shard_client import Shards
from deployments.tenants import Tenants
from sharding.errors import NotFound
from sharding.ids import Placement, ShardId
from sharding.move import End
from sharding.scopes import Entity


class MoveRequest(BaseModel):
    """Move `user_id` to the shard of that id."""

    user_id: str
    shard: str


class DrainRequest(BaseModel):
    """Move everybody away from the shard of that id, which takes no new users from then on."""

    shard: str


class RebuildRequest(BaseModel):
    """Encode anew what corrections left stale of `user_id`'s memory."""

    user_id: str


class TenantDeleted(BaseModel):
    """What there was of a tenant: `users` with memories, `memories`, API `keys`."""

    message: str
    users: int
    memories: int
    keys: int


def admin_routes(
    shards: Shards, calls: OwnerCalls, owners: Owners, tenants: Tenants, settings: GatewaySettings
) -> APIRouter:
    """The routes."""
    routes = APIRouter(prefix="/v1/admin")

    @routes.post("/moves")
    async def move(request: Request) -> dict[str, Any]:
        asked = parse_body(MoveRequest, await request.body())
        user = caller_of(request).owner(Entity("user", as_user_id(asked.user_id, "user_id")))
        target = ShardId(asked.shard)

        async def hop(placement: Placement, left_s: float) -> MoveReport:
            if placement.shard == target:
                return MoveReport(End.MOVED, placement)  # this very move, repeated
            return await shards.ask(placement.shard, MoveCall(uuid.uuid4().hex, placement, target), left_s)

        report = await calls.call(user, hop)
        if report.end is End.MOVED:
            owners.moved(report.placement)
            await calls.call(user, _arrive(shards))
        return {**asdict(report), "placement": {"shard": report.placement.shard, "epoch": report.placement.epoch}}

    @routes.post("/drains")
    async def drain(request: Request) -> dict[str, Any]:
        shard = ShardId(parse_body(DrainRequest, await request.body()).shard)
        if shard not in await owners.live(newest=True):
            raise NotFound(f"There is no shard {shard}; `memshard status` lists those there are.", field="shard")
        return asdict(await shards.drain(shard, settings.deadline_s))

    @routes.post("/rebuilds")
    async def rebuild(request: Request) -> dict[str, Any]:
        asked = parse_body(RebuildRequest, await request.body())
        user = caller_of(request).owner(Entity("user", as_user_id(asked.user_id, "user_id")))

        async def hop(placement: Placement, left_s: float) -> Rebuilt:
            return await shards.ask(placement.shard, RebuildCall(uuid.uuid4().hex, placement), left_s)

        done = await calls.call(user, hop)
        return {**asdict(done), "share": done.share}

    @both_forms(routes, "DELETE", "/tenants/{tenant}")
    async def delete_tenant(tenant: str, request: Request) -> TenantDeleted:
        """Its users' memories, wherever they are, its keys and its counts; answered when they are gone."""
        gone = await tenants.forget(caller_of(request), tenant)
        return TenantDeleted(message="The tenant was deleted.", **asdict(gone))

    return routes


def _arrive(shards: Shards) -> Any:
    """A first touch at the new shard: what is in files begins to come before the user's next request does."""

    async def hop(placement: Placement, left_s: float) -> None:
        await shards.ask(placement.shard, ListCall(uuid.uuid4().hex, placement, page=1, page_size=1), left_s)

    return hop
