"""The maps of the code must match the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMES = sorted(set(re.findall(r"`([\w/]+\.py)(?:::([\w.]+))?`", (ROOT / "ARCHITECTURE.md").read_text())))


def test_architecture_names_the_three_walks() -> None:
    assert len(NAMES) > 30


@pytest.mark.parametrize(("file", "name"), NAMES, ids=["::".join(filter(None, pair)) for pair in NAMES])
def test_every_name_in_the_architecture_exists(file: str, name: str) -> None:
    scope: list[ast.stmt] = ast.parse((ROOT / file).read_text()).body
    for part in filter(None, name.split(".")):
        found = next((node for node in scope if part in _names(node)), None)
        assert found is not None, f"{file} defines no {name}"
        scope = getattr(found, "body", [])


def _names(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {target.id for target in node.targets if isinstance(target, ast.Name)}
    return set()
