"""A real `memshard serve` for tests: two shards, real engine, real models, a state directory of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from cluster.models import prepare_language_model
from cluster.settings import Settings
from sharding.sealing import new_secret

START_S = 300.0  # 40 s on two idle cores
MODEL = "smollm2-135m-instruct"


class WholeServer:
    """Start, stop and start again on the same port and state directory."""

    def __init__(self, state_dir: Path) -> None:
        self._prepared = prepare_language_model(Settings.from_environment())
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = int(probe.getsockname()[1])
        self.state_dir = state_dir
        self.url = f"http://127.0.0.1:{self.port}"
        (state_dir / "models").mkdir(parents=True)
        (state_dir / "key").write_text(new_secret())
        (state_dir / "models" / self._prepared.name).symlink_to(self._prepared)

    def start(self) -> None:
        self.http = httpx.Client(base_url=self.url, timeout=60.0, trust_env=False)
        environment = {
            **os.environ,
            "MEMSHARD_STATE_DIR": str(self.state_dir),
            "MEMSHARD_PORT": str(self.port),
            "MEMSHARD_SHARDS": "2",
            "MEMSHARD_PREFILL_NEAREST": "0",  # injected from the first chat on, whatever the canary would find
            "MEMSHARD_KV_CACHE_BYTES": str(256 << 20),
            "MEMSHARD_CHUNK_DEVICE_BYTES": str(64 << 20),
            "MEMSHARD_CHUNK_SHARED_URL": str(self.state_dir / "shared"),
            "MEMSHARD_ENCRYPTION_KEY_FILE": str(self.state_dir / "key"),
            "MEMSHARD_LOG_LEVEL": "DEBUG",
            "VLLM_LOGGING_LEVEL": "DEBUG",
        }
        for name in ("VLLM_CPU_OMP_THREADS_BIND", "VLLM_ALLOW_INSECURE_SERIALIZATION"):
            environment.pop(name, None)  # other tests in this process set them for engines of their own
        command = Path(sys.executable).with_name("memshard")
        with (self.state_dir / "serve.log").open("a") as log:
            self.process = subprocess.Popen([command, "serve"], env=environment, stdout=log, stderr=log)
        give_up = time.monotonic() + START_S
        while True:
            alive = self.process.poll() is None and time.monotonic() < give_up
            assert alive, (self.state_dir / "serve.log").read_text()
            try:
                if self.http.get("/readyz").status_code == 200 and len(self.shards()) == 2:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(90)
        self.http.close()

    def wait_whole(self, replaced: frozenset[str] = frozenset()) -> frozenset[str]:
        """Wait until two shards answer that are not the pair `replaced`; their ids.

        A killed shard stays listed for as long as its last heartbeat is good, and is not reachable.
        """
        give_up = time.monotonic() + START_S
        while True:
            shards = self.shards()
            ids = frozenset(shard["shard"] for shard in shards)
            if len(shards) == 2 and all(shard["reachable"] for shard in shards) and ids != replaced:
                return ids
            assert time.monotonic() < give_up, shards
            time.sleep(0.5)

    def redis_process(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children(recursive=True)
        return next(child for child in children if "valkey-server" in child.name())

    # -- what tests ask ---------------------------------------------------------------------------------------------

    def shards(self) -> list[dict[str, Any]]:
        """Each shard's status as of now."""
        shards: list[dict[str, Any]] = self.http.get("/status").json()["shards"]
        return shards

    def remember(self, user: str, *texts: str) -> list[dict[str, Any]]:
        body = {"user_id": user, "messages": [{"role": "user", "content": t} for t in texts], "infer": False}
        answer = self.http.post("/v1/memories", json=body)
        assert answer.status_code == 200, answer.text
        results: list[dict[str, Any]] = answer.json()["results"]
        return results

    def memories(self, user: str) -> list[dict[str, Any]]:
        answer = self.http.get("/v1/memories", params={"user_id": user})
        assert answer.status_code == 200, answer.text
        results: list[dict[str, Any]] = answer.json()["results"]
        return results

    def wait_encoded(self, user: str) -> None:
        give_up = time.monotonic() + 60
        while not all(fact["encoded"] for fact in self.memories(user)):
            assert time.monotonic() < give_up, "facts were never encoded"
            time.sleep(0.1)

    def ask(self, user: str | None, question: str, *, max_tokens: int = 8, **fields: Any) -> dict[str, Any]:
        body = {"model": MODEL, "messages": [{"role": "user", "content": question}], "temperature": 0}
        answer = self.http.post(
            "/v1/chat/completions", json={**body, "user_id": user, "max_tokens": max_tokens, **fields}
        )
        assert answer.status_code == 200, answer.text
        parsed: dict[str, Any] = answer.json()
        return parsed
