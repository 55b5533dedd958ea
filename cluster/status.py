"""`memshard status` and `memshard canary`: what each shard says of itself, as a table."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from cluster.client import gateway

COLUMNS = {
    "users": "users",
    "facts": "facts",
    "chunks": "chunks",
    "in flight": "requests_in_flight",
    "to encode": "encode_backlog",
    "stale": "stale_chunks",
}
"""Heading of each count, and its field in `ShardStatus` (deployments/messages.py)."""


def show(url: str, console: Console) -> None:
    """Print the shards of the server at `url`. Raises what `client.gateway` raises."""
    with gateway(url) as client:
        answer = client.get("/status")
        answer.raise_for_status()
    console.print(table(answer.json()), latencies(answer.json()), sep="\n")


def show_canary(url: str, console: Console) -> None:
    """Ask the canaries of the server at `url` again and print what they found. Raises what `client.gateway` raises."""
    with gateway(url) as client, console.status("Asking questions about invented facts"):
        answer = client.post("/canary")
        answer.raise_for_status()
    console.print(canary_table(answer.json()))


def canary_table(status: dict[str, Any]) -> Table:
    """One row a shard, out of the answer to POST /canary."""
    drawn = Table(title=f"{status['model']}: memory injected or text")
    for heading in ("shard", "memory", "because"):
        drawn.add_column(heading, overflow="fold")
    for shard in sorted(status["shards"], key=lambda shard: str(shard["shard"])):
        reason = shard["canary"]["reason"] if shard["reachable"] else shard["reason"]
        drawn.add_row(str(shard["shard"]), _memory(shard.get("canary") or {}), reason)
    return drawn


def table(status: dict[str, Any]) -> Table:
    """One row a shard, out of the answer to GET /status; where there are several, a last row with the sums."""
    shards: list[dict[str, Any]] = status["shards"]
    least, most = status["expected"], status["most"]
    wanted = f"{least} to {most}" if most > least else f"{least}"
    drawn = Table(title=f"{status['model']}: {len(shards)} of {wanted} shards", show_footer=len(shards) > 1)
    drawn.add_column("shard", footer="all", overflow="fold")
    drawn.add_column("state")
    drawn.add_column("memory")
    for heading, field in COLUMNS.items():
        drawn.add_column(heading, justify="right", footer=str(sum(shard.get(field, 0) for shard in shards)))
    tiers = list(dict.fromkeys(name for shard in shards for name in _tiers(shard)))
    for tier in tiers:
        held, budget = (
            sum(parts) for parts in zip(*(_tiers(shard).get(tier, (0, 0)) for shard in shards), strict=True)
        )
        drawn.add_column(f"{tier} bytes", justify="right", footer=_bytes(held, budget))
    for shard in sorted(shards, key=lambda shard: str(shard["shard"])):
        drawn.add_row(
            str(shard["shard"]),
            _state(shard),
            _memory(shard.get("canary") or {}),
            *(str(shard.get(field, "?")) for field in COLUMNS.values()),
            *(_bytes(*_tiers(shard).get(tier, (0, 0))) for tier in tiers),
        )
    return drawn


def latencies(status: dict[str, Any]) -> Table:
    """Times to the first token at each shard's engine in the last five minutes, by what memory was asked for."""
    drawn = Table(title="time to first token, last five minutes")
    for heading in ("shard", "memory"):
        drawn.add_column(heading, overflow="fold")
    for heading in ("chats", "median", "95 in 100"):
        drawn.add_column(heading, justify="right")
    for shard in sorted(status["shards"], key=lambda shard: str(shard["shard"])):
        for memory, seen in shard.get("latencies", {}).items():
            times = (f"{1000 * seen[name]:.0f} ms" for name in ("p50_s", "p95_s"))
            drawn.add_row(str(shard["shard"]), memory, f"{seen['chats']:.0f}", *times)
    return drawn


def _state(shard: dict[str, Any]) -> str:
    if not shard.get("reachable", True):
        return "silent"
    return "ready" if shard.get("ready") else "starting"


def _memory(canary: dict[str, Any]) -> str:
    """How the shard serves memory, and by whose decision."""
    nearest, why = canary.get("prefill_nearest"), canary.get("state", "?")
    return f"text ({why})" if nearest is None else f"injected, r = {nearest} ({why})"


def _tiers(shard: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Bytes held and budget in bytes, by tier."""
    return {name: (held, budget) for name, held, budget in shard.get("tiers", ())}


def _bytes(held: int, budget: int) -> str:
    return f"{decimal(held)} of {decimal(budget)}"
