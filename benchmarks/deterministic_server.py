"""A server of many shards with the deterministic engine (`deployments/deterministic.py`): everything is real but the
model. For `memshard load`; never what `memshard serve` starts.

As a program (`python -m benchmarks.deterministic_server PORT SHARDS MAX_SHARDS STATE_DIR`) it serves until SIGTERM.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from rich.console import Console

from benchmarks import server
from cluster import processes
from cluster.settings import Settings
from deployments import deterministic

NOWHERE = Path("/nonexistent")  # there is no model
CHUNK_BYTES = 64 << 20  # a shard's budget: a million tokens of 64 bytes
SCALED_CHUNK_BYTES = 4 << 20  # where shards are to come with the users: some 125 users of 20 facts fill one


@contextmanager
def serving(console: Console, shards: int, max_shards: int | None = None) -> Iterator[str]:
    """The address of such a server, which is stopped at the end. `max_shards`: as many as its users' memories fill.
    Raises `StartupError`."""
    state_dir, port = Path(tempfile.mkdtemp(prefix="memshard-load-")), server.free_port()
    arguments = (str(port), str(shards), str(max_shards or shards), str(state_dir))
    command = (sys.executable, "-m", "benchmarks.deterministic_server", *arguments)
    with server.started(console, command, port, state_dir, Settings.from_environment()) as address:
        yield address


def main(port: int, shards: int, max_shards: int, state_dir: Path) -> None:
    """Serves until SIGTERM."""
    scales = max_shards > shards
    settings = Settings.from_environment(
        port=port,
        shards=shards,
        max_shards=max_shards if scales else None,
        state_dir=state_dir,
        served_model_name=deterministic.NAME,
        chunk_device_bytes=SCALED_CHUNK_BYTES if scales else CHUNK_BYTES,
        max_model_len=deterministic.MAX_MODEL_LEN,
    )
    from cluster.app import build
    from cluster.embedded_redis import EmbeddedRedis
    from cluster.ray_node import RayNode

    processes.adopt_orphans()
    with ExitStack() as running, suppress(KeyboardInterrupt):
        running.enter_context(processes.interruptible())
        running.callback(processes.end_descendants)
        redis = running.enter_context(EmbeddedRedis(state_dir / "redis"))
        node = RayNode(settings)
        running.callback(node.stop)
        redis.wait_ready()
        application = build(
            settings,
            redis_url=redis.url,
            model_path=NOWHERE,
            embedding_path=NOWHERE,
            open_shard=deterministic.open_shard,
            open_template=deterministic.open_template,
        )
        node.deploy(application, print)
        signal.pause()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
