"""A short chaos run on several Ray nodes, in a process of its own, which ends what it began.

`tests/benchmarks/test_local_chaos.py` breaks more without Ray; `memshard chaos` breaks all there is.
"""

from __future__ import annotations

import subprocess
import sys

import psutil

LONGEST_S = 240.0  # some 43 s on two idle cores


def test_a_broken_cluster_keeps_its_promises_and_leaves_no_process() -> None:
    before = {process.pid for process in psutil.process_iter()}
    command = [sys.executable, "-m", "benchmarks.chaos", "--quick", "--seed", "1"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-2000:]
    assert "Seed 1" in ran.stdout
    left = [process for process in psutil.process_iter() if process.pid not in before and _is_rays(process)]
    assert not left


def _is_rays(process: psutil.Process) -> bool:
    try:
        return "memshard-chaos-" in " ".join(process.cmdline())
    except psutil.Error:
        return False
