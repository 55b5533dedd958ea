"""A short chaos run, in a process of its own, which ends what it began."""

from __future__ import annotations

import subprocess
import sys

LONGEST_S = 240.0  # some 50 s on two idle cores


def test_a_broken_cluster_keeps_its_promises() -> None:
    command = [sys.executable, "-m", "benchmarks.chaos", "--quick", "--seed", "1"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-2000:]
    assert "Seed 1" in ran.stdout
