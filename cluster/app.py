"""The composition root: plain classes become Serve deployments here, and nowhere else.

`memshard serve` calls `build`; `serve deploy` and KubeRay name `cluster.app:application` as the import path.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from cluster.models import embedding_model, model_name, prepare_language_model
from cluster.settings import PREFIX, Settings
from connector.template import PromptTemplate
from deployments.gateway import GatewayReplica, GatewayStores
from deployments.quotas import quotas_of
from deployments.replica import OpenShard, ShardReplica
from deployments.router import PinnedRouter
from deployments.settings import GatewaySettings, ShardSettings, TelemetrySettings
from deployments.unattended import Unattended
from sharding.api_keys import KeyStore
from sharding.client import connect
from sharding.directory import Directory
from sharding.errors import StartupError
from sharding.facts import FactStore
from sharding.keys import KeySpace
from sharding.limits import Minutes
from sharding.pages import Pages
from sharding.placement import PlacementPolicy
from sharding.registry import Registry
from sharding.sealing import Seal

REPORT_S = 2.0
"""How often a shard reports its load to the autoscaler, at most."""

ENCODE_BACKLOG_A_SHARD = 500
"""Chunks that one shard may be behind with: a minute or two of encoding on a CPU, seconds on a GPU."""

REBALANCE_S = 10.0
"""How often a shard looks whether it carries too much, at least."""

SHARD_RESOURCE = "memshard_shard"
GATEWAY_RESOURCE = "memshard_gateway"
"""What a Ray node offers, once for each shard or gateway that may run on it (see `Settings.place_by_resource`)."""


def application(args: dict[str, Any]) -> serve.Application:
    """The application of a cluster that somebody else started: settings from the environment, `args` over them.

    `args` names fields of `Settings`. What it changes is rolled out in place by Serve.

    Raises:
        StartupError: a setting is wrong or unknown, or no Redis is named: there is no embedded one here.
    """
    settings = Settings.from_environment(**args)
    if settings.redis_url is None:
        raise StartupError(f"{PREFIX}REDIS_URL is needed where `memshard serve` does not bring a Redis along")
    return build(
        settings,
        redis_url=settings.redis_url,
        model_path=prepare_language_model(settings),
        embedding_path=embedding_model(settings),
    )


def build(
    settings: Settings,
    *,
    redis_url: str,
    model_path: Path,
    embedding_path: Path,
    open_shard: OpenShard | None = None,
    open_template: Callable[[Path], PromptTemplate] | None = None,
) -> serve.Application:
    """The gateway in front of the shards, as one Serve application. `open_shard`: see `ShardReplica`; `open_template`
    reads the tokenizer in `model_path`, by default the product's own."""
    model = model_name(settings)
    shards = serve.deployment(
        ShardReplica,
        name="Shard",
        **how_many(settings),
        # Admission is the shard's own: a request that Serve queued would wait instead of being answered 429.
        max_ongoing_requests=4 * settings.max_requests_in_flight,
        health_check_period_s=2,
        health_check_timeout_s=30,
        request_router_config=RequestRouterConfig(request_router_class=PinnedRouter),
        ray_actor_options=_actor_options(settings, SHARD_RESOURCE, gpus=settings.gpus_per_shard),
    )
    gateways = serve.deployment(
        serve.ingress()(GatewayReplica),
        name="Gateway",
        num_replicas=settings.gateways,
        max_ongoing_requests=1024,
        graceful_shutdown_timeout_s=settings.stop_deadline_s,
        ray_actor_options=_actor_options(settings, GATEWAY_RESOURCE),
    )
    telemetry = TelemetrySettings(settings.log_level, settings.otlp_endpoint)
    shard_settings = ShardSettings(
        model=model,
        model_path=model_path,
        embedding_path=embedding_path,
        redis_url=redis_url,
        namespace=settings.namespace,
        cluster=settings.cluster,
        gpus=settings.gpus_per_shard,
        telemetry=telemetry,
        shards=settings.most_shards,
        active_s=settings.scale_window_s / 2,
        threads=settings.threads_per_shard,
        max_model_len=settings.max_model_len,
        kv_cache_bytes=settings.kv_cache_bytes,
        chunk_device_bytes=settings.chunk_device_bytes,
        chunk_host_bytes=settings.chunk_host_bytes,
        chunk_disk_dir=settings.chunk_disk_dir or settings.state_dir / "chunks" / settings.namespace,
        chunk_disk_bytes=settings.chunk_disk_bytes,
        chunk_shared_url=settings.chunk_shared_url,
        chunk_shared_bytes=settings.chunk_shared_bytes,
        chunk_load_deadline_s=settings.chunk_load_deadline_s,
        rebalance=settings.rebalance or settings.max_shards is not None,
        rebalance_every_s=min(REBALANCE_S, settings.scale_window_s / 4),
        move_nccl=settings.move_nccl,
        window_facts=settings.window_facts,
        prefill_nearest=settings.prefill_nearest,
        serve_stale=settings.serve_stale,
        rebuild_after_s=settings.rebuild_after_s,
        rebuild_stale_share=settings.rebuild_stale_share,
        max_fact_tokens=settings.max_fact_tokens,
        max_requests_in_flight=settings.max_requests_in_flight,
        heartbeat_interval_s=settings.heartbeat_interval_s,
        heartbeat_ttl_s=settings.heartbeat_ttl_s,
        redis_grace_s=settings.redis_grace_s,
        encryption_key=settings.encryption_secret(),
        user_bytes=settings.user_bytes,
        tenant_bytes=settings.tenant_bytes,
    )
    patience_s = settings.heartbeat_ttl_s + 3.0  # until a shard that cannot be reached counts as gone
    gateway_settings = GatewaySettings(
        model=model,
        expected_shards=settings.shards,
        most_shards=settings.most_shards,
        default_top_k=settings.top_k,
        deadline_s=settings.request_deadline_s,
        patience_s=patience_s,
        wake_s=patience_s if settings.shards else settings.wake_deadline_s,
        telemetry=telemetry,
        require_keys=settings.keys_required,
        tenant_requests_per_minute=settings.tenant_requests_per_minute,
        user_requests_per_minute=settings.user_requests_per_minute,
        tenant_tokens_per_minute=settings.tenant_tokens_per_minute,
        user_tokens_per_minute=settings.user_tokens_per_minute,
    )
    application: Any = gateways.bind(
        shards.bind(shard_settings, open_shard),
        partial(open_stores, shard_settings, open_template or read_template),
        PlacementPolicy(),
        gateway_settings,
    )
    return application


