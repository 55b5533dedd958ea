"""A gateway's replica in this process, as Serve builds it: it shows its metrics to the others."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from ray import serve

from deployments.gateway import GatewayReplica, GatewayStores
from deployments.settings import GatewaySettings
from sharding.api_keys import KeyStore
from sharding.client import connect
from sharding.directory import Directory
from sharding.keys import KeySpace
from sharding.limits import Minutes
from sharding.pages import Pages
from sharding.placement import PlacementPolicy
from sharding.registry import Registry
from tests.sharding.real_valkey import running_valkey

KEYS = KeySpace("test", "m", "blue")


async def test_its_page_is_there_for_the_other_gateways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", root.handlers[:])  # the replica sets its own
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="gateway-1"))
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    with running_valkey(tmp_path) as valkey:
        settings = GatewaySettings("m", pages_interval_s=0.05)
        async with connect(valkey.url) as redis:
            pages = Pages(redis, KEYS)
            stores = GatewayStores(
                Directory(redis, KEYS), Registry(redis, KEYS), KeyStore(redis, KEYS), Minutes(redis, KEYS), pages
            )
            replica = GatewayReplica(None, lambda: stores, PlacementPolicy(), settings)
            http = httpx.AsyncClient(transport=httpx.ASGITransport(replica.__serve_build_asgi_app__()))
            assert (await http.get("http://g/healthz")).status_code == 200
            for _ in range(200):
                await asyncio.sleep(0.05)
                if 'route="/healthz"' in (await pages.read()).get("gateway-1", ""):
                    break
            else:
                raise AssertionError(await pages.read())
            answer = await http.get("http://g/metrics")
            assert "memshard_redis_up 1.0" in answer.text
            assert 'gateway="gateway-1"' in answer.text
            publishing = replica._publishing
            while not publishing.done():  # the client of Redis swallows a cancellation that meets its answer
                publishing.cancel()
                await asyncio.wait({publishing}, timeout=1)
            await http.aclose()
