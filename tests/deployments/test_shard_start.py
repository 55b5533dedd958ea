"""A shard that cannot start says so before it starts an engine, or ends the engine that it started."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from slow_engine import SlowEngine
from transformers import AutoTokenizer

from cluster.models import embedding_model, prepare_language_model
from cluster.settings import Settings
from connector.engine import EngineSettings, MemoryEngine
from deployments.embedder import BATCH, Embedder
from deployments.settings import ShardSettings
from deployments.shard_start import open_shard
from sharding.errors import EngineFailed, StartupError
from sharding.ids import ShardId
from sharding.lease import Lease


@pytest.fixture(scope="module")
def embedding_path() -> Path:
    return embedding_model(Settings.from_environment())


def settings(model: Path, embedding: Path) -> ShardSettings:
    sizes = {"kv_cache_bytes": 1, "chunk_device_bytes": 10_000, "window_facts": 1, "max_fact_tokens": 9}
    times = {"heartbeat_interval_s": 1.0, "heartbeat_ttl_s": 1.0, "redis_grace_s": 1.0}
    more: dict[str, Any] = {"threads": 1, "max_model_len": None, "max_requests_in_flight": 1, **sizes, **times}
    return ShardSettings("tiny", model, embedding, "redis://nowhere", "test", 1, **more)


async def start(model: Path, embedding: Path) -> None:
    nobody: Any = None
    await open_shard(settings(model, embedding), ShardId("here"), nobody, nobody, Lease(1.0, 1.0))


class FailingEngine(SlowEngine):
    """Starts, and fails the first chat."""

    max_model_len = 1_000
    running_engines = 0

    async def generate(self, *_: Any) -> Any:
        raise EngineFailed("The engine of this shard has died.")
        yield

    def shutdown(self) -> None:
        FailingEngine.running_engines -= 1


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[EngineSettings]:
    """The engines that were started."""
    started: list[EngineSettings] = []

    async def start(settings: EngineSettings) -> FailingEngine:
        started.append(settings)
        FailingEngine.running_engines += 1
        return FailingEngine(10_000)

    monkeypatch.setattr(MemoryEngine, "start", start)
    return started


async def test_a_model_without_a_chat_template_is_refused_before_an_engine_is_started(
    started: list[EngineSettings], embedding_path: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(prepare_language_model(Settings.from_environment()))
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(StartupError, match="no chat template"):
        await start(tmp_path, embedding_path)
    assert started == []


async def test_an_engine_behind_which_the_start_fails_is_ended(
    started: list[EngineSettings], embedding_path: Path
) -> None:
    with pytest.raises(EngineFailed):
        await start(prepare_language_model(Settings.from_environment()), embedding_path)
    assert len(started) == 1
    assert FailingEngine.running_engines == 0
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not [task for task in others if "Encoder" in repr(task) and not task.cancelling()], "encoding goes on"


async def test_a_question_does_not_wait_until_all_facts_are_embedded(embedding_path: Path) -> None:
    embedder = Embedder(embedding_path)
    facts = asyncio.create_task(embedder.embed([f"fact number {n}" for n in range(20 * BATCH)]))
    await asyncio.sleep(0)
    question = (await embedder.embed(["What is fact 7?"]))[0]
    assert not facts.done()
    assert (await facts).shape == (20 * BATCH, len(question))
    embedder.close()
