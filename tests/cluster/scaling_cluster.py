"""A cluster of several Ray nodes whose number of shards follows the load: all of the product but the model."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

from cluster.embedded_redis import EmbeddedRedis
from cluster.settings import Settings
from deployments import deterministic
from deployments.deterministic import answer
from tests.ports import free_ports

NOWHERE = Path("/nonexistent")  # there is no model
MOST = 2
ROOM = 4  # chats in flight that a shard is meant to have
STEP_S = 0.2  # a word of an answer
WINDOW_S = 5.0
NODES = 2
OBJECT_STORE_BYTES = 80 << 20


class ScalingCluster:
    """`url` to talk to it. Begins with one shard, and may have none and `MOST`. `stop` leaves no process."""

    def __init__(self, directory: Path) -> None:
        self._before = {child.pid for child in psutil.Process().children(recursive=True)}
        (port,) = free_ports(1)
        self._redis = EmbeddedRedis(directory / "redis")
        self.settings = Settings(
            port=port,
            state_dir=directory,
            redis_url=self._redis.url,
            shards=0,
            max_shards=MOST,
            scale_window_s=WINDOW_S,
            scale_up_s=1.0,
            wake_deadline_s=30.0,
            max_requests_in_flight=2 * ROOM,
            heartbeat_interval_s=0.5,
            heartbeat_ttl_s=2.0,
            served_model_name=deterministic.NAME,
            chunk_device_bytes=8 << 20,
            max_model_len=deterministic.MAX_MODEL_LEN,
            place_by_resource=True,
        )
        self.url = f"http://127.0.0.1:{port}"
        self._ray: Any = None

    def start(self) -> None:
        """Returns when the first shard runs."""
        from cluster.ray_node import APPLICATION, ENVIRONMENT

        os.environ.update(ENVIRONMENT)
        import ray
        from ray import serve
        from ray.cluster_utils import Cluster

        from cluster.app import GATEWAY_RESOURCE, SHARD_RESOURCE, build

        self._redis.wait_ready()
        small = {"object_store_memory": OBJECT_STORE_BYTES}
        head = {"num_cpus": 2, "include_dashboard": False, "resources": {GATEWAY_RESOURCE: 1}, **small}
        self._ray = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
        for _ in range(NODES):
            self._ray.add_node(num_cpus=1, resources={SHARD_RESOURCE: MOST}, **small)
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
        ray.init(address=self._ray.address, namespace=self.settings.namespace, **quiet)
        http = {"host": "127.0.0.1", "port": self.settings.port}
        serve.start(proxy_location="HeadOnly", http_options=http, logging_config={"log_level": "WARNING"})
        application = build(
            self.settings,
            redis_url=self._redis.url,
            model_path=NOWHERE,
            embedding_path=NOWHERE,
            open_shard=partial(deterministic.open_shard, step_s=STEP_S),
            open_template=deterministic.open_template,
        )
        serve.run(application, name=APPLICATION, route_prefix="/")

    def stop(self) -> None:
        import ray
        from ray import serve

        started = [child for child in psutil.Process().children(recursive=True) if child.pid not in self._before]
        if ray.is_initialized():
            serve.shutdown()
            ray.shutdown()
        if self._ray is not None:
            self._ray.shutdown()
        self._redis.stop()
        _, left = psutil.wait_procs(started, timeout=10)
        for process in left:
            process.kill()
        assert not left

    @staticmethod
    def shards() -> int:
        """How many run, by Serve's word; one that is being stopped does not count."""
        from ray import serve

        states = serve.status().applications["memshard"].deployments["Shard"].replica_states
        return int(states.get("RUNNING", 0))

    async def until(self, count: int, deadline_s: float = 60.0) -> None:
        """Returns when so many shards run."""
        give_up = time.monotonic() + deadline_s
        while (running := await asyncio.to_thread(self.shards)) != count:
            assert time.monotonic() < give_up, f"{running} shards run, and not {count}"
            await asyncio.sleep(0.1)


class Person:
    """A user with a memory of their own. Every answer is checked, word by word."""

    def __init__(self, http: httpx.AsyncClient, name: str, facts: int) -> None:
        self._http = http
        self.name = name
        self.facts = [f"{name} owns the boat number {n}" for n in range(facts)]
        self.answers = 0
        self.over = asyncio.Event()

    async def tell(self) -> None:
        """Tells all facts."""
        messages = [{"role": "user", "content": fact} for fact in self.facts]
        told = await self._http.post("/v1/memories", json={"user_id": self.name, "messages": messages, "infer": False})
        assert told.status_code == 200, told.text

    async def chat(self) -> None:
        """One streamed answer, from all facts."""
        body = {
            "model": deterministic.NAME,
            "user_id": self.name,
            "messages": [{"role": "user", "content": "Which boat?"}],
            "memory": {"top_k": len(self.facts)},
            "stream": True,
        }
        pieces: list[str] = []
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                assert '"error"' not in line, line
                if '"content":"' in line:
                    pieces.append(line.partition('"content":"')[2].partition('"')[0])
        assert line == "" or line == "data: [DONE]"
        assert sorted("".join(pieces).split()) == sorted(answer(self.facts).split()), (self.name, pieces)
        self.answers += 1

    async def chat_until_over(self) -> None:
        """One answer after the other."""
        while not self.over.is_set():
            await self.chat()
