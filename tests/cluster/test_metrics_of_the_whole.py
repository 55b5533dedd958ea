"""A real Prometheus scrapes a real server: every metric that alerts and dashboard name is there, and counts."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.cluster.test_whole_path import FACTS
from tests.cluster.whole_server import WholeServer
from tests.k8s.test_alerts import ALERTS, QUERIES

NOT_OURS = {"kube_cronjob_status_last_successful_time"}


def names(query: str) -> set[str]:
    """The metrics that a query reads, as their families are called."""
    found = set(re.findall(r"\b(?:memshard_|vllm:|kube_)\w+", query))
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name in found}


@pytest.fixture
def asked(server: WholeServer) -> WholeServer:
    """A server that has remembered and answered."""
    server.remember("metrics", *FACTS)
    server.wait_encoded("metrics")
    for mode in ("inject", "prompt", "off"):
        server.ask("metrics", "Where does my sister live?", memory={"mode": mode})
    return server


def test_every_metric_that_is_watched_exists(asked: WholeServer) -> None:
    page = asked.http.get("/metrics").text
    there = set(re.findall(r"^# TYPE (\S+) ", page, re.MULTILINE))
    watched = set().union(*map(names, [*QUERIES, *(alert["expr"] for alert in ALERTS)])) - NOT_OURS
    assert watched - there == set()
    assert len(watched) > 15


@pytest.fixture
def prometheus(asked: WholeServer, tmp_path: Path) -> Iterator[httpx.Client]:
    if shutil.which("prometheus") is None:
        pytest.skip("Prometheus is not installed")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    target = {"job_name": "memshard", "static_configs": [{"targets": [f"127.0.0.1:{asked.port}"]}]}
    config = tmp_path / "prometheus.yml"
    config.write_text(yaml.safe_dump({"global": {"scrape_interval": "1s"}, "scrape_configs": [target]}))
    listen = f"--web.listen-address=127.0.0.1:{port}"
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}", listen]
    with (tmp_path / "prometheus.log").open("w") as log:
        running = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            yield client
    finally:
        running.send_signal(signal.SIGTERM)
        running.wait(20)


def test_prometheus_reads_the_page_and_its_numbers_are_those_of_the_requests(
    asked: WholeServer, prometheus: httpx.Client
) -> None:
    def value(query: str) -> float:
        give_up = time.monotonic() + 30
        while True:
            try:
                result: list[Any] = prometheus.get("/api/v1/query", params={"query": query}).json()["data"]["result"]
            except (httpx.TransportError, KeyError, ValueError):
                result = []
            if result:
                return float(result[0]["value"][1])
            assert time.monotonic() < give_up, query
            time.sleep(0.3)

    assert value('up{job="memshard"} == 1') == 1
    assert value("sum(memshard_shard_up)") == value("memshard_live_shards") == value("memshard_expected_shards") == 2
    for memory in ("inject", "prompt", "off"):
        assert value(f'sum(memshard_chats_total{{memory="{memory}"}})') >= 1
        assert value(f'sum(memshard_first_token_seconds_count{{memory="{memory}",at="engine"}})') >= 1
    for walk, step in (("chat", "owner"), ("chat", "embed"), ("chat", "search"), ("remember", "append")):
        assert value(f'sum(memshard_step_seconds_count{{walk="{walk}",step="{step}"}})') >= 1
    assert value('sum(memshard_step_seconds_count{walk="remember",step="encode"})') >= 1
    assert value('sum(memshard_tier_bytes{tier="device"})') > 0
    assert value("count(vllm:num_requests_running)") == 2, "one engine a shard, told apart by the shard's label"
    assert value('sum(memshard_http_requests_total{route="/v1/chat/completions",status="200"})') >= 3
