"""From a run of the load to rows, tables, CSV and a plot. Pure, but for the files that it writes."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.load_requests import Request
from benchmarks.load_run import LoadResult
from benchmarks.results import Row
from sharding.errors import MemshardError

PERCENTILES = (50, 95, 99)
MS = 1000.0
BINS = 60


def rows(result: LoadResult) -> Iterator[Row]:
    """One row a kind of request (chats by arm), then one for the whole run; `null` where nothing was measured."""
    for kind, arm, group in _groups(result.requests):
        answered = [request for request in group if request.error is None]
        yield {
            "row": "requests",
            "kind": kind,
            "arm": arm,
            "n": len(group),
            "errors": len(group) - len(answered),
            "answered_per_s": result.per_second(group),
            "injected_tokens": sum(request.injected_tokens for request in answered),
            "fallbacks": sum(request.fallback is not None for request in answered),
            **percentiles("ttft", [r.ttft_s for r in answered if r.ttft_s is not None]),
            **percentiles("between_pieces", [gap for r in answered for gap in r.gaps_s]),
            **percentiles("total", [r.seconds for r in answered]),
        }
    yield {
        "row": "run",
        "model": result.model,
        "every_word_checked": result.exact,
        "seconds": result.seconds,
        "people": result.plan.people,
        "people_checked_at_the_end": result.checked_people,
        "requests": len(result.requests),
        "answered_per_s": result.per_second(result.requests),
        "not_sent": result.not_sent,
        "wrong": sum(result.wrong.values()),
        "shards_killed": len(result.kills),
        "most_shards": max((len(status["shards"]) for _, status in result.statuses), default=0),
        **({} if (share := right_shard_share(result)) is None else {"right_shard_share": share}),
        **shard_counts(result),
    }


def report(result: LoadResult) -> dict[str, Any]:
    """All of it, as JSON holds it, beside what `results.Report` adds."""
    return {
        "plan": asdict(result.plan),
        "errors": errors(result),
        "wrong": dict(result.wrong),
        "shards_killed_at_s": result.kills,
        "shards_over_time": [{"at_s": at, **_shards(status)} for at, status in result.statuses],
    }


def errors(result: LoadResult) -> dict[str, int]:
    """How many requests failed, by kind."""
    return dict(Counter(request.error for request in result.requests if request.error is not None))


def right_shard_share(result: LoadResult) -> float | None:
    """Of the calls that reached a shard, those that reached the one that owns the user: from the living shards' own
    counters of calls refused as another's. None where shards do not count them."""
    if len(result.statuses) < 2:
        return None
    first, last = ({shard["shard"]: shard["counters"] for shard in status["shards"]} for _, status in _ends(result))
    if not any("wrong_shard" in counters for counters in last.values()):
        return None
    before = sum(first.get(shard, {}).get("wrong_shard", 0) for shard in last)
    refused = sum(counters.get("wrong_shard", 0) for counters in last.values()) - before
    answered = sum(request.error is None for request in result.requests)
    return answered / (answered + refused) if answered else None


def shard_counts(result: LoadResult) -> dict[str, int]:
    """What shards counted from the first look at them to the last: users moved, and chunks that chats asked for by the
    tier in which they were. What a shard counted after the last look before it was lost is missing."""
    first = {shard["shard"]: shard["counters"] for shard in result.statuses[0][1]["shards"]} if result.statuses else {}
    last: dict[str, dict[str, int]] = {}
    for _, status in result.statuses:
        last |= {shard["shard"]: shard.get("counters", {}) for shard in status["shards"]}
    counted: Counter[str] = Counter()
    for shard, counters in last.items():
        for name, count in counters.items():
            if name == "moved_users" or name.startswith("found_"):
                counted[name] += count - first.get(shard, {}).get(name, 0)
    return dict(sorted(counted.items()))


def tables(result: LoadResult) -> Iterator[Table]:
    """What a person reads: times by kind, then what went wrong."""
    told = "deterministic engine, no model: every word checked" if result.exact else result.model
    plan = result.plan
    loop = f"{plan.rate:g} requests/s, open loop" if plan.rate else f"{plan.users} at a time, closed loop"
    drawn = Table(
        title=f"{told}: {plan.people} people, {loop}, {result.seconds:.0f} s",
        caption="ms: p50 / p95 / p99, at the client's socket; between: from one piece of text to the next",
    )
    for heading in ("request", "n", "errors", "per s", "first token", "between", "total"):
        drawn.add_column(heading, justify="left" if heading == "request" else "right")
    for row in rows(result):
        if row["row"] == "requests":
            name = f"{row['kind']} {row['arm']}".strip()
            times = (milliseconds(row, name) for name in ("ttft", "between_pieces", "total"))
            drawn.add_row(name, str(row["n"]), str(row["errors"]), f"{row['answered_per_s']:.1f}", *times)
    yield drawn
    if counts := shard_counts(result):
        beside = Table(title="What the shards counted", show_header=False)
        for name, count in counts.items():
            beside.add_row(name.replace("found_", "chunks found: ").replace("_", " "), str(count))
        yield beside
    yield what_went_wrong([result])


