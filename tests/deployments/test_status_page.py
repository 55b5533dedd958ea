"""The page at `/`: what it shows exists, and a browser shows it."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path

import httpx
import pytest

from deployments.health_api import PAGE
from deployments.messages import ShardStatus
from deployments.recent import WINDOW_S, Recent

CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")


async def test_it_is_served(client: httpx.AsyncClient) -> None:
    answer = await client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.text == PAGE


def test_every_field_that_it_reads_is_in_the_status() -> None:
    shard = {field.name for field in fields(ShardStatus)} | {"reachable"}
    read = set(re.findall(r'data-field="(\w+)"', PAGE)) | set(re.findall(r"\bshard\.(\w+)", PAGE))
    assert read <= shard
    assert {"users", "encode_backlog", "tiers", "latencies", "ready"} <= read
    assert set(re.findall(r"\bstatus\.(\w+)", PAGE)) == {"model", "expected", "most", "shards"}


def test_it_loads_nothing_from_elsewhere() -> None:
    assert not re.search(r"(src|href)=|https?://|@import", PAGE)


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_a_browser_shows_the_shards(server_url: str, tmp_path: Path) -> None:
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path}"]
    command = [CHROMIUM, *flags, "--virtual-time-budget=3000", "--dump-dom", server_url]
    shown = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, timeout=60)
    assert "2 of 2 shards" in shown.stdout, shown
    rows = re.findall(r"<tr><td>(shard-\w)</td><td class=\"good\">ready</td>", shown.stdout)
    assert rows == ["shard-a", "shard-b"]
    assert "10 B of 100 B" in shown.stdout


def test_latencies_are_of_the_last_minutes() -> None:
    now = 0.0
    recent = Recent(lambda: now)
    for took_s in (0.1, 0.2, 0.3):
        recent.add("inject", took_s)
    now = WINDOW_S / 2
    recent.add("prompt", 2.0)
    assert recent.summary()["inject"] == {"chats": 3, "p50_s": pytest.approx(0.2), "p95_s": pytest.approx(0.29)}
    now = WINDOW_S + 1
    assert list(recent.summary()) == ["prompt"]
