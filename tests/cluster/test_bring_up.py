"""`memshard serve` from nothing to an address and back to nothing, the application stood in for by `stand_in.py`."""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
import redis

STAND_IN = Path(__file__).with_name("stand_in.py")
START_S = 120.0  # 15 s on two idle cores

Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
def start(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> Start:
    monkeypatch.setenv("MEMSHARD_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("MEMSHARD_PORT", str(port))
    monkeypatch.setenv("MEMSHARD_KV_CACHE_BYTES", str(1 << 20))
    monkeypatch.setenv("MEMSHARD_CHUNK_DEVICE_BYTES", str(1 << 20))

    def started(kind: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(STAND_IN), kind], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    return started


def processes_of(state_dir: Path) -> list[str]:
    """Every running process that inherited this state directory, wherever in the process tree it is."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("MEMSHARD_STATE_DIR") == str(state_dir) and process.pid != psutil.Process().pid:
                found.append(f"{process.pid} {process.name()}")
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # a zombie has no environment either
    return found


def wait_ready(server: subprocess.Popen[str], port: int) -> httpx.Response:
    give_up = time.monotonic() + START_S
    while time.monotonic() < give_up and server.poll() is None:
        try:
            answer = httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=5.0)
        except httpx.TransportError:
            time.sleep(0.1)
            continue
        if answer.status_code == 200:
            return answer
    raise AssertionError(f"not ready: {server.communicate()}")


def test_it_serves_until_it_is_told_to_stop_and_leaves_nothing_behind(tmp_path: Path, port: int, start: Start) -> None:
    server = start("healthy")
    redis_url = wait_ready(server, port).json()["redis_url"]
    with redis.Redis.from_url(redis_url) as client:
        assert client.config_get("appendfsync") == {"appendfsync": "always"}
    assert len(processes_of(tmp_path)) > 5
    lines: list[str] = []
    assert server.stdout is not None
    while not lines or "Ctrl-C" not in lines[-1]:
        lines.append(server.stdout.readline())

    server.send_signal(signal.SIGINT)
    out, err = server.communicate(timeout=60)

    assert server.returncode == 0, err
    assert processes_of(tmp_path) == []
    shown = "".join(lines)
    assert f"serves smollm2-135m-instruct at http://127.0.0.1:{port}\n" in shown
    curls = [shlex.split(line) for line in lines if line.strip().startswith("curl ")]
    assert [curl[1].removeprefix(f"http://127.0.0.1:{port}") for curl in curls] == [
        "/v1/memories",
        "/v1/chat/completions",
    ]
    assert json.loads(curls[0][-1])["infer"] is False
    assert out.splitlines()[-1] == "==> Stopping"
    assert (tmp_path / "logs" / "serve").is_dir()


def test_a_replica_that_refuses_to_start_ends_it_with_the_reason(tmp_path: Path, start: Start) -> None:
    server = start("refused")
    _, err = server.communicate(timeout=START_S)
    assert server.returncode == 1
    assert err == "memshard: The model's rotary embedding changes with the length; it cannot be served exactly\n"
    assert processes_of(tmp_path) == []


def test_a_stop_during_the_start_undoes_what_was_started(tmp_path: Path, start: Start) -> None:
    server = start("healthy")
    assert server.stdout is not None
    while not re.match(r"==> Starting \d shards", server.stdout.readline()):
        assert server.poll() is None
    server.send_signal(signal.SIGTERM)
    _, err = server.communicate(timeout=60)
    assert (server.returncode, err) == (130, "")
    assert processes_of(tmp_path) == []
