"""What KubeRay is told to serve, served here by `serve deploy`: the `cpu` overlay, with one shard and a real engine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from cluster.app import GATEWAY_RESOURCE, SHARD_RESOURCE
from cluster.embedded_redis import EmbeddedRedis
from cluster.models import prepare_language_model
from cluster.ray_node import ENVIRONMENT
from cluster.settings import Settings
from k8s.check import OVERLAYS, built
from tests.ports import free_ports

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl builds the overlay")

START_S = 240.0  # 55 s on two idle cores
BIN = Path(sys.executable).parent


def serve_config(port: int) -> dict[str, Any]:
    """The overlay's, but for the address and the number of shards, which this machine has memory for."""
    service = next(object_ for object_ in built(OVERLAYS / "cpu") if object_["kind"] == "RayService")
    config: dict[str, Any] = yaml.safe_load(service["spec"]["serveConfigV2"])
    config["http_options"] = {"host": "127.0.0.1", "port": port}
    config["applications"][0]["args"]["shards"] = 1
    return config


@contextmanager
def ray_head(environment: dict[str, str], dashboard: int, log: Path) -> Iterator[None]:
    """A node as KubeRay starts one, with a resource for each of our processes; stopped as Kubernetes stops a pod."""
    gcs, client, agent = free_ports(3)
    command = [BIN / "ray", "start", "--head", "--block", "--num-cpus=0", "--object-store-memory=100000000"]
    command += [f"--port={gcs}", f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1"]
    command += [f"--ray-client-server-port={client}", f"--dashboard-agent-listen-port={agent}", "--min-worker-port=0"]
    command += ["--max-worker-port=0", f'--resources={{"{SHARD_RESOURCE}": 1, "{GATEWAY_RESOURCE}": 1}}']
    directory = tempfile.mkdtemp(prefix="ms-", dir="/tmp")  # short: Unix sockets lie in it
    with log.open("w") as output:
        node = subprocess.Popen([*command, f"--temp-dir={directory}"], env=environment, stdout=output, stderr=output)
    try:
        wait(lambda: httpx.get(f"http://127.0.0.1:{dashboard}/api/version").status_code == 200, node, log)
        yield
    finally:
        started = psutil.Process(node.pid).children(recursive=True)
        node.send_signal(signal.SIGTERM)
        node.wait(90)
        _, left = psutil.wait_procs(started, timeout=20)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(directory, ignore_errors=True)
        assert not left, left


def wait(ready: Any, node: subprocess.Popen[bytes], log: Path) -> None:
    give_up = time.monotonic() + START_S
    while True:
        assert node.poll() is None, log.read_text()
        assert time.monotonic() < give_up, log.read_text()
        with suppress(httpx.TransportError):
            if ready():
                return
        time.sleep(0.3)


def test_the_overlays_application_starts_remembers_and_answers(tmp_path_factory: pytest.TempPathFactory) -> None:
    home = tmp_path_factory.mktemp("k8s")
    dashboard, port = free_ports(2)
    config = home / "serve.yaml"
    config.write_text(yaml.safe_dump(serve_config(port)))
    prepared = prepare_language_model(Settings.from_environment())
    with EmbeddedRedis(home / "redis") as redis:
        redis.wait_ready()
        environment = {**os.environ, **ENVIRONMENT, "RAY_AUTH_MODE": "disabled", "MEMSHARD_REDIS_URL": redis.url}
        environment |= {"MEMSHARD_CLUSTER": "blue", "MEMSHARD_PLACE_BY_RESOURCE": "true"}
        environment |= {"MEMSHARD_STATE_DIR": str(prepared.parent.parent), "PYTHONPATH": os.getcwd()}
        environment |= {"MEMSHARD_KV_CACHE_BYTES": str(256 << 20), "MEMSHARD_CHUNK_DEVICE_BYTES": str(64 << 20)}
        environment |= {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "15", "MEMSHARD_STOP_DEADLINE_S": "5"}
        log = home / "ray.log"
        url = f"http://127.0.0.1:{port}"
        with ray_head(environment, dashboard, log), httpx.Client(base_url=url, timeout=60) as http:
            command = [BIN / "serve", "deploy", "-a", f"http://127.0.0.1:{dashboard}", config]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            give_up = time.monotonic() + START_S
            while True:
                with suppress(httpx.TransportError):
                    if http.get("/readyz").status_code == 200:
                        break
                assert time.monotonic() < give_up, log.read_text()
                time.sleep(0.5)
            message = {"role": "user", "content": "My dog is called Biscuit."}
            told = http.post("/v1/memories", json={"user_id": "ada", "messages": [message], "infer": False})
            assert told.status_code == 200, told.text
            question = {"role": "user", "content": "What is my dog called?"}
            chat = {"model": "smollm2-135m-instruct", "user_id": "ada", "messages": [question], "max_tokens": 4}
            answer = http.post("/v1/chat/completions", json=chat)
            assert answer.status_code == 200, answer.text
            assert len(answer.json()["memory"]["fact_ids"]) == 1
            (shard,) = http.get("/status").json()["shards"]
            assert shard["reachable"]
