"""One page of metrics out of several processes, in Prometheus' text format.

Any gateway answers for the whole cluster: a shard's numbers come out of its status, its durations (and vLLM's own
metrics) out of its process, other gateways' out of Redis. Each process' samples carry its id as a label, so it does not
matter which gateway a scrape reaches. Names are stable; what a shard counts under a new name appears by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

GAUGES = {
    "users": ("memshard_resident_users", "Users whose memory is in the shard."),
    "facts": ("memshard_resident_facts", "Facts of those users."),
    "chunks": ("memshard_chunks", "Chunks that can be injected from the device."),
    "requests_in_flight": ("memshard_requests_in_flight", "Chats that the shard works on."),
    "encode_backlog": ("memshard_encode_backlog_chunks", "Chunks that are waited for; served as text meanwhile."),
    "stale_chunks": ("memshard_stale_chunks", "Chunks encoded behind texts that were corrected since, until rebuilt."),
    "stale_tokens": ("memshard_stale_tokens", "Tokens of the facts that rebuilds would encode."),
}
"""By field of a shard's status."""

LABELLED = {
    "chats": ("memshard_chats", "memory", "Chats by what memory was asked for."),
    "memory_tokens_prefilled": (
        "memshard_memory_tokens_prefilled",
        "reason",
        "Tokens of memory that were prefilled as text instead of injected.",
    ),
    "found": ("memshard_chunks_found", "tier", "Chunks that chats asked for, by the tier they were found in."),
}
"""Counters of a status that are families: what comes behind the name is the label's value."""

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? ", re.ASCII)


def own() -> str:
    """The metrics of this process."""
    return generate_latest(REGISTRY).decode()


def of_status(status: Mapping[str, Any]) -> str:
    """A shard's numbers out of its status, be it from the shard or from its last heartbeat."""
    registry = CollectorRegistry()
    registry.register(_Status(status))
    return generate_latest(registry).decode()


class _Status(Collector):
    def __init__(self, status: Mapping[str, Any]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status
        for field, (name, help_) in GAUGES.items():
            yield GaugeMetricFamily(name, help_, value=status.get(field, 0))
        held = GaugeMetricFamily("memshard_tier_bytes", "Bytes of chunks in a tier.", labels=["tier"])
        budget = GaugeMetricFamily("memshard_tier_budget_bytes", "Most bytes that a tier may hold.", labels=["tier"])
        for tier, bytes_, budget_bytes in status.get("tiers", ()):
            held.add_metric([tier], bytes_)
            budget.add_metric([tier], budget_bytes)
        yield from (held, budget)
        yield from _canary(status.get("canary"))
        yield from _counters(status.get("counters", {}))


def _canary(verdict: Mapping[str, Any] | None) -> Iterator[Metric]:
    if verdict is not None:
        says = "1 where memory is injected, 0 where the canary failed and it is served as text."
        injected = verdict.get("prefill_nearest") is not None
        yield GaugeMetricFamily("memshard_canary_injects", says, value=float(injected))


def _counters(counters: Mapping[str, Any]) -> Iterator[Metric]:
    families = {
        prefix: CounterMetricFamily(name, help_, labels=[label]) for prefix, (name, label, help_) in LABELLED.items()
    }
    for key, value in counters.items():
        if not isinstance(value, int | float):
            continue
        prefix = next((prefix for prefix in LABELLED if key.startswith(f"{prefix}_")), None)
        if prefix is not None:
            families[prefix].add_metric([key.removeprefix(f"{prefix}_")], value)
        else:
            yield CounterMetricFamily(f"memshard_{key}", f"{key.replace('_', ' ')}, since the shard's start.", value)
    yield from families.values()


def merged(pages: Iterable[tuple[str, str, str]]) -> str:
    """One page of several: (label, its value, page). Every sample gets the label; a family's samples stand together."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    for label, value, page in pages:
        family: tuple[list[str], list[str]] = ([], [])
        for line in page.splitlines():
            if line.startswith("# HELP "):
                family = families.setdefault(line.split(" ", 3)[2], ([], []))
                if not family[0]:
                    family[0].append(line)
            elif line.startswith("# TYPE "):
                if len(family[0]) == 1:
                    family[0].append(line)
            elif line:
                family[1].append(_labelled(line, f'{label}="{value}"' if label else ""))
    lines = [line for head, samples in families.values() for line in (*head, *samples)]
    return "\n".join(lines) + "\n"


def _labelled(line: str, label: str) -> str:
    found = _SAMPLE.match(line)
    if found is None or not label:
        return line
    labels = ",".join(filter(None, (found[2], label)))
    return f"{found[1]}{{{labels}}} {line[found.end() :]}"
