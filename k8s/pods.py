"""The pods of an overlay, and what they are told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import yaml

from k8s.objects import Object


class Pod(NamedTuple):
    """A pod template: whose it is, its spec, and whether Ray runs in it."""

    name: str
    spec: Object
    ray: bool


def service_of(objects: Iterable[Object]) -> Object:
    return next(object_ for object_ in objects if object_["kind"] == "RayService")


def serve_config_of(service: Object) -> Object:
    config: Object = yaml.safe_load(service["spec"]["serveConfigV2"])
    return config


def pods_of(objects: Iterable[Object]) -> Iterator[Pod]:
    for object_ in objects:
        name, spec = f"{object_['kind']} {object_['metadata']['name']}", object_.get("spec", {})
        if object_["kind"] == "RayService":
            cluster = spec["rayClusterConfig"]
            yield Pod(f"{name}, head", cluster["headGroupSpec"]["template"]["spec"], True)
            for group in cluster["workerGroupSpecs"]:
                yield Pod(f"{name}, {group['groupName']}", group["template"]["spec"], True)
        elif object_["kind"] == "CronJob":
            yield Pod(name, spec["jobTemplate"]["spec"]["template"]["spec"], False)
        elif "template" in spec:
            yield Pod(name, spec["template"]["spec"], False)


def environment_of(objects: Iterable[Object], pod: Pod) -> dict[str, str]:
    """The variables of a pod's first container; those taken from elsewhere but a ConfigMap are left out."""
    container = pod.spec["containers"][0]
    maps = {object_["metadata"]["name"]: object_["data"] for object_ in objects if object_["kind"] == "ConfigMap"}
    variables: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        variables |= maps.get(source.get("configMapRef", {}).get("name"), {})
    return variables | {entry["name"]: entry["value"] for entry in container.get("env", ()) if "value" in entry}
