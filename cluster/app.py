"""The composition root: plain classes become Serve deployments here, and nowhere else."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from cluster.models import model_name
from cluster.settings import Settings
from deployments.gateway import GatewayReplica, GatewayStores
from deployments.replica import OpenShard, ShardReplica
from deployments.router import PinnedRouter
from deployments.settings import GatewaySettings, ShardSettings
from sharding.client import connect
from sharding.directory import Directory
from sharding.keys import KeySpace
from sharding.placement import PlacementPolicy
from sharding.registry import Registry


def build(
    settings: Settings,
    *,
    redis_url: str,
    model_path: Path,
    embedding_path: Path,
    open_shard: OpenShard | None = None,
) -> serve.Application:
    """The gateway in front of the shards, as one Serve application. `open_shard`: see `ShardReplica`."""
    model = model_name(settings)
    shards = serve.deployment(
        ShardReplica,
        name="Shard",
        num_replicas=settings.shards,
        # Admission is the shard's own: a request that Serve queued would wait instead of being answered 429.
        max_ongoing_requests=4 * settings.max_requests_in_flight,
        health_check_period_s=2,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=settings.stop_deadline_s,
        request_router_config=RequestRouterConfig(request_router_class=PinnedRouter),
        ray_actor_options={"num_cpus": 0},
    )
    gateways = serve.deployment(
        serve.ingress()(GatewayReplica),
        name="Gateway",
        num_replicas=settings.gateways,
        max_ongoing_requests=1024,
        graceful_shutdown_timeout_s=settings.stop_deadline_s,
        ray_actor_options={"num_cpus": 0},
    )
    shard_settings = ShardSettings(
        model=model,
        model_path=model_path,
        embedding_path=embedding_path,
        redis_url=redis_url,
        namespace=settings.namespace,
        shards=settings.shards,
        threads=settings.threads_per_shard,
        max_model_len=settings.max_model_len,
        kv_cache_bytes=settings.kv_cache_bytes,
        chunk_device_bytes=settings.chunk_device_bytes,
        window_facts=settings.window_facts,
        max_fact_tokens=settings.max_fact_tokens,
        max_requests_in_flight=settings.max_requests_in_flight,
        heartbeat_interval_s=settings.heartbeat_interval_s,
        heartbeat_ttl_s=settings.heartbeat_ttl_s,
        redis_grace_s=settings.redis_grace_s,
    )
    gateway_settings = GatewaySettings(
        model=model,
        expected_shards=settings.shards,
        default_top_k=settings.top_k,
        deadline_s=settings.request_deadline_s,
    )
    application: Any = gateways.bind(
        shards.bind(shard_settings, open_shard),
        partial(open_stores, redis_url, KeySpace(settings.namespace, model)),
        PlacementPolicy(),
        gateway_settings,
    )
    return application


def open_stores(redis_url: str, keys: KeySpace) -> GatewayStores:
    """What a gateway asks Redis, with a client of its own for the process that calls."""
    redis = connect(redis_url)
    return GatewayStores(Directory(redis, keys), Registry(redis, keys))
