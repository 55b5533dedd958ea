"""What a process tells of itself: each step of the walks as a duration and a span, log lines as JSON.

    with step("chat", "search"):            memshard_step_seconds{walk="chat",step="search"}, and a span of that name
        …
    about(request_id=…, user=…, epoch=…)    stands on every later log line of this request, and goes along to the shard

Durations are kept in `prometheus_client`'s registry of the process, as vLLM's own metrics are; `exposition.py` makes
one page of all processes. Spans go to an OTLP endpoint where one is set, and cost next to nothing where none is.
Nothing here ever holds the text of a fact, a question or an answer; a user is a digest. Exceptions of others may quote
what they were given, so of those only the type is told, and where it was raised (`said`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from opentelemetry import context, propagate, trace
from opentelemetry.context import Context
from prometheus_client import Counter, Histogram, disable_created_metrics

from deployments.messages import MemoryUse
from deployments.recent import Recent
from deployments.settings import TelemetrySettings
from sharding.errors import MemshardError

disable_created_metrics()  # type: ignore[no-untyped-call]

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

STEP = Histogram("memshard_step_seconds", "Duration of one step of a walk.", ["walk", "step"], buckets=BUCKETS_S)
FIRST_TOKEN = Histogram(
    "memshard_first_token_seconds",
    "From a chat's arrival to its first token, by what memory was asked for; at the engine, and at the gateway.",
    ["memory", "at"],
    buckets=BUCKETS_S,
)
REQUESTS = Counter("memshard_http_requests", "Requests that a gateway answered.", ["method", "route", "status"])
REQUEST = Histogram("memshard_http_request_seconds", "Whole duration of a request.", ["route"], buckets=BUCKETS_S)
RECENT = Recent()
"""First tokens at the engine, by what memory was asked for."""
RETRIES = Counter("memshard_retries", "Calls sent again because the shard was not there.", ["reason"])

Carried = dict[str, str]
"""What goes along with a call to a shard: `request_id`, and the trace's context."""

SPEAK_OF_THE_MACHINE = (MemshardError, OSError, RuntimeError, MemoryError, ImportError, AssertionError)
MOST_CAUSES = 10

_about: ContextVar[dict[str, Any]] = ContextVar("memshard_about")
_tracer = trace.get_tracer("memshard")


@contextmanager
def step(walk: str, name: str) -> Iterator[None]:
    """A step of `walk` is taken inside; whatever is awaited in it counts. Not for generators that yield inside."""
    began = time.perf_counter()
    with span(f"{walk} {name}"):
        try:
            yield
        finally:
            STEP.labels(walk, name).observe(time.perf_counter() - began)


@contextmanager
def span(name: str, parent: Context | None = None) -> Iterator[trace.Span]:
    """A span that tells of an exception what `said` does."""
    with _tracer.start_as_current_span(
        name, context=parent, record_exception=False, set_status_on_exception=False
    ) as started:
        try:
            yield started
        except Exception as error:
            started.set_status(trace.StatusCode.ERROR, said(error))
            raise


def said(error: BaseException) -> str:
    """What may be told of an exception: all of one that speaks of us or of the machine, the type of any other."""
    name = type(error).__qualname__
    return f"{name}: {error}" if isinstance(error, SPEAK_OF_THE_MACHINE) else name


def _trace(error: BaseException) -> str:
    """The frames of an exception and of those that led to it, the first one first."""
    told: list[str] = []
    now: BaseException | None = error
    while now is not None and len(told) < MOST_CAUSES:
        told.append("".join(traceback.format_tb(now.__traceback__)) + said(now))
        now = now.__cause__ or (None if now.__suppress_context__ else now.__context__)
    return "\nwhich led to:\n".join(reversed(told))


def first_token(began_ns: int, use: MemoryUse) -> None:
    """The engine's first token is here; the prompt was handed over at `began_ns` (of `time.time_ns`)."""
    FIRST_TOKEN.labels(use.mode, "engine").observe(use.engine_ttft_s)
    RECENT.add(use.mode, use.engine_ttft_s)
    span = _tracer.start_span("chat first token", start_time=began_ns)
    span.set_attributes({"memshard.injected_tokens": use.injected_tokens, "memshard.fallback": use.fallback or ""})
    span.end()


def about(**facts: str | int | None) -> None:
    """Say on every later log line of this request what it is about. `user` is digested here."""
    if (user := facts.get("user")) is not None:
        facts["user"] = digest(str(user))
    try:
        _about.get().update(facts)
    except LookupError:
        _about.set(dict(facts))


def begun(**facts: str | int | None) -> None:
    """A request begins: as `about`, and nothing of an earlier one is left."""
    _about.set({})
    about(**facts)


def carried() -> Carried:
    """What to send along with a call, so that the shard's lines and spans belong to this request."""
    along: Carried = {}
    propagate.inject(along)
    if request_id := _about.get({}).get("request_id"):
        along["request_id"] = str(request_id)
    return along


def continued(along: Carried | None, **facts: str | int | None) -> None:
    """In a shard, at the start of a call: go on where the gateway was. Ends with the task that the call runs in."""
    along = along or {}
    begun(request_id=along.get("request_id"), **facts)
    context.attach(propagate.extract(along))


def digest(user: str) -> str:
    """A user as logs may name one: the same for the same user, and not to be turned back by reading it."""
    return hashlib.blake2b(user.encode(errors="surrogatepass"), digest_size=8, person=b"memshard-user").hexdigest()


def begin(settings: TelemetrySettings, process: str, name: str) -> None:
    """Once in a process, when it starts: log lines as JSON on stderr, spans to the endpoint if there is one."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines({"process": process, "name": name}))
    root = logging.getLogger()
    root.handlers = [handler]
    logging.getLogger("deployments").setLevel(settings.log_level)
    if settings.otlp_endpoint is not None:
        _export(settings.otlp_endpoint, process, name)


def _export(endpoint: str, process: str, name: str) -> None:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(
        resource=Resource.create({"service.name": f"memshard-{process}", "service.instance.id": name})
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces")))
    trace.set_tracer_provider(provider)


class JsonLines(logging.Formatter):
    """One object a line: time, level, logger, message, what the request is about, and `fields` of the record."""

    def __init__(self, always: Mapping[str, str]) -> None:
        super().__init__()
        self._always = dict(always)

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._always,
            **{key: value for key, value in _about.get({}).items() if value is not None},
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["trace"] = _trace(record.exc_info[1]) if record.exc_info[1] is not None else None
        return json.dumps(line, ensure_ascii=False, default=str)