def how_many(settings: Settings) -> dict[str, Any]:
    """How many shards: as many as were asked for, or as the load needs; and how long one that ends may take."""
    if settings.max_shards is None:
        return {"num_replicas": settings.shards, "graceful_shutdown_timeout_s": settings.shard_stop_s}
    policy = AutoscalingPolicy(
        policy_function="deployments.autoscaling:ShardScaling",
        policy_kwargs={
            # A shard that is full of active users evicts some of them; one at its limit of chats refuses.
            "bytes_a_shard": round(0.8 * settings.chunk_device_bytes),
            "backlog_a_shard": ENCODE_BACKLOG_A_SHARD,
            "requests_a_shard": max(1, settings.max_requests_in_flight // 2),
            "up_s": settings.scale_up_s,
            "down_s": settings.scale_window_s / 2,  # and a user counts as active for the other half
        },
    )
    report_s = min(REPORT_S, settings.scale_up_s / 2)
    with warnings.catch_warnings():
        # The variables that are to replace this field are read by nothing in this version.
        warnings.filterwarnings("ignore", "The `metrics_interval_s` field", DeprecationWarning)
        config = AutoscalingConfig(
            min_replicas=settings.shards,
            initial_replicas=max(1, settings.shards),  # a model that cannot be served is found out at the start
            max_replicas=settings.max_shards,
            metrics_interval_s=report_s,
            look_back_period_s=2 * report_s,
            upscale_delay_s=0,  # the policy has windows of its own
            downscale_delay_s=0,
            policy=policy,
        )
    return {"autoscaling_config": config, "graceful_shutdown_timeout_s": settings.shard_stop_s}


def _actor_options(settings: Settings, resource: str, gpus: int = 0) -> dict[str, Any]:
    """Cores are shared out by the shards themselves, so Ray counts none."""
    resources = {resource: 1} if settings.place_by_resource else {}
    return {"num_cpus": 0, "num_gpus": gpus, "resources": resources}


def open_stores(settings: ShardSettings, open_template: Callable[[Path], PromptTemplate]) -> GatewayStores:
    """What a gateway asks Redis, with a client of its own for the process that calls. `settings`: what its shards are
    told, because it takes adds in their place while there are none."""
    redis = connect(settings.redis_url)
    keys = KeySpace(settings.namespace, settings.model, settings.cluster)
    facts = FactStore(redis, keys, Seal(settings.encryption_key))
    unattended = Unattended(
        facts,
        partial(open_template, settings.model_path),
        quotas_of(settings, facts),
        max_fact_tokens=settings.max_fact_tokens,
    )
    return GatewayStores(
        Directory(redis, keys),
        Registry(redis, keys),
        KeyStore(redis, keys),
        Minutes(redis, keys),
        Pages(redis, keys),
        unattended,
    )


def read_template(model_path: Path) -> PromptTemplate:
    """Imports transformers: some seconds, in the process that calls."""
    from transformers import AutoTokenizer

    return PromptTemplate(AutoTokenizer.from_pretrained(model_path))
