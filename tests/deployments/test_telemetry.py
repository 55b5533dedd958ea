"""Log lines and spans of one request, from the gateway into the shard."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
from gateway_fakes import MODEL, Cluster
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from deployments import telemetry
from deployments.telemetry import Carried, JsonLines, about, begun, carried, continued, digest, step

SECRET = "The blue kettle is in the attic"


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonLines({"process": "gateway", "name": "g1"}))
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


@pytest.fixture
def lines() -> Iterator[list[str]]:
    handler, log = Lines(), logging.getLogger("deployments")
    level = log.level
    log.addHandler(handler)
    log.setLevel("DEBUG")
    yield handler.lines
    log.removeHandler(handler)
    log.setLevel(level)


@pytest.fixture(scope="session")
def exporter() -> InMemorySpanExporter:
    """A process has one provider of spans for good."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


async def test_a_request_is_one_line_that_says_what_it_was_about(
    client: httpx.AsyncClient, cluster: Cluster, lines: list[str]
) -> None:
    cluster.place("ada")
    await client.post(
        "/v1/chat/completions",
        json={"model": MODEL, "messages": [{"role": "user", "content": SECRET}], "user_id": "ada"},
        headers={"X-Request-ID": "r-17"},
    )
    (line,) = [json.loads(line) for line in lines if '"answered"' in line]
    assert (line["request_id"], line["shard"], line["epoch"]) == ("r-17", "shard-a", 1)
    assert (line["method"], line["route"], line["status"]) == ("POST", "/v1/chat/completions", 200)
    assert (line["process"], line["name"], line["level"]) == ("gateway", "g1", "INFO")
    assert line["user"] == digest("ada")


async def test_neither_a_fact_nor_a_question_nor_a_user_is_ever_in_a_line(
    client: httpx.AsyncClient, cluster: Cluster, lines: list[str]
) -> None:
    message = {"role": "user", "content": SECRET}
    await client.post("/v1/memories", json={"user_id": "ada-lovelace", "messages": [message], "infer": False})
    chat = {"model": MODEL, "messages": [message], "user_id": "ada-lovelace"}
    await client.post("/v1/chat/completions", json=chat)
    cluster.shards.of("ada-lovelace").break_with = RuntimeError("the shard fails")
    await client.post("/v1/chat/completions", json=chat)
    assert len(lines) >= 3
    assert not [line for line in lines if SECRET in line or "ada-lovelace" in line]


async def test_the_shards_lines_carry_the_gateways_request(lines: list[str]) -> None:
    begun(request_id="r-1")
    about(shard="s1", user="ada")
    along = carried()

    async def in_the_shard() -> None:
        continued(along, user="ada", epoch=3)
        logging.getLogger("deployments.shard").warning("a line")

    await asyncio.create_task(in_the_shard())
    line = json.loads(lines[-1])
    assert (line["request_id"], line["epoch"], line["user"]) == ("r-1", 3, digest("ada"))
    assert "shard" not in line, "the shard says itself who it is"


def test_a_failure_is_one_line_with_its_trace(lines: list[str]) -> None:
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        logging.getLogger("deployments.shard").exception("it failed")
    line = json.loads(lines[-1])
    assert line["message"] == "it failed"
    assert line["trace"].endswith("RuntimeError: broken")


def quoted() -> None:
    """Raises what quotes a fact, as others' exceptions may."""
    try:
        raise UnicodeDecodeError("utf-8", SECRET.encode(), 0, 1, SECRET)
    except ValueError as error:
        raise KeyError(SECRET) from error


def test_what_others_exceptions_quote_is_in_no_line(lines: list[str]) -> None:
    try:
        quoted()
    except KeyError:
        logging.getLogger("deployments.shard").exception("it failed")
    line = json.loads(lines[-1])
    assert SECRET not in lines[-1]
    assert [part for part in line["trace"].split() if part.endswith("Error")] == ["UnicodeDecodeError", "KeyError"]
    assert "in quoted" in line["trace"]


async def test_what_others_exceptions_quote_is_in_no_span_nor_is_a_user(
    exporter: InMemorySpanExporter, client: httpx.AsyncClient, cluster: Cluster
) -> None:
    exporter.clear()
    with pytest.raises(KeyError), step("chat", "search"):
        quoted()
    cluster.place("ada-lovelace")
    cluster.shards.of("ada-lovelace").break_with = KeyError(SECRET)
    chat = {"model": MODEL, "messages": [{"role": "user", "content": SECRET}], "user_id": "ada-lovelace"}
    assert (await client.post("/v1/chat/completions", json=chat)).status_code == 500
    await client.delete("/v2/entities/user/ada-lovelace/")
    spans = exporter.get_finished_spans()
    told = " ".join(span.to_json() for span in spans)
    assert {"chat search", "POST /v1/chat/completions"} < {span.name for span in spans}
    assert "KeyError" in told
    assert SECRET not in told
    assert "ada-lovelace" not in told


async def test_a_request_is_one_trace_with_a_span_a_step_across_processes(
    exporter: InMemorySpanExporter, client: httpx.AsyncClient, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter.clear()
    sent: list[Carried] = []
    real_chat = cluster.shards.chat

    async def chat(*args: object) -> object:
        sent.append(carried())  # what `ShardClient` sends along
        async for event in real_chat(*args):  # type: ignore[arg-type]
            yield event

    monkeypatch.setattr(cluster.shards, "chat", chat)
    await client.post(
        "/v1/chat/completions", json={"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "user_id": "ada"}
    )

    async def in_the_shard() -> None:
        continued(sent[0])
        with step("chat", "search"):
            pass

    await asyncio.create_task(in_the_shard())
    spans = {span.name: span for span in exporter.get_finished_spans()}
    request, owner, search = (spans[name] for name in ("POST /v1/chat/completions", "chat owner", "chat search"))
    assert request.context is not None
    assert {span.context.trace_id for span in (request, owner, search) if span.context} == {request.context.trace_id}
    for span in (owner, search):
        assert span.parent is not None
        assert span.parent.span_id == request.context.span_id


def test_a_step_that_fails_is_measured_too() -> None:
    def count() -> float:
        samples = next(iter(telemetry.STEP.collect())).samples
        found = (s.value for s in samples if s.name.endswith("_count") and s.labels["step"] == "of a test")
        return next(found, 0.0)

    before = count()
    with pytest.raises(RuntimeError), step("chat", "of a test"):
        raise RuntimeError("broken")
    assert count() == before + 1


EXPORTS = """
import http.server, threading
from deployments.settings import TelemetrySettings
from deployments.telemetry import begin, step

class Collector(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        print(self.path, b"chat search" in body, b"memshard-shard" in body, b"s1" in body)
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args): pass

server = http.server.HTTPServer(("127.0.0.1", 0), Collector)
threading.Thread(target=server.serve_forever, daemon=True).start()
begin(TelemetrySettings(otlp_endpoint=f"http://127.0.0.1:{server.server_port}/"), "shard", "s1")
with step("chat", "search"):
    pass
from opentelemetry import trace
trace.get_tracer_provider().force_flush()
"""


def test_spans_go_to_the_endpoint_that_is_set() -> None:
    environment = {**os.environ, "OTEL_EXPORTER_OTLP_COMPRESSION": "none"}
    command = [sys.executable, "-W", "ignore", "-c", EXPORTS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.strip() == "/v1/traces True True True", done.stderr
