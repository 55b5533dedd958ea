"""The custom resources that we use, as far as we use them: a field that is not here is a typing error, or belongs here.

Pod templates are left to the schemas of the native kinds (`check.py`). Fields and their meaning: KubeRay 1.7
(`ray.io/v1`) and the Prometheus operator (`monitoring.coreos.com/v1`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

Object = dict[str, Any]
Count = Annotated[int, Field(ge=0)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, alias_generator=to_camel)


class AutoscalerOptions(_Strict):
    version: Literal["v2"]
    idle_timeout_seconds: Annotated[int, Field(gt=0)]
    upscaling_mode: Literal["Default", "Aggressive", "Conservative"]
    resources: Object
    security_context: Object
    volume_mounts: list[Object]


class GcsFaultTolerance(_Strict):
    redis_address: str
    redis_password: Object


class HeadGroup(_Strict):
    ray_start_params: dict[str, str]
    template: Object


class WorkerGroup(_Strict):
    group_name: str
    replicas: Count
    min_replicas: Count
    max_replicas: Count
    idle_timeout_seconds: Annotated[int, Field(gt=0)]
    ray_start_params: dict[str, str]
    resources: dict[str, str]
    template: Object


class RayCluster(_Strict):
    ray_version: str
    enable_in_tree_autoscaling: Literal[True]
    autoscaler_options: AutoscalerOptions
    gcs_fault_tolerance_options: GcsFaultTolerance
    head_group_spec: HeadGroup
    worker_group_specs: list[WorkerGroup]


class Upgrade(_Strict):
    type: Literal["NewCluster", "None"]


class RayService(_Strict):
    upgrade_strategy: Upgrade
    ray_cluster_deletion_delay_seconds: Count
    exclude_head_pod_from_serve_svc: Literal[True]
    serve_config_v2: Annotated[str, Field(alias="serveConfigV2")]
    ray_cluster_config: RayCluster


class Relabelling(_Strict):
    source_labels: list[str]
    target_label: str


class PodMetricsEndpoint(_Strict):
    port: str
    path: str
    interval: str
    scrape_timeout: str | None = None
    relabelings: list[Relabelling] = []


class MatchLabels(_Strict):
    match_labels: dict[str, str]


class PodMonitor(_Strict):
    selector: MatchLabels
    pod_metrics_endpoints: list[PodMetricsEndpoint]


class Annotations(_Strict):
    summary: str
    runbook: str


class Alert(_Strict):
    alert: str
    expr: str
    for_: Annotated[str, Field(alias="for")]
    labels: dict[Literal["severity"], Literal["warning", "critical"]]
    annotations: Annotations


class AlertGroup(_Strict):
    name: str
    rules: list[Alert]


class PrometheusRule(_Strict):
    groups: list[AlertGroup]


CUSTOM: dict[tuple[str, str], type[_Strict]] = {
    ("ray.io/v1", "RayService"): RayService,
    ("monitoring.coreos.com/v1", "PodMonitor"): PodMonitor,
    ("monitoring.coreos.com/v1", "PrometheusRule"): PrometheusRule,
}
