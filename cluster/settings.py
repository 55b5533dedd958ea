"""Everything an operator can set, read once at start-up and frozen.

Each field is an environment variable with the prefix `MEMSHARD_` (`shards` is `MEMSHARD_SHARDS`); `memshard serve`
overrides some of them by options. Consumers get the values they need passed in; nobody else reads the
environment. A value that cannot work stops the start with one sentence that names the variable.

Refused on purpose: settings files and reloading. A setting that changes needs a restart, so that every process of
the cluster agrees on it.
"""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from sharding.errors import StartupError
from sharding.sealing import HeldSecret, Seal

PREFIX = "MEMSHARD_"
LEAVE_S = 20.0
"""How long a shard that is too many may take to hand over its users, beside what it was asked."""

GIB = 1 << 30

Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(gt=0)]
Bytes = Annotated[int, Field(ge=1 << 20)]
TierBytes = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]


def default_state_dir() -> Path:
    """`memshard` below the XDG data directory, `~/.local/share` where `XDG_DATA_HOME` is unset."""
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "memshard"


class Settings(BaseSettings):
    """The settings of one cluster. Sizes are bytes, times are seconds, lengths are tokens, as the names say."""

    # Field docstrings are the descriptions; an empty variable counts as unset.
    model_config = SettingsConfigDict(
        env_prefix=PREFIX, frozen=True, env_ignore_empty=True, use_attribute_docstrings=True, protected_namespaces=()
    )

    host: str = "127.0.0.1"
    """Address that the gateway listens on."""
    port: Port = 8000
    """TCP port of the gateway."""
    gateways: Count = 1
    """Replicas of the stateless gateway."""
    shards: Annotated[int, Field(ge=0)] = 2
    """Shard replicas, each with an engine and the users it owns. 0, with `max_shards`: none while nobody asks."""
    max_shards: Count | None = None
    """Let the number of shards follow the load, from `shards` up to this many; None keeps `shards`."""
    scale_window_s: Seconds = 600.0
    """How long after a load has gone the shards that it needed are stopped."""
    scale_up_s: Seconds = 4.0
    """How long a load must last before a shard is started for it: longer than a burst, shorter than a person waits."""
    wake_deadline_s: Seconds = 60.0
    """How long a request waits for a first shard where `shards` is 0 and none runs; then it is refused with 503."""
    namespace: str = Field("memshard", pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")
    """Prefix of this installation's keys in Redis and its namespace in Ray; those that share a Redis differ in it."""
    cluster: str = Field("", max_length=253)
    """This cluster among those of one installation: while an upgrade replaces a cluster by another, both live, and each
    sends requests to its own shards only. Their users' facts are the same."""
    place_by_resource: bool = False
    """Run shards and gateways only on Ray nodes that offer the resource `memshard_shard` or `memshard_gateway`."""

    state_dir: Path = Field(default_factory=default_state_dir)
    """Directory of what outlives a restart: prepared models, the embedded Redis' data, logs. Used by one server
    at a time."""
    redis_url: str | None = None
    """Address of the durable store: `redis://host:port/db` (over TLS `rediss://`, a socket `unix://`),
    `redis+cluster://host:port,host:port`, or `redis+sentinel://host:port,host:port/name`; None starts an embedded
    server."""
    redis_grace_s: Seconds = 60.0
    """How long a user already placed is served from memory while Redis is away."""

    model: Path | None = None
    """Directory of the language model (Hugging Face layout); None is the packaged SmolLM2-135M-Instruct."""
    served_model_name: str | None = None
    """The model's name in the API; None is the model directory's name."""
    embedding_model: Path | None = None
    """Directory of the embedding model; None is the packaged all-MiniLM-L6-v2."""
    max_model_len: Annotated[int, Field(ge=64)] | None = None
    """Longest prompt plus answer, in tokens; None is what the model was trained for."""

    threads_per_shard: Count | None = None
    """CPU threads that a shard's engine computes with; None divides the machine's cores among its shards."""
    gpus_per_shard: Annotated[int, Field(ge=0)] = 0
    """GPUs of one shard, which its engine spans by tensor parallelism; 0 computes on CPU cores. Has never run with
    more: no machine at hand had a GPU."""
    kv_cache_bytes: Bytes = GIB
    """vLLM's paged KV cache, per shard."""
    chunk_device_bytes: Bytes = GIB
    """Budget of the chunk store beside that cache (on a CPU: main memory), per shard."""
    chunk_host_bytes: TierBytes = GIB // 2
    """Budget of the chunks that left the device, in pinned host memory, per shard; 0 turns it off."""
    chunk_disk_dir: Path | None = None
    """Directory of this machine that keeps chunks over restarts; None is `chunks` in the state directory."""
    chunk_disk_bytes: TierBytes = 8 * GIB
    """Budget of the chunk files there, per shard; 0 turns them off."""
    chunk_shared_url: str | None = None
    """Path or URL (any that fsspec opens) that all shards see; users who move find their chunks there. None: no such
    place."""
    chunk_shared_bytes: TierBytes = 64 * GIB
    """Budget of the chunk files there, for the users of one shard."""
    chunk_load_deadline_s: Seconds = 0.5
    """How long a chat waits for chunks from a slower tier; what is not there by then is prefilled as text."""
    rebalance: bool = False
    """Move users from shards that carry much more than the others, and cold users from full ones, while they talk. Also
    so where `max_shards` is set: a shard that comes has nobody yet."""
    move_nccl: bool = False
    """Between GPUs, let moving users' chunks travel over NCCL, not by way of the hosts. It has never run."""
    max_requests_in_flight: Count = 64
    """Chats that one shard works on at once; one more is answered 429."""
    request_deadline_s: Seconds = 120.0
    """Longest time a request may take in all, waiting included."""

    window_facts: Annotated[int, Field(ge=0)] = 20
    """How many of the preceding facts stand before a fact while it is encoded."""
    prefill_nearest: Annotated[int, Field(ge=0)] | None = None
    """How many of the facts nearest to the question are prefilled as text behind the injected rest. None lets a canary
    find the cheapest number with which this model answers as well as from text alone, and whether few facts are better
    prefilled altogether; until it is found, and where there is none, memory is served as text."""
    serve_stale: bool = True
    """Whether chunks that were encoded behind a fact's old text are served, beside the correction, until they are
    rebuilt; false drops them with the update, as a deletion does, and serves text meanwhile."""
    rebuild_after_s: Seconds = 60.0
    """How long anything may be stale before it is rebuilt; `inf` sets no time."""
    rebuild_stale_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of a user's tokens that may be stale; more is rebuilt at once. 1 sets no share."""
    top_k: Count = 10
    """Facts retrieved for a chat that does not ask for a number."""
    max_fact_tokens: Count = 256
    """Longest fact that is accepted, in tokens."""

    heartbeat_interval_s: Seconds = 1.0
    """Time between two heartbeats of a shard."""
    heartbeat_ttl_s: Seconds = 5.0
    """Silence after which a shard counts as gone."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Which of our own log lines are written; a line is a JSON object."""
    otlp_endpoint: str | None = Field(None, pattern=r"^https?://")
    """Base address of an OTLP/HTTP collector that traces are sent to; None: no traces."""
    require_keys: bool | None = None
    """Whether every request needs an API key (`memshard keys create`); None: where `host` is not this machine alone."""
    api_key: str | None = None
    """The key that this machine's own commands (`memshard status`, `demo`) show to the server."""
    encryption_key: SecretStr | None = None
    """Secret that texts, metadata, embeddings and turns are encrypted with in Redis, and chunks in files, 32 bytes in
    base64 (`memshard keys secret` makes one); None keeps them as they are. A store goes on with the secret that it
    began with; chunks in files of another one are encoded again."""
    encryption_key_file: Path | None = None
    """File that holds that secret, instead."""
    tenant_requests_per_minute: Count | None = None
    """Requests that one tenant may send in a minute; None is no limit, as with those below."""
    user_requests_per_minute: Count | None = None
    """Chats and adds of one user in a minute."""
    tenant_tokens_per_minute: Count | None = None
    """Tokens of prompts and answers of one tenant in a minute."""
    user_tokens_per_minute: Count | None = None
    """Tokens of prompts and answers of one user in a minute."""
    tenant_bytes: Count | None = None
    """Bytes that all facts of one tenant may have."""
    user_bytes: Count | None = None
    """Bytes that the facts of one user may have."""

    start_deadline_s: Seconds = 300.0
    """Longest time from the start of Ray to a ready gateway; the first preparation of a model is not in it."""
    stop_deadline_s: Seconds = 20.0
    """Time that running requests get to finish after a stop was asked for; what is left then is killed."""

    @field_validator("state_dir", "model", "embedding_model", "chunk_disk_dir", "encryption_key_file")
    @classmethod
    def _absolute(cls, path: Path | None) -> Path | None:
        """Resolve `~` and relative paths now: the cluster's processes run in other directories."""
        return None if path is None else path.expanduser().absolute()

    @field_validator("redis_url")
    @classmethod
    def _known_scheme(cls, url: str | None) -> str | None:
        if url is not None and not re.match(r"(rediss?(\+cluster|\+sentinel)?|unix)://", url):
            raise ValueError("must start with redis://, rediss://, unix://, redis+cluster:// or redis+sentinel://")
        return url

    @model_validator(mode="after")
    def _room_to_scale(self) -> Self:
        if self.max_shards is not None and self.max_shards < self.shards:
            raise ValueError(f"{PREFIX}MAX_SHARDS is below {PREFIX}SHARDS, the number that it may grow from")
        if self.most_shards == 0:
            raise ValueError(f"{PREFIX}SHARDS is 0: {PREFIX}MAX_SHARDS must say how many may be started")
        return self

    @model_validator(mode="after")
    def _ttl_survives_a_lost_heartbeat(self) -> Self:
        if self.heartbeat_ttl_s < 2 * self.heartbeat_interval_s:
            raise ValueError(
                f"{PREFIX}HEARTBEAT_TTL_S must be at least twice {PREFIX}HEARTBEAT_INTERVAL_S, "
                "or one late heartbeat moves users"
            )
        return self

    @model_validator(mode="after")
    def _keys_where_others_can_call(self) -> Self:
        if self.require_keys is False and not self.is_loopback:
            raise ValueError(f"{PREFIX}REQUIRE_KEYS may be false on a loopback address only, and {self.host} is none")
        return self

    def encryption_secret(self) -> HeldSecret | None:
        """The secret that what people said is encrypted with, or None. Every process finds it for itself.

        Raises:
            StartupError: it is not where every process can find it, or what is there is no secret.
        """
        if self.encryption_key_file is not None:
            secret = HeldSecret.found(file=str(self.encryption_key_file))
        elif self.encryption_key is not None:
            secret = HeldSecret.found(variable=f"{PREFIX}ENCRYPTION_KEY")
        else:
            return None
        Seal(secret)  # refuses what is none
        return secret

    @property
    def most_shards(self) -> int:
        """How many shards there may be at a time."""
        return self.max_shards or self.shards

    @property
    def shard_stop_s(self) -> float:
        """How long a shard that is stopped may take. Where their number follows the load nothing waits for one that is
        too many: every request that it has begun may end."""
        if self.max_shards is None:
            return self.stop_deadline_s
        return max(self.stop_deadline_s, self.request_deadline_s + LEAVE_S)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can call."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def keys_required(self) -> bool:
        """Whether every request needs an API key."""
        return not self.is_loopback if self.require_keys is None else self.require_keys

    @property
    def base_url(self) -> str:
        """The gateway's address as a client on this machine spells it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        return f"http://{host}:{self.port}"

    @classmethod
    def from_environment(cls, **overrides: Any) -> Settings:
        """Read the environment; `overrides` that are not None win over it.

        Raises:
            StartupError: a value is malformed or out of range; the message names its variable.
        """
        try:
            return cls(**{name: value for name, value in overrides.items() if value is not None})
        except ValidationError as refused:
            raise StartupError(_first_problem(refused)) from None


def _first_problem(refused: ValidationError) -> str:
    """The first of pydantic's complaints as one sentence."""
    problem = refused.errors(include_url=False)[0]
    reason = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"]:
        return reason
    return f"{PREFIX}{str(problem['loc'][0]).upper()} is {problem['input']!r}: {reason}"
