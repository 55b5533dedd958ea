"""What `memshard status` draws, and how `memshard demo` reads a streamed answer."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from typing import Any

import httpx
from rich.console import Console

from cluster import demo
from cluster.status import canary_table, table
from deployments.messages import ShardStatus, Verdict
from sharding.ids import ShardId

GIB = 1 << 30
BUSY = ShardStatus(
    shard=ShardId("shard-b"),
    model="m",
    ready=True,
    started_at="2026-01-01T00:00:00Z",
    users=3,
    facts=40,
    chunks=38,
    requests_in_flight=1,
    encode_backlog=2,
    tiers=(("device", 5 * 10**8, GIB),),
    counters={},
    canary=Verdict("passed", 3, "as good"),
)


def drawn(shards: list[dict[str, Any]], most: int = 2) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(table({"model": "smollm2", "expected": 2, "most": most, "shards": json.loads(json.dumps(shards))}))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_each_shard_has_a_row_and_the_last_row_sums_them() -> None:
    other = asdict(BUSY) | {"shard": "shard-a", "facts": 2}
    lines = drawn([asdict(BUSY) | {"reachable": True}, other]).splitlines()
    rows = [line for line in lines if "shard-" in line]
    assert [row.split()[1] for row in rows] == ["shard-a", "shard-b"]
    assert "500.0 MB of 1.1 GB" in rows[1]
    assert "injected, r = 3 (passed)" in rows[1]
    total = next(line for line in lines if " all " in line)
    assert "42" in total
    assert "1.0 GB of 2.1 GB" in total


def test_a_shard_that_does_not_answer_is_shown_as_silent() -> None:
    assert "silent" in drawn([{"shard": "shard-a", "reachable": False, "reason": "away"}])


def test_each_shard_says_what_its_canary_found() -> None:
    away = {"shard": "shard-c", "reachable": False, "reason": "it is away"}
    shards = [asdict(BUSY) | {"reachable": True}, away]
    console = Console(file=io.StringIO(), width=200)
    console.print(canary_table({"model": "m", "shards": json.loads(json.dumps(shards))}))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert any("shard-b" in line and "injected, r = 3 (passed)" in line and "as good" in line for line in lines)
    assert any("shard-c" in line and "it is away" in line for line in lines)


def test_no_shards_is_a_table_too() -> None:
    assert "0 of 2 shards" in drawn([])
    assert "0 of 2 to 5 shards" in drawn([], most=5)


def test_an_answer_is_put_together_from_its_stream() -> None:
    chunks: list[dict[str, Any]] = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": None},
        {"choices": [{"delta": {"content": "Bis"}}], "usage": None},
        {"choices": [{"delta": {"content": "cuit."}}], "usage": None},
        {"choices": [], "usage": {"prompt_tokens": 90, "prompt_tokens_details": {"cached_tokens": 80}}},
    ]
    stream = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    sent: list[dict[str, Any]] = []

    def serve(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(request.content))
        return httpx.Response(200, text=stream)

    with httpx.Client(transport=httpx.MockTransport(serve), base_url="http://gateway") as client:
        answer = demo.ask(client, "m", "ada", "What is my dog called?", {"mode": "inject", "top_k": 5})

    assert (answer.text, answer.injected_tokens, answer.prompt_tokens) == ("Biscuit.", 80, 90)
    assert answer.ttft_s > 0
    assert sent[0]["memory"] == {"mode": "inject", "top_k": 5}
