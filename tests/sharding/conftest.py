"""Tests of `sharding` run against a real Valkey server, started here and ended here."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from people import ALICE, HERE
from real_valkey import Valkey, running_valkey
from redis.asyncio import Redis

from sharding.client import connect
from sharding.directory import Directory
from sharding.facts import FactStore
from sharding.ids import Placement
from sharding.keys import KeySpace


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    with running_valkey(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[Valkey]:
    """A server that the test may stop."""
    with running_valkey(tmp_path) as server:
        yield server


@pytest.fixture(scope="session")
async def redis(valkey: Valkey) -> AsyncIterator[Redis]:
    async with connect(valkey.url) as client:
        yield client


@pytest.fixture
def keys() -> KeySpace:
    """A namespace that no other test uses."""
    return KeySpace(uuid.uuid4().hex, "org/model")


@pytest.fixture
def directory(redis: Redis, keys: KeySpace) -> Directory:
    return Directory(redis, keys)


@pytest.fixture
def store(redis: Redis, keys: KeySpace) -> FactStore:
    return FactStore(redis, keys)


@pytest.fixture
async def placement(directory: Directory) -> Placement:
    """Alice, owned by this shard."""
    return await directory.claim(ALICE, HERE, None)
