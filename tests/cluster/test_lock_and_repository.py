"""The lock file follows pyproject.toml, and no file that is tracked names a package registry."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
GROUPS = PROJECT["dependency-groups"]
APART = GROUPS["kernels"]  # installed beside the environment, not in it
DIRECT = [*PROJECT["project"]["dependencies"], *GROUPS["bench"], *GROUPS["dev"]]
REGISTRIES = [".".join(parts) for parts in (("pypi", "org"), ("pythonhosted", "org"), ("pytorch", "org/whl"))]
LEFT_OUT = [
    line for line in (ROOT / "requirements.overrides").read_text().splitlines() if ";" in line and line[0] != "#"
]


def locked() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.lstrip().startswith("#")]
    return {canonicalize_name(name): version for name, version in pins}


@pytest.mark.parametrize("line", DIRECT)
def test_a_dependency_is_locked_to_a_version_that_it_allows(line: str) -> None:
    wanted = Requirement(line)
    version = locked().get(canonicalize_name(wanted.name))
    assert version is not None, f"{wanted.name} is not in requirements.lock: run `make lock`"
    assert wanted.specifier.contains(version, prereleases=True), "run `make lock`"


@pytest.mark.parametrize("line", APART)
def test_what_is_installed_apart_is_pinned_where_it_stands(line: str) -> None:
    assert [clause.operator for clause in Requirement(line).specifier] == ["=="]
    assert canonicalize_name(Requirement(line).name) not in locked()


@pytest.mark.parametrize("line", LEFT_OUT)
def test_what_must_not_be_installed_is_not_locked(line: str) -> None:
    assert canonicalize_name(Requirement(line).name) not in locked()


def test_no_tracked_file_names_a_registry() -> None:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    naming = [
        name.decode()
        for name in tracked
        if name and (ROOT / name.decode()).is_file()
        if any(registry.encode() in (ROOT / name.decode()).read_bytes() for registry in REGISTRIES)
    ]
    assert naming == []
