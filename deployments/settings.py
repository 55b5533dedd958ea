"""What the gateway needs to know, as plain frozen values; `cluster/` fills them in from its own settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Settings of one gateway process."""

    model: str  # the name that is served, and that requests must give
    expected_shards: int = 1  # replicas that the cluster is meant to have, for /status
    default_top_k: int = 10  # facts retrieved for a chat that does not say
    max_top_k: int = 100
    deadline_s: float = 120.0  # the longest that a request may take in all, its last token included
    max_fact_chars: int = 8_192  # of one fact's text
    max_facts_per_call: int = 100  # messages in one POST /v1/memories
    max_body_bytes: int = 1 << 20
    cached_users: int = 100_000  # placements held in this process
    reports_ttl_s: float = 1.0  # how long heartbeats read from Redis are believed
    status_deadline_s: float = 2.0  # how long /status and /readyz wait for an answer
