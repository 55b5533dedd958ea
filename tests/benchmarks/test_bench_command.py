"""`memshard bench ttft`: what is wrong is one line and a non-zero exit, before minutes are spent."""

import subprocess
import sys
from pathlib import Path

import pytest

MEMSHARD = Path(sys.executable).with_name("memshard")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run((MEMSHARD, "bench", *arguments), capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--url", "http://127.0.0.1:9"), "No Memshard answers at http://127.0.0.1:9"),
        (("--json", "/nowhere/rows.json"), "there is no directory /nowhere"),
        (("--url", "http://127.0.0.1:9", "--model", "/tmp"), "leave out --model"),
        (("--model", "/nowhere"), "/nowhere"),
    ],
)
def test_what_cannot_work_is_one_line(arguments: tuple[str, ...], reason: str) -> None:
    done = bench("ttft", *arguments)
    assert done.returncode == 1
    assert reason in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_help_names_the_benchmarks() -> None:
    done = bench("--help")
    assert done.returncode == 0
    assert {"ttft", "compose", "encode", "route", "search"} <= set(done.stdout.split())
