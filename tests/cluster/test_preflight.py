"""What is wrong with the machine is said before anything starts, in one sentence."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from cluster import preflight
from cluster.settings import GIB, Settings
from sharding.errors import StartupError


def test_a_port_that_somebody_listens_on_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"Port {port} of 127.0.0.1 is in use"):
            preflight.check_port("127.0.0.1", port)
    preflight.check_port("127.0.0.1", port)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(StartupError, match=r"Port 8000 of 192\.0\.2\.1 cannot be listened on"):
        preflight.check_port("192.0.2.1", 8000)


def test_another_python_is_refused() -> None:
    with pytest.raises(StartupError, match=r"Python 3\.11 is needed and this is 3\.12"):
        preflight.check_python((3, 12))


def test_memory_is_counted_by_shard() -> None:
    settings = Settings.from_environment(shards=2, kv_cache_bytes=GIB, chunk_device_bytes=GIB, chunk_host_bytes=GIB)
    needed = int(10.5 * GIB)
    preflight.check_memory(settings, needed)
    with pytest.raises(StartupError, match=r"2 shards need about 10\.5 GiB of memory and 10\.0 GiB are free"):
        preflight.check_memory(settings, needed - GIB // 2)


def test_the_weights_of_a_configured_model_are_counted(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as weights:
        weights.truncate(GIB)  # sparse
    settings = Settings.from_environment(shards=2, model=tmp_path, chunk_host_bytes=0)
    with pytest.raises(StartupError, match=r"need about 10\.5 GiB"):
        preflight.check_memory(settings, int(8.5 * GIB))


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    settings = Settings.from_environment(embedding_model=tmp_path / "nowhere")
    with pytest.raises(StartupError, match=r"MEMSHARD_EMBEDDING_MODEL is .*/nowhere, and there is no such directory"):
        preflight.check_model_paths(settings)
