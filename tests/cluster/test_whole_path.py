"""The whole system over its socket: gateway, directory, two shards with real engines, embedded Redis."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx
import openai
import redis

from tests.cluster.test_bring_up import processes_of
from tests.cluster.whole_server import MODEL, WholeServer

FACTS = [
    "My dog is called Biscuit and hates thunderstorms.",
    "I am allergic to peanuts and carry an injector.",
    "My sister Ingrid lives in Lisbon and paints boats.",
    "I play the cello in a quartet on Thursdays.",
    "My first car was a green Saab from 1987.",
]


def eventually(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    give_up = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up, "it did not happen in time"
        time.sleep(0.1)


def test_a_fact_told_in_one_request_is_used_in_the_next(server: WholeServer) -> None:
    (fact,) = server.remember("next", "My dog is called Biscuit.")
    answer = server.ask("next", "What is my dog called?")
    assert answer["memory"]["fact_ids"] == [fact["id"]]
    assert answer["memory"]["memory_tokens"] > 0


def test_encoded_memory_is_injected_and_is_the_same_prompt_as_text(server: WholeServer) -> None:
    server.remember("inject", *FACTS)
    server.wait_encoded("inject")
    injected = server.ask("inject", "Where does my sister live?")
    as_text = server.ask("inject", "Where does my sister live?", memory={"mode": "prompt"})
    off = server.ask("inject", "Where does my sister live?", memory={"mode": "off"})
    used = injected["memory"]
    assert used["fallback"] is None
    assert used["injected_tokens"] >= used["memory_tokens"] > 40
    counted = [shard["counters"]["memory_tokens_injected"] for shard in server.shards()]
    assert sum(counted) >= used["injected_tokens"]
    assert injected["usage"]["prompt_tokens_details"]["cached_tokens"] == used["injected_tokens"]
    assert as_text["memory"]["fact_ids"] == used["fact_ids"]
    assert as_text["usage"]["prompt_tokens"] == injected["usage"]["prompt_tokens"]
    assert as_text["memory"]["injected_tokens"] == 0
    assert off["memory"]["fact_ids"] == []
    assert off["usage"]["prompt_tokens"] < injected["usage"]["prompt_tokens"] - used["memory_tokens"] + 10


def test_every_request_of_a_user_reaches_the_shard_that_holds_the_memory(server: WholeServer) -> None:
    users = [f"placed-{i}" for i in range(8)]
    before = {shard["shard"]: shard for shard in server.shards()}
    for user in users:
        server.remember(user, *FACTS[:2])
    for user in users:
        server.wait_encoded(user)
        for _ in range(3):
            memory = server.ask(user, "What am I allergic to?", max_tokens=1)["memory"]
            assert len(memory["fact_ids"]) == 2
    grown = {
        shard["shard"]: {
            "users": shard["users"] - before[shard["shard"]]["users"],
            "facts": shard["facts"] - before[shard["shard"]]["facts"],
            "chats": shard["counters"]["chats_inject"] - before[shard["shard"]]["counters"]["chats_inject"],
        }
        for shard in server.shards()
    }
    assert sum(shard["users"] for shard in grown.values()) == len(users)
    assert all(shard["users"] for shard in server.shards()), "both shards have users"
    for shard in grown.values():
        assert shard["facts"] == 2 * shard["users"]
        assert shard["chats"] == 3 * shard["users"]


def test_a_user_moves_between_shards_with_their_chunks_and_is_answered_the_same(server: WholeServer) -> None:
    server.remember("mover", *FACTS)
    server.wait_encoded("mover")
    before = server.ask("mover", "Where does my sister live?")
    shards = [shard["shard"] for shard in server.shards()]
    encoded = [shard["counters"]["memory_tokens_prefilled_not_encoded"] for shard in server.shards()]
    sent_chunks = 0
    for target in shards * 2:
        report = server.http.post("/v1/admin/moves", json={"user_id": "mover", "shard": target})
        assert report.status_code == 200, report.text
        assert (report.json()["end"], report.json()["placement"]["shard"]) == ("moved", target)
        sent_chunks += report.json()["sent_chunks"]
        answer = server.ask("mover", "Where does my sister live?")
        assert answer["choices"] == before["choices"]
        used = answer["memory"]
        assert used["fact_ids"] == before["memory"]["fact_ids"]
        assert used["fallback"] is None
        assert used["injected_tokens"] + used["prefix_cached_tokens"] >= used["memory_tokens"]
    assert [shard["counters"]["memory_tokens_prefilled_not_encoded"] for shard in server.shards()] == encoded
    assert sent_chunks in (3 * len(FACTS), 4 * len(FACTS)), "from worker to worker; the first may have been no move"


def test_two_users_with_the_same_facts_share_nothing(server: WholeServer) -> None:
    for user in ("twin-a", "twin-b"):
        server.remember(user, *FACTS)
        server.wait_encoded(user)
    first = server.ask("twin-a", "What was my first car?")
    second = server.ask("twin-b", "What was my first car?")
    assert first["memory"]["prefix_cached_tokens"] == second["memory"]["prefix_cached_tokens"] == 0
    assert not set(first["memory"]["fact_ids"]) & set(second["memory"]["fact_ids"])
    as_text = server.ask("twin-b", "What was my first car?", memory={"mode": "prompt"})
    assert as_text["memory"]["prefix_cached_tokens"] == 0


def test_the_openai_client_works_unmodified(server: WholeServer) -> None:
    server.remember("client", *FACTS)
    server.wait_encoded("client")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == [MODEL]
    messages = [{"role": "user", "content": "What do I play?"}]
    whole = client.chat.completions.create(model=MODEL, messages=messages, user="client", max_tokens=8, temperature=0)
    assert whole.choices[0].message.content
    assert whole.model_extra is not None
    assert len(whole.model_extra["memory"]["fact_ids"]) == len(FACTS)
    pieces, usage = [], None
    for chunk in client.chat.completions.create(
        model=MODEL,
        messages=messages,
        user="client",
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        pieces += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    assert "".join(pieces) == whole.choices[0].message.content
    assert usage is not None
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens > 0
    client.close()


def test_a_client_that_goes_away_aborts_its_generation(server: WholeServer) -> None:
    question = [{"role": "user", "content": "Count from 1 to 1000 and leave out no number."}]  # a long answer
    body = {"model": MODEL, "messages": question, "max_tokens": 4000, "stream": True, "temperature": 0}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, trust_env=False) as response:
        lines = response.iter_lines()  # held: dropped, it would close the connection at once
        next(lines)
        eventually(lambda: sum(shard["requests_in_flight"] for shard in server.shards()) == 1)
    eventually(lambda: sum(shard["requests_in_flight"] for shard in server.shards()) == 0)


def test_a_deleted_fact_is_not_used_again_and_the_rest_is_encoded_anew(server: WholeServer) -> None:
    facts = server.remember("deleter", *FACTS)
    server.wait_encoded("deleter")
    gone = facts[1]["id"]
    assert server.http.delete(f"/v1/memories/{gone}", params={"user_id": "deleter"}).status_code == 200
    answer = server.ask("deleter", "What am I allergic to?")
    assert gone not in answer["memory"]["fact_ids"]
    assert server.http.get(f"/v1/memories/{gone}", params={"user_id": "deleter"}).status_code == 404
    server.wait_encoded("deleter")
    again = server.ask("deleter", "Am I allergic to anything?")
    assert again["memory"]["injected_tokens"] >= again["memory"]["memory_tokens"]


def test_a_context_that_does_not_fit_is_refused_with_a_sentence(server: WholeServer) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "word " * 9000}], "user_id": "long"}
    answer = server.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "context" in answer.json()["error"]["message"]


def test_a_fact_of_too_many_tokens_is_refused_and_nothing_of_its_turn_is_stored(server: WholeServer) -> None:
    messages = [{"role": "user", "content": text} for text in ("A short one.", "word " * 600)]
    answer = server.http.post("/v1/memories", json={"user_id": "huge", "messages": messages, "infer": False})
    assert answer.status_code == 413
    assert "tokens" in answer.json()["error"]["message"]
    assert server.memories("huge") == []


def test_memory_beyond_the_context_is_trimmed_and_reported(server: WholeServer) -> None:
    """A question that fills most of the context leaves room for only some of the facts."""
    server.remember("trimmed", *FACTS)
    server.wait_encoded("trimmed")
    room = server.ask("trimmed", "word " * 8100, max_tokens=8)
    assert room["memory"]["left_out"] > 0
    assert len(room["memory"]["fact_ids"]) + room["memory"]["left_out"] == len(FACTS)


def test_nothing_acknowledged_is_lost_by_a_restart_of_the_whole_system(server: WholeServer) -> None:
    told = [fact["memory"] for user in ("kept-a", "kept-b", "kept-c") for fact in server.remember(user, *FACTS)]
    server.redis_process().kill()  # no chance to write anything after the acknowledgement
    server.stop()
    assert processes_of(server.state_dir) == []
    server.start()
    kept = [fact["memory"] for user in ("kept-a", "kept-b", "kept-c") for fact in server.memories(user)]
    assert kept == told
    server.wait_encoded("kept-a")
    assert server.ask("kept-a", "What do I play?")["memory"]["injected_tokens"] > 0


def test_a_chat_of_a_placed_user_reads_nothing_from_redis(server: WholeServer) -> None:
    """Heartbeats and notes of use go on meanwhile, and the gateway reads the former beside the requests."""
    server.remember("placed", *FACTS)
    server.wait_encoded("placed")
    server.ask("placed", "What do I play?")
    port = next(c.laddr.port for c in server.redis_process().net_connections("tcp") if c.status == "LISTEN")
    with redis.Redis(port=port) as client:
        client.config_resetstat()
        for _ in range(3):
            assert server.ask("placed", "What do I play?")["memory"]["fact_ids"]
        counts = client.info("commandstats")
        assert {f"cmdstat_{name}" for name in ("hgetall", "zrange")}.isdisjoint(counts)
        lookups = counts.get("cmdstat_hmget", {"calls": 0})["calls"]
        assert lookups <= counts.get("cmdstat_evalsha", {"calls": 0})["calls"], "each script has one of its own"
