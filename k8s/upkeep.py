"""What must hold so that nodes can be drained, Redis restarted, and metrics seen. Rules as in `rules.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from cluster.settings import PREFIX
from k8s.objects import Object
from k8s.pods import environment_of, pods_of, service_of


def models_can_be_read(objects: Sequence[Object]) -> Iterator[str]:
    """Where the model comes from a volume, shards, gateways (its tokenizer) and the head (that it is there) have it."""
    for pod in pods_of(objects):
        model = environment_of(objects, pod).get(f"{PREFIX}MODEL") if pod.ray else None
        mounts = pod.spec["containers"][0].get("volumeMounts", ())
        if model and not any(f"{model}/".startswith(f"{mount['mountPath']}/") for mount in mounts):
            yield f"{pod.name}: {PREFIX}MODEL ({model}) lies on no volume of this pod"


def disruptions_are_bounded(objects: Sequence[Object]) -> Iterator[str]:
    """A drain takes one pod of a group at a time, a group spreads over nodes, and what serves goes before the rest."""
    budgets = [object_["spec"] for object_ in objects if object_["kind"] == "PodDisruptionBudget"]
    for group in service_of(objects)["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        name, spec = group["groupName"], group["template"]["spec"]
        mine = {"matchLabels": {"ray.io/group": name}}
        if {"maxUnavailable": 1, "selector": mine} not in budgets:
            yield f"{name}: no PodDisruptionBudget lets one pod go at a time"
        apart = spec.get("affinity", {}).get("podAntiAffinity", {})
        terms = [*apart.get("requiredDuringSchedulingIgnoredDuringExecution", ())]
        terms += [soft["podAffinityTerm"] for soft in apart.get("preferredDuringSchedulingIgnoredDuringExecution", ())]
        if {"topologyKey": "kubernetes.io/hostname", "labelSelector": mine} not in terms:
            yield f"{name}: no anti-affinity spreads its pods over nodes"
    for pod in pods_of(objects):
        if not pod.name.startswith("CronJob") and "priorityClassName" not in pod.spec:
            yield f"{pod.name}: no priority class keeps it before the rest"


def memory_is_durable(objects: Sequence[Object]) -> Iterator[str]:
    """The memory Redis writes all down before it acknowledges, evicts nothing, and wants a password."""
    wanted = {"--appendonly": "yes", "--appendfsync": "always", "--maxmemory-policy": "noeviction"}
    for pod in pods_of(objects):
        if pod.name.endswith("memshard-memory-redis"):
            args = pod.spec["containers"][0].get("args", [])
            given = dict(pairwise(args))
            yield from (f"{pod.name}: {k} must be {v}" for k, v in wanted.items() if given.get(k) != v)
            if "--requirepass" not in given:
                yield f"{pod.name}: --requirepass is missing"


def metrics_are_scraped(objects: Sequence[Object]) -> Iterator[str]:
    """A PodMonitor finds a port of that name on pods of ours."""
    containers = [container for pod in pods_of(objects) for container in pod.spec["containers"]]
    ports = {port["name"] for container in containers for port in container.get("ports", ())}
    monitors = [object_ for object_ in objects if object_["kind"] == "PodMonitor"]
    scraped = {endpoint["port"] for monitor in monitors for endpoint in monitor["spec"]["podMetricsEndpoints"]}
    if not monitors:
        yield "no PodMonitor scrapes Memshard's metrics"
    yield from (f"a PodMonitor scrapes {port}, and no container has a port of that name" for port in scraped - ports)
