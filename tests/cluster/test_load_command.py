"""`memshard load` starts shards without a model on the real bring-up, loads them, and finds nothing wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil

COMMAND = (sys.executable, "-c", "from benchmarks.load import app; app()")
QUICK = ("--deterministic", "2", "--people", "6", "--facts", "4", "--users", "4", "--think", "0.05", "--duration", "3")


def test_every_word_from_two_shards_is_right_and_no_process_is_left(tmp_path: Path) -> None:
    told = subprocess.run(
        (*COMMAND, *QUICK, "--ramp", "0", "--json", str(tmp_path / "load.json")),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    [run] = [row for row in json.loads((tmp_path / "load.json").read_text())["rows"] if row["row"] == "run"]
    assert (run["wrong"], run["every_word_checked"], run["people_checked_at_the_end"]) == (0, True, 6)
    assert run["right_shard_share"] == 1.0
    assert run["requests"] > 10
    left = [
        p for p in psutil.process_iter(["cmdline"]) if "benchmarks.deterministic_server" in (p.info["cmdline"] or ())
    ]
    assert left == []
