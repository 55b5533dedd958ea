"""What must hold of the objects of one overlay together, beyond their schemas. A rule yields a sentence a problem."""

from __future__ import annotations

import importlib
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cluster.app import GATEWAY_RESOURCE, SHARD_RESOURCE
from cluster.ray_node import ENVIRONMENT
from cluster.settings import PREFIX, Settings
from k8s.objects import Object
from k8s.pods import Pod, environment_of, pods_of, serve_config_of, service_of
from k8s.upkeep import disruptions_are_bounded, memory_is_durable, metrics_are_scraped, models_can_be_read
from sharding.errors import MemshardError

Rule = Callable[[Sequence[Object]], Iterator[str]]

ROOT = Path(__file__).parent.parent
SECRETS = {"memshard-memory-redis", "memshard-gcs-redis", "memshard-encryption"}
"""What the operator creates before anything else (docs/operate.md); the last one where anything is to be encrypted."""

_SECRET_NAME = re.compile("PASSWORD|SECRET|TOKEN|CREDENTIAL|_KEY$", re.IGNORECASE)


def settings_exist(objects: Sequence[Object]) -> Iterator[str]:
    """Every MEMSHARD_* variable and every argument of the application is a setting with a value that it takes."""
    service = service_of(objects)
    for pod in pods_of(objects):
        if pod.ray:
            environment = environment_of(objects, pod)
            given = {name: value for name, value in environment.items() if name.startswith(PREFIX)}
            known = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields}
            yield from (f"{pod.name}: {name} is no setting" for name in given if name not in known)
            values = {name.removeprefix(PREFIX).lower(): value for name, value in given.items() if name in known}
            for app in serve_config_of(service).get("applications", ()):
                yield from _refused(pod.name, {**values, **app.get("args", {})})
            for name, value in ENVIRONMENT.items():
                if environment.get(name) != value:
                    yield f"{pod.name}: {name} must be {value!r}, as where `memshard serve` starts Ray"


def _refused(where: str, values: dict[str, Any]) -> Iterator[str]:
    unknown = values.keys() - Settings.model_fields.keys()
    yield from (f"{where}: serveConfigV2 sets {name}, which is no setting" for name in sorted(unknown))
    try:
        settings = Settings.from_environment(**{name: value for name, value in values.items() if name not in unknown})
        if not settings.keys_required:
            yield f"{where}: {PREFIX}HOST must be an address that others reach, or no request needs an API key"
    except MemshardError as refused:
        yield f"{where}: {refused.message}"


def application_starts(objects: Sequence[Object]) -> Iterator[str]:
    """serveConfigV2 is what Ray's schema says, what it imports exists, and nodes offer what its replicas ask for."""
    service = service_of(objects)
    config = serve_config_of(service)
    if refusals := list(_refused_by_ray(config)):
        yield from (f"serveConfigV2: {refusal}" for refusal in refusals)
        return
    for app in config["applications"]:
        module, _, name = app["import_path"].partition(":")
        try:
            found = callable(getattr(importlib.import_module(module), name, None))
        except ImportError:
            found = False
        if not found:
            yield f"serveConfigV2: the image has no {app['import_path']}"
        for argument, resource in (("shards", SHARD_RESOURCE), ("gateways", GATEWAY_RESOURCE)):
            given = {name: app.get("args", {}).get(name) for name in (f"max_{argument}", argument)}
            wanted = next((n for n in given.values() if n is not None), Settings.model_fields[argument].default)
            if wanted > (most := _most(service, resource)):
                yield f"serveConfigV2: {wanted} {argument} are wanted, and the nodes offer {most} {resource}"


def _refused_by_ray(config: Object) -> Iterator[str]:
    """Ray's schema passes over fields that it does not know; we do not."""
    from ray.serve.schema import DeploymentSchema, ServeApplicationSchema, ServeDeploySchema

    try:
        ServeDeploySchema.model_validate(config)
    except ValidationError as refused:
        yield from (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in refused.errors(include_url=False))
        return
    deployments = [deployment for app in config["applications"] for deployment in app.get("deployments", ())]
    shapes = [(ServeDeploySchema, [config]), (ServeApplicationSchema, config["applications"])]
    for schema, values in (*shapes, (DeploymentSchema, deployments)):
        unknown = {name for value in values for name in value} - schema.model_fields.keys()
        yield from (f"there is no field {name}" for name in sorted(unknown))


