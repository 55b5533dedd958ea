"""What can be said of the images without building them."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCKERFILES = sorted((ROOT / "k8s" / "images").glob("*.Dockerfile"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def name_of(requirement: str) -> str:
    return re.split("[<>=[]", requirement)[0]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_a_dockerfile_is_what_hadolint_takes(file: Path) -> None:
    linter = Path(sys.executable).with_name("hadolint")
    unpinned = "DL3008"  # Debian's packages: old versions vanish from its mirrors, and the build with them
    done = subprocess.run([linter, "--ignore", unpinned, file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_a_dockerfile_copies_every_package_and_nothing_that_is_not_there(file: Path) -> None:
    copied = [line.split()[1:-1] for line in file.read_text().splitlines() if line.startswith("COPY ")]
    sources = {source for line in copied for source in line}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) <= sources
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line.startswith("!")}
    assert sources <= let_through
    assert all((ROOT / source).exists() for source in sources)


def pins(lock: str) -> dict[str, str]:
    found = re.findall(r"^([a-z0-9-]+)==([\w.]+)(?:\+cpu)?$", (ROOT / lock).read_text(), re.MULTILINE)
    return {name.removesuffix("-cpu"): version for name, version in found}


def test_both_images_hold_all_that_we_depend_on() -> None:
    needed = {name_of(requirement).removesuffix("-cpu") for requirement in PROJECT["project"]["dependencies"]}
    assert needed <= pins("requirements.lock").keys()
    assert needed <= pins("k8s/images/cuda.lock").keys()


def test_both_images_run_the_same_versions_of_ray_torch_and_vllm() -> None:
    cpu, cuda = pins("requirements.lock"), pins("k8s/images/cuda.lock")
    shared = ("ray", "torch", "vllm", "transformers", "redis", "fastapi", "pydantic")
    assert {name: cpu[name] for name in shared} == {name: cuda[name] for name in shared}


def test_the_image_for_serving_leaves_out_the_tools_of_development() -> None:
    text = (ROOT / "k8s" / "images" / "cpu.Dockerfile").read_text()
    pattern = re.search(r"sed -E '/(.*)/d'", text)
    assert pattern is not None
    for requirement in PROJECT["dependency-groups"]["dev"]:
        assert re.match(pattern[1], f"{name_of(requirement)}=="), requirement
