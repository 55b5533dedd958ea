"""Every overlay is what a cluster and Memshard take, and a mistake in one is found."""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8s.check import OVERLAYS, built, problems

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl builds the overlays")

STRICT = Path(__file__).parents[2].parent / "shared" / "kuberay" / "validate.py"

Objects = list[dict[str, Any]]


@pytest.fixture(scope="session")
def overlays() -> dict[str, Objects]:
    return {overlay.name: built(overlay) for overlay in sorted(OVERLAYS.iterdir())}


@pytest.mark.parametrize("name", ["cpu", "gpu", "gpu-tensor-parallel"])
def test_an_overlay_has_no_problem(overlays: dict[str, Objects], name: str) -> None:
    assert problems(overlays[name]) == []


def test_one_object_a_file() -> None:
    for file in [*OVERLAYS.parent.glob("base/*.yaml"), *OVERLAYS.glob("*/*.yaml")]:
        assert len(list(yaml.safe_load_all(file.read_text()))) == 1, file


@pytest.mark.skipif(not STRICT.exists(), reason="KubeRay's own definitions are not here")
def test_kuberays_own_definitions_take_every_overlay(overlays: dict[str, Objects], tmp_path: Path) -> None:
    files = []
    for name, objects in overlays.items():
        files.append(tmp_path / f"{name}.yaml")
        files[-1].write_text(yaml.safe_dump_all(objects))
    done = subprocess.run([sys.executable, str(STRICT), *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("RayService OK") == len(files)


def ray(objects: Objects) -> dict[str, Any]:
    return next(object_ for object_ in objects if object_["kind"] == "RayService")["spec"]


def head(objects: Objects) -> dict[str, Any]:
    return ray(objects)["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]


def shards(objects: Objects) -> dict[str, Any]:
    return ray(objects)["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]


def memory_redis(objects: Objects) -> dict[str, Any]:
    found = (object_ for object_ in objects if object_["metadata"]["name"] == "memshard-memory-redis")
    stateful = next(object_ for object_ in found if object_["kind"] == "StatefulSet")
    container: dict[str, Any] = stateful["spec"]["template"]["spec"]["containers"][0]
    return container


def settings(objects: Objects) -> dict[str, str]:
    return next(object_ for object_ in objects if object_["metadata"]["name"].startswith("memshard-settings"))["data"]


def of(objects: Objects, kind: str) -> dict[str, Any]:
    return next(object_ for object_ in objects if object_["kind"] == kind)


def serve_config(objects: Objects, old: str, new: str) -> None:
    spec = ray(objects)
    assert old in spec["serveConfigV2"]
    spec["serveConfigV2"] = spec["serveConfigV2"].replace(old, new)


def without(objects: Objects, kind: str) -> None:
    objects[:] = [object_ for object_ in objects if object_["kind"] != kind]


MISTAKES: dict[str, tuple[Callable[[Objects], object], str]] = {
    "a misspelt field of a native kind": (
        lambda o: of(o, "StatefulSet")["spec"].update(replica=1),
        "StatefulSet .*replica",
    ),
    "a misspelt field in a pod of Ray's": (lambda o: head(o)["containers"][0].update(envFron=[]), "head.*envFron"),
    "a misspelt field of a custom resource": (lambda o: ray(o).update(upgradeStrategi={}), "upgradeStrategi"),
    "a number as a string": (
        lambda o: ray(o)["rayClusterConfig"]["workerGroupSpecs"][0].update(maxReplicas="8"),
        "maxReplicas",
    ),
    "a kind that nobody knows": (lambda o: of(o, "Service").update(kind="Servise"), "nothing is known of v1 Servise"),
    "an unknown field of serveConfigV2": (lambda o: serve_config(o, "route_prefix", "route_prefiks"), "serveConfigV2"),
    "an application that is not there": (
        lambda o: serve_config(o, "cluster.app:application", "cluster.app:aplication"),
        "the image has no cluster.app:aplication",
    ),
    "an argument that is no setting": (lambda o: serve_config(o, "shards: 2", "shard: 2"), "shard, which is no"),
    "an argument that a setting refuses": (lambda o: serve_config(o, "shards: 2", "shards: 0"), "MEMSHARD_SHARDS is 0"),
    "more shards than nodes have room for": (
        lambda o: serve_config(o, "shards: 2", "shards: 3"),
        "3 shards are wanted, and the nodes offer 2",
    ),
    "room to grow that the nodes have not": (
        lambda o: serve_config(o, "shards: 2", "shards: 2\n      max_shards: 4"),
        "4 shards are wanted, and the nodes offer 2",
    ),
    "chunk files where nothing can be written": (
        lambda o: settings(o).pop("MEMSHARD_CHUNK_DISK_DIR"),
        "MEMSHARD_CHUNK_DISK_DIR \\(unset\\) lies on no volume",
    ),
    "an API that needs no key": (lambda o: settings(o).pop("MEMSHARD_HOST"), "no request needs an API key"),
    "a variable that is no setting": (
        lambda o: settings(o).update(MEMSHARD_SHARD="2"),
        "MEMSHARD_SHARD is no setting",
    ),
    "a value that a setting refuses": (
        lambda o: settings(o).update(MEMSHARD_REDIS_GRACE_S="soon"),
        "MEMSHARD_REDIS_GRACE_S is 'soon'",
    ),
    "an engine that outlives its replica": (
        lambda o: settings(o).pop("RAY_process_group_cleanup_enabled"),
        "RAY_process_group_cleanup_enabled must be '1'",
    ),
    "a drain longer than the pod has": (
        lambda o: shards(o).update(terminationGracePeriodSeconds=60),
        "shards: terminationGracePeriodSeconds",
    ),
    "a drain shorter than a move": (
        lambda o: settings(o).update(RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S="30"),
        "must exceed RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S \\(30\\)",
    ),
    "a drain shorter than a shard that is too many takes": (
        lambda o: (
            serve_config(o, "shards: 2", "shards: 2\n      max_shards: 2"),
            settings(o).update(RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S="330"),
        ),
        "must exceed RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S \\(330\\)",
    ),
    "a model on no volume": (
        lambda o: settings(o).update(MEMSHARD_MODEL="/models/served"),
        "gateways: MEMSHARD_MODEL .* lies on no volume",
    ),
    "a drain that takes all shards": (
        lambda o: without(o, "PodDisruptionBudget"),
        "shards: no PodDisruptionBudget lets one pod go at a time",
    ),
    "all shards on one node": (lambda o: shards(o).pop("affinity"), "shards: no anti-affinity"),
    "shards that anything displaces": (lambda o: shards(o).pop("priorityClassName"), "shards: no priority class"),
    "a memory that forgets": (
        lambda o: memory_redis(o)["args"].__setitem__(memory_redis(o)["args"].index("noeviction"), "allkeys-lru"),
        "--maxmemory-policy must be noeviction",
    ),
    "a memory that acknowledges too early": (
        lambda o: memory_redis(o)["args"].__setitem__(memory_redis(o)["args"].index("always"), "everysec"),
        "--appendfsync must be always",
    ),
    "a memory that anybody reads": (
        lambda o: memory_redis(o)["args"].remove("--requirepass"),
        "--requirepass is missing",
    ),
    "metrics that nobody scrapes": (lambda o: without(o, "PodMonitor"), "no PodMonitor"),
    "metrics that are not there": (
        lambda o: of(o, "PodMonitor")["spec"]["podMetricsEndpoints"][0].update(port="metrix"),
        "scrapes metrix, and no container has a port",
    ),
    "a hook that ends Ray first": (
        lambda o: head(o)["containers"][0].update(
            lifecycle={"preStop": {"exec": {"command": ["sh", "-c", "ray stop"]}}}
        ),
        "preStop",
    ),
    "variables of Services": (lambda o: shards(o).pop("enableServiceLinks"), "enableServiceLinks"),
    "root": (lambda o: shards(o)["securityContext"].pop("runAsNonRoot"), "runAsNonRoot"),
    "a writable root file system": (
        lambda o: of(o, "StatefulSet")["spec"]["template"]["spec"]["containers"][0]["securityContext"].pop(
            "readOnlyRootFilesystem"
        ),
        "root file system",
    ),
    "capabilities": (lambda o: head(o)["containers"][0]["securityContext"].pop("capabilities"), "capabilities"),
    "no request for memory": (
        lambda o: shards(o)["containers"][0]["resources"]["requests"].pop("memory"),
        "no memory is requested",
    ),
    "a password in the manifest": (
        lambda o: shards(o)["containers"][0]["env"].append({"name": "API_TOKEN", "value": "letmein"}),
        "API_TOKEN stands in the manifest",
    ),
    "a password in an address": (
        lambda o: shards(o)["containers"][0]["env"].append({"name": "STORE", "value": "redis://:letmein@there:6379"}),
        "STORE holds a password",
    ),
    "no scratch space": (
        lambda o: head(o)["volumes"].__setitem__(0, {"name": "tmp", "hostPath": {"path": "/tmp"}}),
        "emptyDir at /tmp",
    ),
    "a mount of nothing": (
        lambda o: shards(o)["containers"][0]["volumeMounts"].append({"name": "gone", "mountPath": "/gone"}),
        "no volume gone",
    ),
    "a secret that nobody makes": (
        lambda o: shards(o)["containers"][0]["env"].append(
            {"name": "X", "valueFrom": {"secretKeyRef": {"name": "other", "key": "password"}}}
        ),
        "no Secret other",
    ),
    "a claim that is not there": (lambda o: without(o, "PersistentVolumeClaim"), "no PersistentVolumeClaim"),
    "a Redis that is not there": (lambda o: without(o, "Service"), "no Service memshard-gcs-redis"),
    "an open network": (
        lambda o: next(x for x in o if x["metadata"]["name"] == "deny-by-default")["spec"].update(
            policyTypes=["Ingress"]
        ),
        "denies everything",
    ),
    "no way to the API server": (
        lambda o: o.remove(next(x for x in o if x["metadata"]["name"] == "allow-api-server")),
        "port 443",
    ),
    "an image of another version": (
        lambda o: shards(o)["containers"][0].update(image="memshard:0.0.9-cpu"),
        "memshard:0.0.9-cpu is none of",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(overlays: dict[str, Objects], mistake: str) -> None:
    plant, sentence = MISTAKES[mistake]
    objects = copy.deepcopy(overlays["cpu"])
    plant(objects)
    assert objects != overlays["cpu"]
    found = problems(objects)
    assert any(re.search(sentence, problem) for problem in found), json.dumps(found, indent=1)


def test_an_overlay_that_does_not_build_is_said_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("resources: [gone.yaml]\n")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "k8s.check", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert re.fullmatch(rf"{tmp_path.name}: .*gone\.yaml.*\n", done.stdout), done.stdout
