"""The memory API on the whole system: the real clients, the real model, real chunks on two shards."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.whole_server import WholeServer


@pytest.fixture
def client(server: WholeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MEM0_TELEMETRY", "False")
    monkeypatch.setenv("MEM0_DIR", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    from mem0 import MemoryClient

    with httpx.Client(timeout=60, trust_env=False) as http:
        yield MemoryClient(api_key="none", host=server.url, client=http)


def test_an_updated_memory_is_served_in_its_new_version_and_a_deleted_one_not_at_all(
    server: WholeServer, client: Any
) -> None:
    added = client.add("My dog is called Biscuit.", user_id="mem0", infer=False)["results"][0]
    other = client.add("I play the cello.", user_id="mem0", infer=False)["results"][0]
    server.wait_encoded("mem0")
    client.update(added["id"], text="My dog is called Waffle.")
    found = client.search("What is my dog called?", filters={"user_id": "mem0"})["results"]
    assert found[0]["memory"] == "My dog is called Waffle."
    assert len(client.history(added["id"])) == 2
    server.wait_encoded("mem0")
    answer = server.ask("mem0", "What is my dog called?")
    assert sorted(answer["memory"]["fact_ids"]) == sorted([added["id"], other["id"]])
    assert answer["memory"]["injected_tokens"] > 0
    client.delete(added["id"])
    assert server.ask("mem0", "What is my dog called?")["memory"]["fact_ids"] == [other["id"]]
    client.delete_users(user_id="mem0")
    assert client.get_all(filters={"user_id": "mem0"})["results"] == []
    assert server.ask("mem0", "What is my dog called?")["memory"]["fact_ids"] == []


def test_the_model_distils_facts_from_a_conversation(client: Any) -> None:
    told = client.add("My name is Ingrid and I live in Lisbon with my two dogs.", user_id="distilled")
    give_up = time.monotonic() + 90
    while True:
        event = client.client.get(f"/v1/event/{told['event_id']}/").json()
        if event["status"] != "PENDING":
            break
        assert time.monotonic() < give_up
        time.sleep(0.2)
    assert event["status"] == "SUCCEEDED", event
    facts = [memory["memory"] for memory in client.get_all(filters={"user_id": "distilled"})["results"]]
    assert 1 <= len(facts) <= 5
    assert [result["data"]["memory"] for result in event["results"]] == facts
