"""The gateway in this process, reached without a socket (`client`) or with one (`server_url`)."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import httpx
import pytest
import quiet_ray  # noqa: F401  # before anything that imports ray
import uvicorn
from gateway_fakes import Cluster

from deployments.gateway import create_app


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(cluster.gateway))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        yield http


@pytest.fixture
def server_url(cluster: Cluster) -> Iterator[str]:
    """The gateway behind uvicorn on a port of its own, in a thread of its own."""
    with serving(cluster) as url:
        yield url


@contextmanager
def serving(cluster: Cluster) -> Iterator[str]:
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(create_app(cluster.gateway), log_level="warning", ws="none", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        listening.close()
    assert not thread.is_alive()
