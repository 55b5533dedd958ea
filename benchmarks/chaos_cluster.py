"""A cluster to break: several Ray nodes on this machine, shards with the deterministic engine or a model, an embedded
Redis behind a proxy. All but the deterministic engine is the product's own.

    this process ─┬ Redis (revived where it ends, as `memshard serve` does)  ◄─ proxy ◄─ every shard and gateway
                  ├ head node: Serve's controller and proxy, gateways
                  └ further nodes: shards

The processes of Ray are found by what they call themselves. `ray.cluster_utils` is Ray's own test tool.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import shutil
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import httpx
import psutil

from benchmarks import chaos_shard
from benchmarks.chaos_proxy import RedisProxy
from benchmarks.server import free_port
from cluster import models, processes
from cluster.embedded_redis import EmbeddedRedis
from cluster.settings import Settings
from deployments import deterministic
from sharding.errors import StartupError

SHARDS = 4
SHARDS_OF_A_MODEL = 2
GATEWAYS = 2
SHARD_NODES = 2
START_S = 180.0
WHOLE_S = 180.0  # an engine's start takes a minute where others start or run beside it
OBJECT_STORE_BYTES = 80 << 20
NOWHERE = Path("/nonexistent")  # there is no model
REVIVE_EVERY_S = 0.5
HEARTBEAT_TTL_S = 2.0

SHARD = "ServeReplica:memshard:Shard"
GATEWAY = "ServeReplica:memshard:Gateway"
CONTROLLER = "ServeController"
ENGINE = (chaos_shard.ENGINE, "EngineCore")
WORKER = ("VLLM::Worker",)


def user_name(number: int) -> str:
    """Of the run's users."""
    return f"chaos-{number}"