def _most(service: Object, resource: str) -> int:
    groups = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    return sum(int(group["resources"].get(resource, "0")) * group["maxReplicas"] for group in groups)


_OF_A_DRAIN = ("shards", "max_shards", "stop_deadline_s", "start_deadline_s", "request_deadline_s")


def drains_outlast_moves(objects: Sequence[Object]) -> Iterator[str]:
    """Pod's grace > Ray's drain > a replica's own stop and the start of its replacement."""
    for pod in pods_of(objects):
        if not pod.ray:
            continue
        environment = environment_of(objects, pod)
        grace_s = pod.spec.get("terminationGracePeriodSeconds", 30)
        drain_s = float(environment.get("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", 30))
        for app in serve_config_of(service_of(objects)).get("applications", ()):
            given = {name: environment.get(f"{PREFIX}{name.upper()}") for name in _OF_A_DRAIN} | app.get("args", {})
            try:
                settings = Settings(**{name: given[name] for name in _OF_A_DRAIN if given[name] is not None})
            except ValidationError:
                continue  # said by `settings_exist`
            stop_s, start_s = settings.shard_stop_s, settings.start_deadline_s
            if not grace_s > drain_s > stop_s + start_s:
                yield (
                    f"{pod.name}: terminationGracePeriodSeconds ({grace_s}) must exceed "
                    f"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S ({drain_s:g}), and that the sum of what a shard takes to "
                    f"stop and of {PREFIX}START_DEADLINE_S ({stop_s:g} + {start_s:g})"
                )
        for container in pod.spec["containers"]:
            if "preStop" in container.get("lifecycle", {}):
                yield f"{pod.name}: a preStop hook would end Ray before it has drained"


def chunks_can_be_written(objects: Sequence[Object]) -> Iterator[str]:
    """The tiers below main memory lie on volumes: the root file system is read-only."""
    for pod in pods_of(objects):
        if pod.name.endswith(", shards"):
            mounts = [mount for mount in pod.spec["containers"][0]["volumeMounts"] if not mount.get("readOnly")]
            environment = environment_of(objects, pod)
            for name in ("CHUNK_DISK_DIR", "CHUNK_SHARED_URL"):
                path = environment.get(f"{PREFIX}{name}", "")
                if "://" not in path and not any(f"{path}/".startswith(f"{m['mountPath']}/") for m in mounts):
                    yield f"{pod.name}: {PREFIX}{name} ({path or 'unset'}) lies on no volume that can be written"


def pods_are_confined(objects: Sequence[Object]) -> Iterator[str]:
    """No root, no writable root file system, no privileges, nothing unbounded, no variables of Services."""
    for pod in pods_of(objects):
        if pod.spec.get("enableServiceLinks") is not False:
            yield f"{pod.name}: enableServiceLinks must be false; a Service named memshard would set {PREFIX}PORT"
        if not pod.spec.get("securityContext", {}).get("runAsNonRoot"):
            yield f"{pod.name}: runAsNonRoot must be true"
        volumes = {volume["name"]: volume for volume in pod.spec.get("volumes", ())}
        volumes |= {name: {} for name in _claim_templates(objects, pod)}
        for container in pod.spec["containers"]:
            yield from _unconfined(f"{pod.name}: {container['name']}", container)
            mounts = {mount["mountPath"]: mount["name"] for mount in container.get("volumeMounts", ())}
            yield from (f"{pod.name}: there is no volume {name}" for name in mounts.values() if name not in volumes)
            if pod.ray and "emptyDir" not in volumes.get(mounts.get("/tmp", ""), {}):
                yield f"{pod.name}: Ray needs an emptyDir at /tmp"


