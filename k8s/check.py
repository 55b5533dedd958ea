"""`python -m k8s.check OVERLAY…`: build each overlay and say what a cluster, or Memshard, would refuse. Needs kubectl.

Without a cluster: native kinds and pod templates against Kubernetes' own schemas (strictly: an unknown field is an
error), custom resources against `objects.py`, `serveConfigV2` against Ray's, and on top what no schema knows: settings
that exist, an application that can be imported, references that lead somewhere, pods that are confined, and times that
fit each other (`rules.py`). What it cannot know: whether your storage classes, nodes and images exist.
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from pydantic import ValidationError

from k8s.objects import CUSTOM, Object
from k8s.rules import RULES

KUBERNETES = "1.31"
"""The oldest version that the manifests are written for."""

OVERLAYS = Path(__file__).parent / "overlays"


def built(overlay: Path) -> list[Object]:
    """The overlay's objects, as `kubectl apply -k` would send them.

    Raises:
        RuntimeError: it does not build; with kubectl's reason.
    """
    if shutil.which("kubectl") is None:
        raise RuntimeError("kubectl is needed to build the overlays, and is not on the path")
    done = subprocess.run(["kubectl", "kustomize", str(overlay)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{overlay}: {done.stderr.strip()}")
    return list(yaml.safe_load_all(done.stdout))


def problems(objects: Sequence[Object]) -> list[str]:
    """What is wrong with the objects of one overlay, a sentence each."""
    found = [problem for object_ in objects for problem in _by_schema(object_)]
    if not found:  # the rules rely on the shapes
        found = [problem for rule in RULES for problem in rule(objects)]
    return found


def _by_schema(object_: Object) -> Iterator[str]:
    name = f"{object_['kind']} {object_['metadata']['name']}"
    custom = CUSTOM.get((object_["apiVersion"], object_["kind"]))
    if custom is None:
        yield from _native(name, object_)
        return
    try:
        custom.model_validate(object_["spec"])
    except ValidationError as refused:
        for error in refused.errors(include_url=False):
            yield f"{name}: spec.{'.'.join(map(str, error['loc']))}: {error['msg']}"
    for path, template in _templates(object_["spec"]):
        yield from _native(f"{name}: spec.{path}", {"apiVersion": "v1", "kind": "PodTemplate", "template": template})


def _native(name: str, object_: Object) -> Iterator[str]:
    if (refusal := _refusal(json.dumps(object_))) is not None:
        yield f"{name}: {refusal}"


@functools.cache  # each schema is read anew, and overlays have most of their objects in common
def _refusal(object_: str) -> str | None:
    parsed = json.loads(object_)
    try:
        kubernetes_validate.validate(parsed, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as refused:
        return f"{'.'.join(map(str, refused.path))}: {refused.message}"
    except kubernetes_validate.SchemaNotFoundError:
        return f"nothing is known of {parsed['apiVersion']} {parsed['kind']}"
    return None


def _templates(spec: Any, path: str = "") -> Iterator[tuple[str, Object]]:
    """Every pod template below `spec`, with where it is."""
    if isinstance(spec, list):
        for index, item in enumerate(spec):
            yield from _templates(item, f"{path}[{index}]")
    elif isinstance(spec, dict):
        for key, value in spec.items():
            if key == "template":
                yield f"{path}.template".lstrip("."), value
            else:
                yield from _templates(value, f"{path}.{key}".lstrip("."))


def main(arguments: Sequence[str]) -> int:
    """Check the overlays that are named, or all of ours; how many have problems."""
    refused = 0
    for overlay in map(Path, arguments or sorted(map(str, OVERLAYS.iterdir()))):
        try:
            objects = built(overlay)
            found = problems(objects)
        except RuntimeError as error:
            objects, found = [], [str(error)]
        refused += bool(found)
        lines = found or [f"{len(objects)} objects, no problem"]
        sys.stdout.writelines(f"{overlay.name}: {line}\n" for line in lines)
    return refused


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