class RedisToBreak:
    """An embedded Redis that is killed and filled, and comes back as that of `memshard serve` does."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._file_limit: int | None = None
        self._reviving: asyncio.Task[None] | None = None
        self._another = asyncio.Condition()  # is told of each revived Redis

    async def start(self) -> None:
        """Raises `StartupError`."""
        self._server = EmbeddedRedis(self._directory)
        self._server.wait_ready()
        self.url = self._server.url
        self.port = int(self.url.rpartition(":")[2].partition("/")[0])
        self._reviving = asyncio.create_task(self._revive())

    async def stop(self) -> None:
        if self._reviving is not None:
            self._reviving.cancel()
            self._server.stop()

    async def kill(self) -> None:
        """Returns when another runs in its place."""
        pid = self._server.pid
        psutil.Process(pid).kill()
        async with self._another:
            await self._another.wait_for(lambda: self._server.pid != pid)

    async def fill_disk(self, for_s: float) -> None:
        """It can append no more for so long: its files may not grow beyond what they are."""
        files = [file.stat().st_size for file in self._directory.rglob("*") if file.is_file()]
        self._file_limit = max(files, default=0)
        self._limit_files()
        await asyncio.sleep(for_s)
        self._file_limit = None
        self._limit_files()

    def _limit_files(self) -> None:
        unlimited = resource.RLIM_INFINITY
        soft = unlimited if self._file_limit is None else self._file_limit
        with suppress(ProcessLookupError):
            resource.prlimit(self._server.pid, resource.RLIMIT_FSIZE, (soft, unlimited))

    async def _revive(self) -> None:
        """What `memshard serve` does for its Redis; a full disk stays full for the next one, too."""
        while True:
            await asyncio.sleep(REVIVE_EVERY_S)
            pid = self._server.pid
            self._server.revive()
            if self._server.pid != pid:
                if self._file_limit is not None:
                    self._limit_files()
                async with self._another:
                    self._another.notify_all()


class ChaosCluster:
    """`await start()`, `url` to talk to, `await stop()`. Lives on the main thread's event loop."""

    def __init__(self, model: Path | None = None) -> None:
        """`model`: the directory of one to serve, in place of the deterministic engine."""
        self.directory = Path(tempfile.mkdtemp(prefix="memshard-chaos-", dir="/tmp"))
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.exact = model is None
        self.served_name = deterministic.NAME if model is None else "chaos-model"
        self.shards = SHARDS if model is None else SHARDS_OF_A_MODEL
        self._model = model
        self._settings: dict[str, Any] = {
            "port": port,
            "shards": self.shards,
            "gateways": GATEWAYS,
            "place_by_resource": True,
            "state_dir": self.directory,
            "served_model_name": self.served_name,
            "max_model_len": deterministic.MAX_MODEL_LEN if model is None else None,
            "kv_cache_bytes": 128 << 20,
            "chunk_device_bytes": 64 << 20,
            "chunk_shared_url": str(self.directory / "shared"),
            "prefill_nearest": 0,
            "rebalance": True,
            "heartbeat_interval_s": HEARTBEAT_TTL_S / 4,
            "heartbeat_ttl_s": HEARTBEAT_TTL_S,
            "request_deadline_s": 30.0,
        }
        self._ray: Any = None  # ray.cluster_utils.Cluster

    async def start(self) -> None:
        """Returns when all shards answer. Raises `StartupError`."""
        self.redis = RedisToBreak(self.directory / "redis")
        await self.redis.start()
        self.proxy = RedisProxy(self.redis.port)
        await self.proxy.start()
        await asyncio.to_thread(self._start_ray)
        processes.listen_again()
        await self.whole(START_S)

    def _start_ray(self) -> None:
        from cluster.ray_node import APPLICATION, ENVIRONMENT, hush

        os.environ.update(ENVIRONMENT)
        import ray
        from ray import serve
        from ray.cluster_utils import Cluster

        from cluster.app import GATEWAY_RESOURCE, build

        redis_url = f"redis://127.0.0.1:{self.proxy.port}/0"
        settings = Settings.from_environment(**self._settings, redis_url=redis_url)
        head = {"num_cpus": 4, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
        resources = {GATEWAY_RESOURCE: 2 * GATEWAYS}
        self._ray = Cluster(
            initialize_head=True,
            head_node_args=head | {"temp_dir": str(self.directory / "r"), "resources": resources},
            shutdown_at_exit=False,  # its hooks want the main thread; `stop` ends all of it
        )
        for _ in range(SHARD_NODES):
            self.add_node()
        quiet = {"log_to_driver": False, "logging_level": logging.CRITICAL}
        hush()
        ray.init(address=self._ray.address, namespace=settings.namespace, **quiet)
        for name in ("ray", "ray.serve"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        http = {"host": settings.host, "port": settings.port}
        serve.start(proxy_location="HeadOnly", http_options=http, logging_config={"log_level": "ERROR"})
        opens = chaos_shard.open_deterministic if self._model is None else chaos_shard.open_real
        application = build(
            settings,
            redis_url=redis_url,
            model_path=self._model or NOWHERE,
            embedding_path=NOWHERE if self._model is None else models.embedding_model(settings),
            open_shard=partial(opens, self.directory),
            open_template=deterministic.open_template if self._model is None else None,
        )
        serve.run_many(
            [serve.RunTarget(application, name=APPLICATION, route_prefix="/")],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )

    async def stop(self) -> None:
        """Nothing of it runs afterwards."""
        import ray
        from ray._common.utils import reset_ray_address

        with suppress(Exception):  # half of it may be dead already: what is left is killed
            await asyncio.to_thread(ray.shutdown)
        with suppress(OSError):
            reset_ray_address()  # a file of the whole machine that names ours
        processes.end_descendants(1.0)
        await self.proxy.stop()
        await self.redis.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    async def whole(self, deadline_s: float = WHOLE_S) -> None:
        """Returns when every shard and gateway answers. Raises `StartupError` where they do not in time."""
        give_up = time.monotonic() + deadline_s
        last: object = None
        async with httpx.AsyncClient(base_url=self.url, timeout=5.0, trust_env=False) as client:
            while time.monotonic() < give_up:
                with suppress(httpx.HTTPError, ValueError):
                    shards = (await client.get("/status")).json()["shards"]
                    last = [shard.get("reachable") for shard in shards]
                    alive = len(shards) == self.shards and all(shard.get("reachable", True) for shard in shards)
                    if alive and len(self.processes(GATEWAY)) == GATEWAYS:
                        return
                await asyncio.sleep(0.2)
        raise StartupError(f"The cluster was not whole within {deadline_s:.0f} s: {last}")

    # -- what can be broken -----------------------------------------------------------------------------------------

    def processes(self, *kind: str) -> list[psutil.Process]:
        """SHARD, GATEWAY, CONTROLLER, ENGINE or WORKER processes, by age."""
        found = []
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                title = " ".join([process.name(), *process.cmdline()])
                if any(one in title for one in kind) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return sorted(found, key=lambda process: process.create_time())

    def shard_pids(self) -> dict[str, int]:
        """The process of every shard that ever started, by its id."""
        return {file.name: int(file.read_text()) for file in (self.directory / "shards").iterdir()}

    def fill_disk(self, process: psutil.Process, full: bool) -> None:
        """A process can write to no file while its disk is full."""
        soft = 0 if full else resource.RLIM_INFINITY
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            process.rlimit(psutil.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))

    def shard_nodes(self) -> list[Any]:
        """The nodes that shards run on."""
        return sorted(self._ray.worker_nodes, key=lambda node: str(node.unique_id))

    def crash_node(self, random: Random) -> None:
        """All its processes at once, as when a machine loses power."""
        node = random.choice(self.shard_nodes())
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        for process in (raylet, *raylet.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._ray.remove_node(node, allow_graceful=False)

    def add_node(self) -> None:
        from cluster.app import SHARD_RESOURCE

        self._ray.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES, resources={SHARD_RESOURCE: self.shards})