def _unconfined(where: str, container: Object) -> Iterator[str]:
    context = container.get("securityContext", {})
    if not context.get("readOnlyRootFilesystem") or context.get("allowPrivilegeEscalation") is not False:
        yield f"{where}: the root file system must be read-only and privileges must not grow"
    if context.get("capabilities", {}).get("drop") != ["ALL"]:
        yield f"{where}: all capabilities must be dropped"
    requests = container.get("resources", {}).get("requests", {})
    yield from (f"{where}: no {what} is requested" for what in ("cpu", "memory") if what not in requests)
    for variable in container.get("env", ()):
        value = variable.get("value", "")
        if _SECRET_NAME.search(variable["name"]) and value and not value.startswith("$("):
            yield f"{where}: {variable['name']} stands in the manifest; refer to a Secret"
        if re.search(r"://[^@/$]*:[^@$]+@", value):
            yield f"{where}: {variable['name']} holds a password; refer to a Secret"


def references_lead_somewhere(objects: Sequence[Object]) -> Iterator[str]:
    """ConfigMaps, claims, priority classes, Services and secrets that are named exist, or the operator makes them."""
    names = {(object_["kind"], object_["metadata"]["name"]) for object_ in objects}
    names |= {("Secret", name) for name in SECRETS}
    for object_ in objects:
        for kind, name in _references(object_):
            if (kind, name) not in names:
                yield f"{object_['kind']} {object_['metadata']['name']}: there is no {kind} {name}"


_REFERENCES = {
    "configMapRef": "ConfigMap",
    "configMapKeyRef": "ConfigMap",
    "secretRef": "Secret",
    "secretKeyRef": "Secret",
}
_NAMES = {"claimName": "PersistentVolumeClaim", "priorityClassName": "PriorityClass", "serviceName": "Service"}


def _references(value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, list):
        for item in value:
            yield from _references(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key in _REFERENCES:
                yield _REFERENCES[key], item["name"]
            elif key in _NAMES:
                yield _NAMES[key], item
            else:
                yield from _references(item)
    elif isinstance(value, str) and (found := re.search(r"(?:^|@)(memshard-[a-z-]+):6379", value)):
        yield "Service", found[1]


def network_is_closed(objects: Sequence[Object]) -> Iterator[str]:
    """A policy denies everything to every pod; DNS, Redis and the API server are named by others."""
    policies = [object_["spec"] for object_ in objects if object_["kind"] == "NetworkPolicy"]
    closed = {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    if closed not in policies:
        yield "no NetworkPolicy denies everything by default"
    ports = {port["port"] for policy in policies for rule in policy.get("egress", ()) for port in rule.get("ports", ())}
    yield from (f"no NetworkPolicy lets anything out to port {port}" for port in sorted({53, 443, 6379} - ports))


def images_can_be_built(objects: Sequence[Object]) -> Iterator[str]:
    """Our image's tag is this version, and there is a Dockerfile for its kind."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    kinds = [file.name.removesuffix(".Dockerfile") for file in (ROOT / "k8s" / "images").glob("*.Dockerfile")]
    expected = {f"memshard:{version}-{kind}" for kind in kinds}
    for pod in pods_of(objects):
        for container in pod.spec["containers"]:
            if pod.ray and container["image"] not in expected:
                yield f"{pod.name}: {container['image']} is none of {', '.join(sorted(expected))}"


RULES: tuple[Rule, ...] = (
    application_starts,
    settings_exist,
    drains_outlast_moves,
    chunks_can_be_written,
    models_can_be_read,
    disruptions_are_bounded,
    memory_is_durable,
    metrics_are_scraped,
    pods_are_confined,
    references_lead_somewhere,
    network_is_closed,
    images_can_be_built,
)


def _claim_templates(objects: Iterable[Object], pod: Pod) -> list[str]:
    for object_ in objects:
        if f"{object_['kind']} {object_['metadata']['name']}" == pod.name:
            return [claim["metadata"]["name"] for claim in object_["spec"].get("volumeClaimTemplates", ())]
    return []
