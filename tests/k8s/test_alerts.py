"""Alerts and dashboard: promtool takes the rules, each alert has its section, each metric that is named exists."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SPEC = yaml.safe_load((ROOT / "k8s" / "base" / "alerts.yaml").read_text())["spec"]
ALERTS: list[dict[str, Any]] = SPEC["groups"][0]["rules"]
DASHBOARD = json.loads((ROOT / "k8s" / "base" / "dashboard.json").read_text())
OPERATE = (ROOT / "docs" / "operate.md").read_text()
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def promtool(*arguments: str | Path) -> str:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(SPEC))
    return file


@needs_promtool
def test_promtool_takes_the_rules_and_every_query_of_the_dashboard(tmp_path: Path, rules: Path) -> None:
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", rules)
    queries = [{"record": f"panel:{n}", "expr": query} for n, query in enumerate(QUERIES)]
    file = tmp_path / "dashboard.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": queries}]}))
    promtool("check", "rules", file)


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_has_a_section_in_the_runbook(alert: dict[str, Any]) -> None:
    page, _, anchor = alert["annotations"]["runbook"].partition("#")
    assert page == "docs/operate.md"
    assert anchor == alert["alert"].lower()
    section = re.search(rf"^### {alert['alert']}\n\n(.+?)(?=^### |\Z)", OPERATE, re.MULTILINE | re.DOTALL)
    assert section is not None
    assert len(section[1]) > 100


def test_no_section_is_left_over() -> None:
    assert re.findall(r"^### (\w+)$", OPERATE, re.MULTILINE) == [alert["alert"] for alert in ALERTS]


SERIES: dict[str, tuple[dict[str, str], str]] = {
    "MemshardRedisAway": ({'memshard_redis_up{instance="a"}': "0x20"}, "2m"),
    "MemshardShardsMissing": ({"memshard_live_shards": "1x40", "memshard_expected_shards": "2x40"}, "12m"),
    "MemshardShardSilent": ({'memshard_shard_up{shard="s"}': "0x20"}, "3m"),
    "MemshardErrors": (
        {
            'memshard_http_requests_total{status="200"}': "0+1000x40",
            'memshard_http_requests_total{status="503"}': "0+50x40",
        },
        "15m",
    ),
    "MemshardBusy": ({'memshard_http_requests_total{status="429"}': "0+60x40"}, "20m"),
    "MemshardSlowFirstToken": (
        {
            'memshard_first_token_seconds_bucket{memory="inject",at="gateway",le="2.5"}': "0+10x40",
            'memshard_first_token_seconds_bucket{memory="inject",at="gateway",le="5.0"}': "0+20x40",
            'memshard_first_token_seconds_bucket{memory="inject",at="gateway",le="+Inf"}': "0+20x40",
        },
        "20m",
    ),
    "MemshardServesText": (
        {
            "memshard_memory_tokens_injected_total": "0+100x60",
            "memshard_memory_tokens_hit_total": "0+10x60",
            'memshard_memory_tokens_prefilled_total{reason="evicted"}': "0+90x60",
        },
        "50m",
    ),
    "MemshardEncodesBehind": ({'memshard_encode_backlog_chunks{shard="s"}': "2000+10x100"}, "80m"),
    "MemshardCanaryFailed": ({'memshard_canary_injects{shard="s"}': "0x20"}, "6m"),
    "MemshardBackupMissing": (
        {'kube_cronjob_status_last_successful_time{cronjob="memshard-backup"}': "0x3000"},
        "2400m",
    ),
    "MemshardNoMetrics": ({}, "6m"),
}
"""What a cluster in trouble looks like to Prometheus, a sample a minute, and when the alert must fire."""


@needs_promtool
@pytest.mark.parametrize("name", [alert["alert"] for alert in ALERTS])
def test_an_alert_fires_in_trouble_and_not_when_all_is_well(name: str, tmp_path: Path, rules: Path) -> None:
    trouble, at = SERIES[name]
    well = {
        "memshard_live_shards": "2x3000",
        "memshard_expected_shards": "2x3000",
        "memshard_redis_up": "1x3000",
        'memshard_shard_up{shard="s"}': "1x3000",
        'memshard_canary_injects{shard="s"}': "1x3000",
        'memshard_http_requests_total{status="200"}': "0+1000x3000",
        'memshard_first_token_seconds_bucket{memory="inject",at="gateway",le="0.5"}': "0+10x3000",
        'memshard_first_token_seconds_bucket{memory="inject",at="gateway",le="+Inf"}': "0+10x3000",
        "memshard_memory_tokens_injected_total": "0+100x3000",
        "memshard_memory_tokens_hit_total": "0+100x3000",
        'memshard_memory_tokens_prefilled_total{reason="not_encoded"}': "0+5x3000",
        'memshard_encode_backlog_chunks{shard="s"}': "100x3000",
    }
    fires = f'count(ALERTS{{alertname="{name}",alertstate="firing"}})'

    def case(series: dict[str, str], expected: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "promql_expr_test": [{"expr": fires, "eval_time": at, "exp_samples": expected}],
        }

    tests = [case(trouble, [{"labels": "{}", "value": 1}]), case(well, [])]
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": tests}))
    promtool("test", "rules", file)
