"""The real `openai` clients, unmodified, over a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import openai
import pytest
from gateway_fakes import MODEL, Cluster
from openai import AsyncOpenAI, OpenAI

from sharding.errors import Busy, EngineFailed

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
def sync_client(server_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server_url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(server_url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{server_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_it_gets_an_answer_with_usage_and_memory(sync_client: OpenAI) -> None:
    answer = sync_client.chat.completions.create(
        model=MODEL, messages=MESSAGES, extra_body={"user_id": "ada", "memory": {"mode": "prompt"}}
    )
    assert answer.choices[0].message.content == "You said: hello"
    assert answer.usage.prompt_tokens_details.cached_tokens == 5
    assert answer.model_extra["memory"]["mode"] == "prompt"


def test_it_streams(sync_client: OpenAI) -> None:
    chunks = list(
        sync_client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, user="ada"
        )
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == "You said: hello"
    assert chunks[-1].usage.total_tokens == 24
    assert chunks[0].model_extra["memory"]["mode"] == "inject"


async def test_it_gets_an_answer_and_streams_asynchronously(async_client: AsyncOpenAI) -> None:
    answer = await async_client.chat.completions.create(model=MODEL, messages=MESSAGES, safety_identifier="ada")
    assert answer.choices[0].finish_reason == "stop"
    stream = await async_client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    texts = [choice.delta.content or "" async for chunk in stream for choice in chunk.choices]
    assert "".join(texts) == "You said: hello"


def test_an_answer_can_be_sent_back_as_history(sync_client: OpenAI) -> None:
    message = sync_client.chat.completions.create(model=MODEL, messages=MESSAGES).choices[0].message
    again = sync_client.chat.completions.create(model=MODEL, messages=[*MESSAGES, message, *MESSAGES])
    assert again.choices[0].message.content == "You said: hello"


def test_refusals_are_its_own_exceptions(sync_client: OpenAI, cluster: Cluster) -> None:
    create = sync_client.chat.completions.create
    with pytest.raises(openai.BadRequestError, match="'temperature'") as refused:
        create(model=MODEL, messages=MESSAGES, temperature=9)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        create(model="gpt", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    for shard in cluster.shards.by_id.values():
        shard.refuse_with = Busy("This shard is full.")
    with pytest.raises(openai.RateLimitError, match="full"):
        create(model=MODEL, messages=MESSAGES)


def test_an_error_in_the_middle_of_a_stream_is_raised(sync_client: OpenAI, cluster: Cluster) -> None:
    for shard in cluster.shards.by_id.values():
        shard.break_with = EngineFailed("The engine ended this request.")
    stream = sync_client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="ended this request"):
        list(stream)


def test_the_models_are_listed(sync_client: OpenAI) -> None:
    assert [model.id for model in sync_client.models.list()] == [MODEL]
