"""`memshard bench compose`: every arm against a copy of the same bytes, also where vLLM is not installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import compose
from benchmarks.compose import LLAMA_8B, Model, Timing, model_of
from connector.chunk import KVShape
from sharding.errors import MemshardError

TINY = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}


def saved(directory: Path, **config: object) -> Path:
    (directory / "config.json").write_text(json.dumps({**TINY, **config}))
    return directory


@pytest.mark.parametrize(
    ("config", "shape", "theta"),
    [
        ({}, KVShape(2, 2, 16, torch.bfloat16), 10_000.0),
        ({"head_dim": 32, "dtype": "float16", "rope_theta": 5e5}, KVShape(2, 2, 32, torch.float16), 5e5),
        ({"num_key_value_heads": None, "rope_parameters": {"rope_theta": 1e6}}, KVShape(2, 4, 16, torch.bfloat16), 1e6),
    ],
)
def test_the_shape_comes_out_of_the_models_configuration(
    tmp_path: Path, config: dict[str, object], shape: KVShape, theta: float
) -> None:
    assert model_of(saved(tmp_path, **config)) == Model(tmp_path.name, shape, theta)


def test_a_directory_without_a_language_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MemshardError, match=r"config\.json"):
        model_of(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "audio"}')
    with pytest.raises(MemshardError, match="num_attention_heads"):
        model_of(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(MemshardError, match="no CUDA device"):
        compose.measure(LLAMA_8B, "cuda", 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_cuda_device_the_fused_composition_is_measured_too() -> None:
    timings = compose.measure(LLAMA_8B, "cuda", 2)
    assert {arm: len(found) for arm, found in timings.items()} == dict.fromkeys(
        ("copy", "write", "portable", "fused"), 2
    )


def test_rows_compare_each_arm_with_the_copy() -> None:
    timings = {
        "copy": [Timing(0.001, 0.004), Timing(0.002, 0.005), Timing(0.003, 0.006)],
        "portable": [Timing(0.005, 0.008)] * 3,
    }
    rows = list(compose.rows(LLAMA_8B, "cpu", timings))
    assert [row["arm"] for row in rows] == ["copy", "portable"]
    assert [row["over_copy"] for row in rows] == [1.0, 2.5]
    assert [row["wall_s"] for row in rows] == [0.005, 0.008]
    assert rows[0]["bytes"] == 163_840_000
    assert len({tuple(row) for row in rows}) == 1
    assert compose.table(rows).row_count == 2


def test_it_runs_where_vllm_is_not_installed(tmp_path: Path) -> None:
    """In a process in which neither vLLM nor Ray nor Triton can be imported."""
    model, report = saved(tmp_path), tmp_path / "report.json"
    without = "import sys; sys.modules.update(vllm=None, ray=None, triton=None); from cluster.cli import main; main()"
    command = (
        sys.executable,
        "-c",
        without,
        "bench",
        "compose",
        "--quick",
        "--model",
        str(model),
        "--json",
        str(report),
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "portable" in done.stdout
    rows = json.loads(report.read_text())["rows"]
    assert {row["arm"]: row["n"] for row in rows} == dict.fromkeys(("copy", "write", "portable"), compose.QUICK_ROUNDS)
    assert {row["bytes"] for row in rows} == {1250 * 2 * 2 * 2 * 16 * 2}
