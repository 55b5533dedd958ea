"""What the gateway and the shard replica need to know, as plain frozen values; `cluster/` fills them in."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TelemetrySettings:
    """What processes tell of themselves, beside metrics."""

    log_level: str = "INFO"  # of our own log lines
    otlp_endpoint: str | None = None  # base address of an OTLP/HTTP collector for traces; None: no traces


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Settings of one gateway process."""

    model: str  # the name that is served, and that requests must give
    expected_shards: int = 1  # replicas that the cluster is meant to have at least, for /status
    most_shards: int = 0  # as many as there may be where their number follows the load; 0: `expected_shards`
    default_top_k: int = 10  # facts retrieved for a chat that does not say
    max_top_k: int = 100
    deadline_s: float = 120.0  # the longest that a request may take in all, its last token included
    patience_s: float = 8.0  # how long a shard that cannot be reached, but has a heartbeat, is tried again
    wake_s: float = 0.0  # how long a request waits for a first shard where none runs
    max_fact_chars: int = 8_192  # of one fact's text
    max_facts_per_call: int = 100  # messages in one POST /v1/memories
    max_body_bytes: int = 1 << 20
    cached_users: int = 100_000  # placements held in this process
    reports_ttl_s: float = 1.0  # how long heartbeats read from Redis are believed
    require_keys: bool = False
    tenant_requests_per_minute: int | None = None  # None is no limit, as with the three below
    user_requests_per_minute: int | None = None
    tenant_tokens_per_minute: int | None = None  # of prompts and answers
    user_tokens_per_minute: int | None = None
    status_deadline_s: float = 2.0  # how long /status and /readyz wait for an answer
    pages_interval_s: float = 5.0  # how often a gateway shows the others its metrics
    telemetry: TelemetrySettings = TelemetrySettings()


@dataclass(frozen=True, slots=True)
class ShardSettings:
    """Settings of one shard replica. Lengths are tokens, sizes bytes, times seconds."""

    model: str  # the name that is served
    model_path: Path
    embedding_path: Path
    redis_url: str
    namespace: str
    shards: int  # replicas on this machine's cores
    threads: int | None  # CPU threads of the engine; None divides the cores among the shards
    max_model_len: int | None
    kv_cache_bytes: int
    chunk_device_bytes: int
    window_facts: int
    max_fact_tokens: int
    max_requests_in_flight: int
    heartbeat_interval_s: float
    heartbeat_ttl_s: float
    redis_grace_s: float
    chunk_host_bytes: int = 0
    chunk_disk_dir: Path | None = None
    chunk_disk_bytes: int = 0
    chunk_shared_url: str | None = None
    chunk_shared_bytes: int = 0
    chunk_load_deadline_s: float = 0.5
    move_nccl: bool = False  # between GPUs
    rebalance: bool = False  # move users from overloaded shards to others
    rebalance_every_s: float = 10.0
    drain_s: float = 5.0  # how long a shard that stops moves users to others
    encryption_key: str | None = field(default=None, repr=False)  # for what people said; see sealing.py
    user_bytes: int | None = None  # of one user's facts; None is no limit
    tenant_bytes: int | None = None  # of all facts of a tenant
    prefill_nearest: int | None = 0  # injected facts that are prefilled all the same; None: as the canary finds best
    serve_stale: bool = True  # what was encoded behind a text that was corrected, until it is rebuilt
    rebuild_after_s: float = 60.0  # how long something may be stale
    rebuild_stale_share: float = 0.5  # of a user's tokens that may be stale
    resident_users: int = 10_000  # users whose facts and index are in the replica's memory
    cluster: str = ""  # among those of the namespace; its shards know only each other
    gpus: int = 0  # that the engine spans; 0: CPU cores
    active_s: float = 600.0  # how long a user counts as active, for the number of shards
    telemetry: TelemetrySettings = TelemetrySettings()
