"""The gateway in this process, reached without a socket (`client`) or with one (`server_url`); and the encoder before
an engine in memory."""

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
from copying_pair import pair  # noqa: F401
from gateway_fakes import Cluster
from redis.asyncio import Redis
from slow_engine import STEP_TOKENS, SlowEngine

from connector.ledger import ChunkLedger
from deployments.encode_pace import EncodePace
from deployments.encoder import Encoder
from deployments.gateway import create_app
from sharding.client import connect
from tests.deployments.town import Town, a_town
from tests.sharding.real_valkey import Valkey, running_valkey


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


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with running_valkey(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="module")
async def own_valkey(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Redis, str]]:
    """A server that a module's tests may empty: a client of it, and its address."""
    with running_valkey(tmp_path_factory.mktemp("v")) as server:
        async with connect(server.url) as redis:
            yield redis, server.url


@pytest.fixture(scope="session")
def town(valkey: Valkey) -> Iterator[Town]:
    """Shared: each test has users of its own."""
    with a_town(valkey) as town:
        yield town


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


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> SlowEngine:
    """With room for as many tokens as the module's BUDGET says."""
    return SlowEngine(request.module.BUDGET)


@pytest.fixture
def ledger(engine: SlowEngine) -> Iterator[ChunkLedger]:
    ledger = ChunkLedger(engine.budget_tokens, engine.token_bytes)
    yield ledger
    ledger.check_integrity()


@pytest.fixture
async def encoder(engine: SlowEngine, ledger: ChunkLedger) -> AsyncIterator[Encoder]:
    encoder = Encoder(engine, ledger, EncodePace(STEP_TOKENS))
    yield encoder
    encoder.close()
    engine.gate.set()
    await asyncio.sleep(0.01)
    for id_ in engine.chunks:
        assert ledger.peek_resident(id_), "a worker holds a chunk that the ledger does not count"