def what_went_wrong(results: Sequence[LoadResult]) -> Table:
    """Wrong answers and errors by kind, over all phases of a run."""
    last = results[-1]
    found = Table(title="What went wrong", show_header=False)
    share = right_shard_share(last)
    found.add_row("wrong answers and lost facts", str(sum(last.wrong.values())))
    found.add_row("people whose facts were asked for at the end", f"{last.checked_people} of {last.plan.people}")
    found.add_row("calls at the right shard", "not told by this server" if share is None else f"{100 * share:.2f} %")
    failed: Counter[str] = Counter()
    for result in results:
        failed.update(errors(result))
    if kills := sum(len(result.kills) for result in results):
        counts = [len(status["shards"]) for result in results for _, status in result.statuses]
        found.add_row("shards killed", f"{kills}, of {min(counts)} to {max(counts)}")
    for what, count in (*last.wrong.items(), *failed.items()):
        found.add_row(f"  {what}", str(count))
    if not_sent := sum(result.not_sent for result in results):
        found.add_row("  not sent: too many in flight", str(not_sent))
    return found


def write_csv(path: Path, result: LoadResult) -> None:
    """One line a request. Raises MemshardError where `path` cannot be written."""
    fields = ("at_s", "kind", "arm", "ttft_s", "total_s", "pieces", "injected_tokens", "fallback", "error", "wrong")
    try:
        with path.open("w", newline="") as file:
            out = csv.writer(file)
            out.writerow(fields)
            for r in sorted(result.requests, key=lambda request: request.at):
                at = f"{r.at - result.began:.4f}"
                ttft = "" if r.ttft_s is None else f"{r.ttft_s:.5f}"
                out.writerow(
                    (
                        at,
                        r.kind,
                        r.arm,
                        ttft,
                        f"{r.seconds:.5f}",
                        r.pieces,
                        r.injected_tokens,
                        r.fallback or "",
                        r.error or "",
                        r.wrong or "",
                    )
                )
    except OSError as failure:
        raise MemshardError(f"{path} cannot be written: {failure.strerror}") from failure


def plot(path: Path, result: LoadResult) -> None:
    """A PNG over the time of the run: time to first token by arm, requests and errors a second, shards. Raises
    MemshardError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 9), layout="constrained")
    FigureCanvasAgg(figure)
    above, middle, below = figure.subplots(3, 1, sharex=True)
    edges = np.linspace(0, result.seconds, BINS + 1)
    width = edges[1] - edges[0]
    for kind, arm, group in _groups(result.requests):
        if kind != "chat":
            continue
        timed = [(r.at - result.began, MS * r.ttft_s) for r in group if r.ttft_s is not None]
        for percentile, style in ((50, "-"), (99, ":")):
            values = _binned(timed, edges, percentile)
            above.plot(edges[:-1] + width / 2, values, style, label=f"{arm} p{percentile}")
    for name, wanted in (("answered", None), ("failed", "error")):
        at = [r.at - result.began for r in result.requests if (r.error is not None) == (wanted is not None)]
        middle.step(edges[:-1], np.histogram(at, edges)[0] / width, where="post", label=name)
    shards = [(at, _shards(status)) for at, status in result.statuses if 0 <= at <= result.seconds]
    for name in ("shards", "requests_in_flight", "encode_backlog"):
        below.plot([at for at, _ in shards], [told[name] for _, told in shards], label=name.replace("_", " "))
    above.set(title=f"{result.model}: first token at the client", ylabel="ms", ylim=(0, None))
    middle.set(ylabel="requests/s", ylim=(0, None))
    below.set(xlabel="s", ylim=(0, None))
    for axes in (above, middle, below):
        axes.grid(alpha=0.3)
        for killed_at in result.kills:
            axes.axvline(killed_at, color="tab:red", lw=0.6)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as failure:
        raise MemshardError(f"{path} cannot be written: {failure.strerror}") from failure


def _groups(requests: Sequence[Request]) -> Iterator[tuple[str, str, list[Request]]]:
    for kind, arm in sorted({(request.kind, request.arm) for request in requests}, reverse=True):
        yield kind, arm, [request for request in requests if (request.kind, request.arm) == (kind, arm)]


def percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """As fields of a row, in seconds; none where nothing was measured."""
    if not values:
        return {}
    found = np.percentile(values, PERCENTILES)
    return {f"{name}_p{p}_s": float(value) for p, value in zip(PERCENTILES, found, strict=True)}


def milliseconds(row: Row, name: str) -> str:
    """A row's percentiles of that name, as a person reads them."""
    if f"{name}_p50_s" not in row:
        return ""
    return " / ".join(f"{MS * float(row[f'{name}_p{p}_s']):.0f}" for p in PERCENTILES)


def _binned(timed: Sequence[tuple[float, float]], edges: Any, percentile: int) -> list[float]:
    places = np.digitize([at for at, _ in timed], edges) - 1
    values = np.array([value for _, value in timed])
    return [
        float(np.percentile(values[places == place], percentile)) if (places == place).any() else float("nan")
        for place in range(len(edges) - 1)
    ]


def _shards(status: dict[str, Any]) -> dict[str, Any]:
    """How many shards there are, how many of them answered in time, and sums over these."""
    shards = [shard for shard in status["shards"] if shard.get("reachable", True)]
    sums = {
        name: sum(shard.get(name, 0) for shard in shards)
        for name in ("users", "facts", "chunks", "requests_in_flight", "encode_backlog")
    }
    tiers: Counter[str] = Counter()
    for shard in shards:
        tiers.update({f"{name}_bytes": held for name, held, _ in shard.get("tiers", ())})
    return {"shards": len(status["shards"]), "answering": len(shards), **sums, **tiers}


def _ends(result: LoadResult) -> tuple[tuple[float, dict[str, Any]], tuple[float, dict[str, Any]]]:
    return result.statuses[0], result.statuses[-1]
