"""A short chaos run on several Ray nodes, in a process of its own, which ends what it began.

It has not been run yet, and waits for MEMSHARD_TEST_CHAOS=1; `tests/benchmarks/test_local_chaos.py` breaks the same
without Ray in every run.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

LONGEST_S = 240.0  # some 50 s on two idle cores


@pytest.mark.skipif("MEMSHARD_TEST_CHAOS" not in os.environ, reason="has not been run yet; MEMSHARD_TEST_CHAOS=1 does")
def test_a_broken_cluster_keeps_its_promises() -> None:
    command = [sys.executable, "-m", "benchmarks.chaos", "--quick", "--seed", "1"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-2000:]
    assert "Seed 1" in ran.stdout
