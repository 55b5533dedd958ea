"""What POST /v1/chat/completions answers, over the gateway without a socket."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from gateway_fakes import MODEL, Cluster

from sharding.errors import Busy, ContextTooLong, EngineFailed

CHAT = "/v1/chat/completions"
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


def events_of(response: httpx.Response) -> list[Any]:
    """The data of each event; the last one of a good stream is the string [DONE]."""
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


async def test_an_answer_has_openais_fields_and_what_it_took_from_memory(
    client: httpx.AsyncClient, cluster: Cluster
) -> None:
    await client.post("/v1/memories", json={"user_id": "ada", "messages": "I like tea.", "infer": False})
    answer = (await client.post(CHAT, json={**HELLO, "user_id": "ada"})).json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == MODEL
    assert answer["choices"][0]["message"]["content"] == "You said: hello"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"] == {
        "prompt_tokens": 20,
        "completion_tokens": 4,
        "total_tokens": 24,
        "prompt_tokens_details": {"cached_tokens": 5},
    }
    assert answer["memory"]["mode"] == "inject"
    assert answer["memory"]["fact_ids"] == list(cluster.shards.of("ada").facts["ada"])
    assert set(answer["memory"]["timings"]) == {"embed_s", "search_s", "engine_ttft_s"}


async def test_a_stream_is_role_then_text_then_finish_then_done(client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, json={**HELLO, "stream": True, "user_id": "ada"})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events_of(response)
    assert done == "[DONE]"
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "You said: "},
        {"content": "hello"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert chunks[0]["memory"]["mode"] == "inject"
    injected = [chunk["memory"]["injected_tokens"] for chunk in chunks if "memory" in chunk]
    assert injected == [7, 5], "as planned with the first chunk, as it turned out with the last"
    assert not any("usage" in chunk for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_a_stream_reports_usage_in_a_chunk_without_choices_when_asked(client: httpx.AsyncClient) -> None:
    body = {**HELLO, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last, done = events_of(await client.post(CHAT, json=body))
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 24
    assert all(chunk["usage"] is None for chunk in chunks)


async def test_every_sampling_field_reaches_the_shard(client: httpx.AsyncClient, cluster: Cluster) -> None:
    sampling = {
        "temperature": 0,
        "top_p": 0.5,
        "stop": "end",
        "seed": 7,
        "presence_penalty": -1,
        "min_tokens": 4,
        "frequency_penalty": 1.5,
    }
    cluster.place("ada")
    await client.post(CHAT, json={**HELLO, **sampling, "max_tokens": 1, "max_completion_tokens": 9, "user": "ada"})
    sent = cluster.shards.of("ada").chats[0].sampling
    assert (sent.temperature, sent.top_p, sent.stop, sent.seed) == (0, 0.5, ("end",), 7)
    assert (sent.presence_penalty, sent.frequency_penalty, sent.max_tokens) == (-1, 1.5, 9)
    assert sent.given()["min_tokens"] == 4


async def test_text_parts_are_joined_and_the_developer_speaks_as_system(
    client: httpx.AsyncClient, cluster: Cluster
) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    cluster.place("ada")
    await client.post(CHAT, json={"model": MODEL, "messages": messages, "user_id": "ada"})
    assert cluster.shards.of("ada").chats[0].messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one\ntwo"},
    )


@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        ({"user_id": "a", "user": "c", "safety_identifier": "d"}, {"x-user-id": "b"}, "a"),
        ({"user": "c", "safety_identifier": "d"}, {"x-user-id": "b"}, "b"),
        ({"user": "c", "safety_identifier": "d"}, {}, "c"),
        ({"safety_identifier": "d"}, {}, "d"),
        ({}, {"x-user-id": "Ада/Ловлас".encode()}, "Ада/Ловлас"),
    ],
)
async def test_the_caller_is_the_first_identity_in_order(
    client: httpx.AsyncClient, cluster: Cluster, body: dict[str, str], headers: dict[str, Any], expected: str
) -> None:
    shard = cluster.place(expected)
    assert (await client.post(CHAT, json={**HELLO, **body}, headers=headers)).status_code == 200
    assert [chat.asker for chat in shard.chats] == [expected]


async def test_a_caller_without_identity_is_answered_without_memory(
    client: httpx.AsyncClient, cluster: Cluster
) -> None:
    answers = [(await client.post(CHAT, json=HELLO)).json() for _ in range(4)]
    assert {answer["memory"]["mode"] for answer in answers} == {"off"}
    assert cluster.directory.placements == {}
    assert [len(shard.chats) for shard in cluster.shards.by_id.values()] == [2, 2], "the shards take turns"


async def test_a_user_for_whom_nothing_was_ever_stored_is_answered_by_the_same_shard_and_leaves_no_trace(
    client: httpx.AsyncClient, cluster: Cluster
) -> None:
    for user in ["ada"] * 3 + [f"scanned-{n}" for n in range(20)]:
        assert (await client.post(CHAT, json={**HELLO, "user_id": user})).status_code == 200
    assert cluster.directory.placements == {}
    answered = [[chat.asker for chat in shard.chats] for shard in cluster.shards.by_id.values()]
    assert sorted(chats.count("ada") for chats in answered) == [0, 3]
    assert all(answered), "users are spread over the shards"


@pytest.mark.parametrize("mode", ["inject", "prompt", "off"])
async def test_the_memory_object_sets_mode_and_number_of_facts(
    client: httpx.AsyncClient, cluster: Cluster, mode: str
) -> None:
    cluster.place("ada")
    body = {**HELLO, "user_id": "ada", "memory": {"mode": mode, "top_k": 3}}
    assert (await client.post(CHAT, json=body)).json()["memory"]["mode"] == mode
    assert cluster.shards.of("ada").chats[0].top_k == 3


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}},
        {"logprobs": False, "top_logprobs": 0, "logit_bias": {}, "modalities": ["text"], "store": False},
        {"tools": None, "functions": None, "stop": None, "stream_options": None, "memory": None, "stream": None},
        {"some_vendor_field": {"x": 1}, "metadata": {"a": "b"}, "service_tier": "auto", "prompt_cache_key": "k"},
    ],
)
async def test_fields_that_ask_for_nothing_and_unknown_ones_are_accepted(
    client: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    assert (await client.post(CHAT, json={**HELLO, **fields})).status_code == 200


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ContextTooLong("The prompt has 9 tokens and the model 8.", field="messages"), 400, "context_length_exceeded"),
        (Busy("Shard shard-a is full.", retry_after_s=2.2), 429, "shard_busy"),
        (EngineFailed("The engine ended this request."), 500, "engine_failed"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_first_token_has_its_own_status(
    client: httpx.AsyncClient, cluster: Cluster, error: Any, status: int, code: str, stream: bool
) -> None:
    for shard in cluster.shards.by_id.values():
        shard.refuse_with = error
    response = await client.post(CHAT, json={**HELLO, "stream": stream})
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert response.json()["detail"] == error.message
    assert response.headers.get("retry-after") == ("3" if status == 429 else None)


@pytest.mark.parametrize("error", [EngineFailed("The engine ended this request."), RuntimeError("a secret")])
async def test_an_error_in_the_middle_ends_the_stream_as_an_event(
    client: httpx.AsyncClient, cluster: Cluster, error: Exception
) -> None:
    for shard in cluster.shards.by_id.values():
        shard.break_with = error
    response = await client.post(CHAT, json={**HELLO, "stream": True})
    assert response.status_code == 200
    *_, last = events_of(response)
    assert last["error"]["type"] == "server_error"
    assert "secret" not in response.text


async def test_the_models_are_listed_by_the_name_that_is_served(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == [MODEL]
    assert (await client.get(f"/v1/models/{MODEL}")).json() == listed["data"][0]
    assert (await client.get("/v1/models/org/other")).json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_ends_well_is_never_aborted(
    client: httpx.AsyncClient, cluster: Cluster, stream: bool
) -> None:
    cluster.place("ada")
    assert (await client.post(CHAT, json={**HELLO, "user_id": "ada", "stream": stream})).status_code == 200
    assert not cluster.shards.of("ada").aborted.is_set()
