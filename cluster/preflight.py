"""What can be known before anything is started: each reason not to start is one sentence that says what to do."""

from __future__ import annotations

import errno
import socket
import sys
from pathlib import Path

import psutil

from cluster.settings import GIB, PREFIX, Settings
from sharding.errors import StartupError

PYTHON = (3, 11)
BASE_BYTES = int(1.5 * GIB)  # Ray, Serve's controller and proxy, gateway, Redis
SHARD_BYTES = int(1.5 * GIB)  # a replica and its engine with the packaged models, both caches empty


def check(settings: Settings) -> None:
    """Raise the first reason why this cluster cannot run on this machine.

    Raises:
        StartupError: Python, port, memory or a model's path is wrong.
    """
    check_python(sys.version_info[:2])
    check_port(settings.host, settings.port)
    check_model_paths(settings)
    check_memory(settings, available_bytes())


def check_python(version: tuple[int, int]) -> None:
    """Refuse any Python but the one that the lock file was resolved for."""
    if version != PYTHON:
        raise StartupError(f"Python {PYTHON[0]}.{PYTHON[1]} is needed and this is {version[0]}.{version[1]}")


def check_port(host: str, port: int) -> None:
    """Refuse an address that cannot be listened on."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # Connections of an earlier server that still linger do not count; a listening one does.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as failure:
        if failure.errno == errno.EADDRINUSE:
            reason = f"Port {port} of {host} is in use; stop what listens there, or choose another with --port"
        else:
            reason = f"Port {port} of {host} cannot be listened on: {failure.strerror}"
        raise StartupError(reason) from None


def check_model_paths(settings: Settings) -> None:
    """Refuse a configured model whose directory does not exist (what is in it is `cluster/models.py`'s to judge)."""
    for field in ("model", "embedding_model"):
        path: Path | None = getattr(settings, field)
        if path is not None and not path.is_dir():
            raise StartupError(f"{PREFIX}{field.upper()} is {path}, and there is no such directory")


def check_memory(settings: Settings, available: int) -> None:
    """Refuse to start where the caches' budgets and the processes do not fit into `available` bytes."""
    weights = 0 if settings.model is None else sum(file.stat().st_size for file in settings.model.glob("*.safetensors"))
    shard = SHARD_BYTES + weights + settings.kv_cache_bytes + settings.chunk_device_bytes + settings.chunk_host_bytes
    needed = BASE_BYTES + settings.most_shards * shard
    if needed > available:
        raise StartupError(
            f"{settings.most_shards} shards need about {needed / GIB:.1f} GiB of memory and {available / GIB:.1f} GiB "
            f"are free; lower {PREFIX}SHARDS, {PREFIX}KV_CACHE_BYTES, {PREFIX}CHUNK_DEVICE_BYTES or "
            f"{PREFIX}CHUNK_HOST_BYTES"
        )


def available_bytes() -> int:
    """Memory that new processes can get: the machine's, or less where a container's limit (cgroup v2) is nearer."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text().strip()
    except OSError:
        return free
    return free if limit == "max" else min(free, int(limit) - int(used))
