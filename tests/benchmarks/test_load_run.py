"""The load against a gateway and shards that answer deterministically: nothing is wrong, and what is, is seen."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from geventhttpclient import HTTPClient
from local_cluster import LocalCluster, local_cluster
from rich.console import Console

from benchmarks import load as load_command
from benchmarks import load_compare, load_report
from benchmarks.load_client import LoadClient
from benchmarks.load_plan import LoadPlan
from benchmarks.load_run import LoadResult, compare, run
from benchmarks.results import Report
from benchmarks.server import free_port
from connector.plan import PromptPlan
from deployments.deterministic import DeterministicEngine
from sharding.errors import MemshardError

MIX = {"chat": 0.6, "add": 0.2, "update": 0.1, "delete": 0.1}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with local_cluster(tmp_path_factory.mktemp("v"), shards=3) as cluster:
        yield cluster


def loaded(cluster: LocalCluster, **differently: Any) -> LoadResult:
    few = {"people": 12, "facts": 5, "users": 6, "duration_s": 1.5, "ramp_s": 0.2, "think_s": 0.01, "top_k": 20}
    usual = {"mix": MIX, "arms": ("inject", "prompt", "off"), **few}
    return run(LoadPlan(url=cluster.url, **{**usual, **differently}), lambda _: None)


@pytest.fixture(scope="module")
def closed(cluster: LocalCluster) -> LoadResult:
    return loaded(cluster)


def test_nothing_is_wrong_under_every_kind_of_request_at_once(closed: LoadResult) -> None:
    assert closed.wrong == Counter()
    assert closed.exact
    assert {request.kind for request in closed.requests} == set(MIX)
    assert {request.arm for request in closed.requests} == {"inject", "prompt", "off", ""}
    assert not [request.error for request in closed.requests if request.error]
    assert closed.checked_people == 12
    assert any(request.injected_tokens for request in closed.requests)


def test_an_open_loop_sends_about_as_many_as_it_should(cluster: LocalCluster) -> None:
    result = loaded(cluster, rate=60.0, duration_s=2.0, ramp_s=0.0)
    assert result.wrong == Counter()
    assert 60 <= len(result.requests) + result.not_sent <= 200


def test_memory_modes_are_compared_each_alone_with_the_same_people(cluster: LocalCluster) -> None:
    plan = LoadPlan(cluster.url, 4, 4, MIX, ("inject", "off"), users=4, duration_s=0.5, ramp_s=0.0, think_s=0.0)
    results = compare(plan, 2, lambda _: None)
    assert [len(result.plan.arms) for result in results] == [1] * 4
    assert {request.kind for result in results for request in result.requests} == {"chat"}
    rows = {row["arm"]: row for row in load_compare.rows(results)}
    assert rows["off"]["over_off"] == 1.0
    assert "over_prompt" not in rows["off"], "that arm was not measured"
    assert rows["inject"]["rounds"] == 2
    assert results[-1].wrong == Counter()
    console = Console(record=True, width=200)
    console.print(*load_compare.tables(results))
    assert "over off" in console.export_text()


def test_another_users_memory_in_an_answer_is_seen(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def anothers(engine: DeterministicEngine, plan: PromptPlan) -> tuple[int, ...]:
        """For each chunk some chunk of that length, whoever it belongs to."""
        found = {len(tokens): tokens for tokens in engine.chunks.values()}
        return tuple(token for _, tokens in plan.load for token in found[tokens])

    monkeypatch.setattr(DeterministicEngine, "_injected", anothers)
    result = loaded(cluster, mix={"chat": 1.0}, arms=("inject",))
    assert result.wrong["the text is not what the facts say"] > 0


def test_a_fact_that_is_lost_is_seen_at_the_end(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = LoadClient.list_facts
    monkeypatch.setattr(LoadClient, "list_facts", lambda self, user: dict(list(whole(self, user).items())[1:]))
    result = loaded(cluster, duration_s=0.3)
    assert result.wrong["an acknowledged fact is lost"] == 12


def test_what_fails_is_counted_by_kind_and_is_not_wrong(cluster: LocalCluster) -> None:
    shards = list(cluster.shards.by_id.values())
    for shard in shards:
        shard._max_requests_in_flight = 0
    try:
        result = loaded(cluster, duration_s=0.5)
    finally:
        for shard in shards:
            shard._max_requests_in_flight = 99
    assert load_report.errors(result)["429 shard_busy"] > 0
    assert result.wrong == Counter()


def test_locusts_page_is_there_while_it_runs(cluster: LocalCluster) -> None:
    port, seen = free_port(), []

    def look(passed_s: float) -> None:
        if passed_s > 0.5:
            http = HTTPClient("127.0.0.1", port)
            seen.append({stat["name"] for stat in json.loads(http.get("/stats/requests").read())["stats"]})
            http.close()

    plan = LoadPlan(cluster.url, 3, 3, MIX, ("inject",), users=3, duration_s=2.0, ramp_s=0.0, think_s=0.01)
    run(replace(plan, page_port=port), lambda _: None, look)
    assert "inject" in seen[-1]


def test_a_report_has_every_kind_and_arm_in_json_csv_and_a_plot(closed: LoadResult, tmp_path: Any) -> None:
    files = [tmp_path / name for name in ("load.json", "load.csv", "load.png")]
    Report.of("load", list(load_report.rows(closed))).write_json(files[0], **load_report.report(closed))
    load_report.write_csv(files[1], closed)
    load_report.plot(files[2], closed)
    told = json.loads(files[0].read_text())
    assert {(row["kind"], row["arm"]) for row in told["rows"] if row["row"] == "requests"} >= {
        ("chat", "inject"),
        ("chat", "prompt"),
        ("chat", "off"),
        ("add", ""),
    }
    [whole] = [row for row in told["rows"] if row["row"] == "run"]
    assert (whole["wrong"], whole["every_word_checked"], whole["right_shard_share"]) == (0, True, 1.0)
    assert told["shards_over_time"][0]["shards"] == 3
    assert len(files[1].read_text().splitlines()) == len(closed.requests) + 1
    assert files[2].read_bytes().startswith(b"\x89PNG")
    console = Console(record=True, width=200)
    console.print(*load_report.tables(closed))
    assert "no model" in console.export_text()


def test_what_shards_count_is_told_of_those_too_that_came_or_were_lost(closed: LoadResult) -> None:
    def status(**counts: int) -> dict[str, Any]:
        return {"shards": [{"shard": id_, "counters": {"found_device": n, "other": 9}} for id_, n in counts.items()]}

    statuses = [(0.0, status(old=5, lost=1)), (2.0, status(old=7, lost=4, new=2)), (4.0, status(old=9, new=3))]
    result = replace(closed, statuses=statuses, kills=[3.0])
    assert load_report.shard_counts(result) == {"found_device": 4 + 3 + 3}
    console = Console(record=True, width=200)
    console.print(*load_report.tables(result))
    assert "1, of 2 to 3" in console.export_text()


def test_where_nobody_listens_it_says_so() -> None:
    with pytest.raises(MemshardError, match="No Memshard answers"):
        run(LoadPlan("http://127.0.0.1:9", 1, 1, MIX, ("off",)), lambda _: None)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"url": "http://127.0.0.1:9", "deterministic": 2}, "leave out --deterministic"),
        ({"url": "http://127.0.0.1:9", "kill_every": 5.0}, "leave out --url"),
        ({"max_shards": 4}, "goes with --deterministic"),
        ({"deterministic": 4, "max_shards": 3}, "is not below it"),
        ({"compare": 1, "rate": 2.0}, "leave out --csv"),
    ],
)
def test_what_does_not_go_together_is_said_before_anything_starts(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(MemshardError, match=reason):
        load_command.load(**{"url": None, "deterministic": None, "max_shards": None, "kill_every": None, **given})
