"""A request that cannot be served gets a 4xx with one sentence that names the field, in OpenAI's shape."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from gateway_fakes import MODEL, Cluster
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CHAT = "/v1/chat/completions"
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
IMAGE = [{"type": "image_url", "image_url": {"url": "data:"}}]


def refused(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of a refusal, checked for its shape."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error", "detail"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["detail"] == body["error"]["message"]
    assert body["detail"].endswith(".")
    assert "\n" not in body["detail"]
    assert "Traceback" not in response.text
    assert response.headers["x-request-id"]
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": IMAGE}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"seed": 2**63}, "seed"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"n": 2}, "n"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True}, "logprobs"),
        ({"logit_bias": {"50256": -100}}, "logit_bias"),
        ({"memory": {"mode": "sometimes"}}, "memory.mode"),
        ({"memory": {"top_k": -1}}, "memory.top_k"),
        ({"memory": {"top_k": 101}}, "memory.top_k"),
        ({"memory": {"topk": 3}}, "memory.topk"),
        ({"memory": []}, "memory"),
        ({"user_id": " "}, "user_id"),
        ({"user_id": "x" * 257}, "user_id"),
        ({"user_id": 7}, "user_id"),
        ({"user": ""}, "user"),
    ],
)
async def test_a_chat_with_a_bad_field_is_refused_by_its_name(
    client: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    error = refused(await client.post(CHAT, json={**HELLO, **fields}))
    assert error["param"] == param
    assert f"'{param}'" in error["message"]
    assert error["type"] == "invalid_request_error"


async def test_a_missing_model_is_required_and_an_unknown_one_not_found(client: httpx.AsyncClient) -> None:
    without = {"messages": HELLO["messages"]}
    assert refused(await client.post(CHAT, json=without))["message"] == "'model' is required."
    assert refused(await client.post(CHAT, json={**HELLO, "model": "gpt"}), 404)["code"] == "model_not_found"


@pytest.mark.parametrize("path", [CHAT, "/v1/memories"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"model": "\xff"}',
        b'{"model": "tiny", "user_id": "\\ud800", "messages": [{"role": "user", "content": "x"}]}',
        b'{"model": "tiny", "user_id": "u", "messages": [{"role": "user", "content": "\\udfff"}]}',
        b'{"model": NaN}',
        b"[" * 10_000,
    ],
)
async def test_a_body_that_is_not_a_json_object_in_utf8_is_refused(
    client: httpx.AsyncClient, path: str, body: bytes
) -> None:
    refused(await client.post(path, content=body))


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"messages": []}, 400, "messages"),
        ({"messages": ""}, 400, "messages[0].content"),
        ({"messages": [{"role": "user", "content": " \n"}]}, 400, "messages[0].content"),
        ({"messages": [{"content": "fine"}, {"content": 5}]}, 400, "messages[1].content"),
        ({"messages": [{"content": "fine"}, {"content": "x" * 8193}]}, 413, "messages[1].content"),
        ({"messages": [{"content": str(i)} for i in range(101)]}, 400, "messages"),
        ({"messages": None}, 400, "messages"),
        ({"user_id": None}, 400, "user_id"),
        ({"user_id": "\t"}, 400, "user_id"),
        ({"infer": "no"}, 400, "infer"),
        ({"agent_id": " "}, 400, "agent_id"),
        ({"user_id": "a\x1fb"}, 400, "user_id"),
        ({"metadata": {"a": "x" * 20_000}}, 400, "metadata"),
        ({"metadata": "text"}, 400, "metadata"),
        ({"expiration_date": "tomorrow"}, 400, "expiration_date"),
        ({"timestamp": -1}, 400, "timestamp"),
        ({"filters": {"colour": "red"}}, 400, "filters"),
        ({"custom_categories": [{"food": "what one eats"}]}, 400, "custom_categories"),
    ],
)
async def test_facts_that_cannot_be_kept_are_refused_and_nothing_is_stored(
    client: httpx.AsyncClient, cluster: Cluster, fields: dict[str, Any], status: int, param: str
) -> None:
    body = {"user_id": "ada", "messages": "I like tea.", "infer": False, **fields}
    error = refused(await client.post("/v1/memories", json=body), status)
    assert error["param"] == param
    assert f"'{param}'" in error["message"]
    assert cluster.directory.placements == {}


@pytest.mark.parametrize(
    ("method", "query", "param"),
    [
        ("DELETE", "", "user_id"),
        ("DELETE", "?user_id=", "user_id"),
        ("DELETE", "?user_id=a&user_id=b", "user_id"),
        ("DELETE", "?user_id=%ff", "user_id"),
        ("GET", "", "user_id"),
        ("GET", "?user_id=a&page=0", "page"),
        ("GET", "?user_id=a&page=%D9%A3", "page"),
        ("GET", "?user_id=a&page_size=201", "page_size"),
        ("GET", "?user_id=a&page_size=" + "9" * 5000, "page_size"),
    ],
)
async def test_a_query_that_does_not_name_one_user_and_a_page_is_refused(
    client: httpx.AsyncClient, cluster: Cluster, method: str, query: str, param: str
) -> None:
    assert refused(await client.request(method, f"/v1/memories{query}"))["param"] == param
    assert cluster.directory.placements == {}


@pytest.mark.parametrize("header", [b"", b" ", b"\xff", b"x" * 257])
async def test_a_header_that_is_no_user_id_is_refused(client: httpx.AsyncClient, header: bytes) -> None:
    assert refused(await client.post(CHAT, json=HELLO, headers={"x-user-id": header}))["param"] == "x-user-id"


async def test_a_body_over_the_limit_is_refused_whether_or_not_it_says_its_length(client: httpx.AsyncClient) -> None:
    async def pieces() -> Any:
        for _ in range(40):
            yield b" " * 65_536

    assert refused(await client.post(CHAT, content=b" " * (1 << 21)), 413)["code"] == "too_large"
    assert refused(await client.post(CHAT, content=pieces()), 413)["code"] == "too_large"


async def test_unknown_paths_and_methods_are_told_apart(client: httpx.AsyncClient) -> None:
    refused(await client.get("/v1/nothing"), 404)
    assert refused(await client.get(CHAT), 405)["message"] == f"This path does not have the method: GET {CHAT}."


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
CHAT_FIELDS = [
    *("messages", "temperature", "top_p", "max_tokens", "max_completion_tokens", "stop", "seed", "stream", "user"),
    *("stream_options", "memory", "user_id", "n", "tools", "response_format", "logprobs", "presence_penalty"),
]
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "assistant", "tool"]), "content": JSON}),
    max_size=3,
)


def encoded(value: object) -> bytes:
    return json.dumps(value).encode()  # lone surrogates and NaN included


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=st.dictionaries(st.sampled_from(CHAT_FIELDS), JSON, max_size=4), messages=MESSAGES)
async def test_no_chat_body_brings_the_gateway_down(
    client: httpx.AsyncClient, fields: dict[str, Any], messages: list[Any]
) -> None:
    body = {"model": MODEL, "messages": messages, **fields}
    response = await client.post(CHAT, content=encoded(body))
    assert response.status_code < 500, response.text
    assert b'"server_error"' not in response.content


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=st.dictionaries(st.sampled_from(["user_id", "messages", "infer", "x"]), JSON, max_size=4))
async def test_no_memory_body_brings_the_gateway_down(client: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    response = await client.post("/v1/memories", content=encoded({"user_id": "a", "messages": "b", **fields}))
    assert response.status_code < 500, response.text


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.binary(max_size=60))
async def test_no_bytes_bring_the_gateway_down(client: httpx.AsyncClient, body: bytes) -> None:
    assert (await client.post(CHAT, content=body)).status_code in (400, 404)
