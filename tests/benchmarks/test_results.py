"""What every benchmark writes: medians with quartiles, where and from what they were measured, and a plot."""

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.results import Line, Report, Spread, commit, machine, plot_lines
from sharding.errors import MemshardError

GIT = ("git", "-c", "user.name=Test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false")


def test_a_spread_is_the_median_between_its_quartiles() -> None:
    assert Spread.of([4.0, 1.0, 3.0, 2.0, 5.0]) == Spread(2.0, 3.0, 4.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)


def test_a_spread_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing"):
        Spread.of([])


def test_a_spread_names_its_fields_with_their_unit() -> None:
    assert Spread(1.0, 2.0, 3.0).row("engine_ttft") == {
        "engine_ttft_s": 2.0,
        "engine_ttft_q1_s": 1.0,
        "engine_ttft_q3_s": 3.0,
    }


def test_a_spread_reads_as_median_and_range() -> None:
    assert Spread(0.0101, 0.02, 0.0309).text(1000.0) == "20.0 (10.1-30.9)"
    assert Spread(1.907, 1.982, 2.007).text(1000.0) == "1982 (1907-2007)"


def test_a_report_is_bench_commit_machine_and_flat_rows(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    Report("ttft", ({"arm": "inject", "k": 5, "engine_ttft_s": 0.07},), None, machine()).write_json(path)
    report = json.loads(path.read_text())
    assert list(report) == ["bench", "commit", "machine", "rows"]
    assert report["commit"] is None
    assert report["rows"] == [{"arm": "inject", "k": 5, "engine_ttft_s": 0.07}]


def test_a_report_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(MemshardError, match="cannot be written"):
        Report("ttft", (), None, {}).write_json(tmp_path / "nowhere" / "report.json")


def test_the_machine_says_what_was_measured_on() -> None:
    told = machine()
    assert set(told) == {"cpu", "cores", "memory_gib", "python", "torch", "vllm"}
    assert all(told.values())


def test_a_commit_says_whether_the_checkout_differs_from_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("one")
    for command in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "One"), ("tag", "v1")):
        subprocess.run((*GIT, *command), cwd=tmp_path, check=True)
    head = subprocess.check_output((*GIT, "rev-parse", "HEAD"), cwd=tmp_path, text=True).strip()
    assert commit(tmp_path) == head
    (tmp_path / "file").write_text("two")
    assert commit(tmp_path) == f"{head}-dirty"


def test_outside_a_checkout_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit(tmp_path) is None


def test_a_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    line = Line("inject", {5: Spread(1.0, 2.0, 3.0), 50: Spread(2.0, 2.0, 4.0)})
    plot_lines(path, [line], title="Time to first token", x="facts", y="ms")
    assert path.read_bytes().startswith(b"\x89PNG")
