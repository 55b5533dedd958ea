"""What the tests of the whole system share: one server, since its start takes half a minute of two cores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tests.deployments.quiet_ray  # noqa: F401  # before anything that imports ray
from tests.cluster.whole_server import WholeServer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeServer]:
    """Two shards with real engines. A test that kills or restarts some of it leaves it whole."""
    server = WholeServer(tmp_path_factory.mktemp("whole"))
    server.start()
    yield server
    server.stop()
