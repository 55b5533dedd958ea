"""What `MemoryEngine` makes of its workers' answers: failures of ours, and no prefill that cannot help."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from connector import engine as engine_module
from connector.chunk import ChunkId
from connector.engine import MemoryEngine
from connector.metadata import CaptureRange
from sharding.errors import EngineFailed

A, B = CaptureRange(ChunkId("a"), 0, 4), CaptureRange(ChunkId("b"), 4, 4)


class OneWorker:
    """An `AsyncLLM` with one worker, which keeps what it computes, but for what it has no room for."""

    model_config = SimpleNamespace(max_model_len=64)
    vllm_config = SimpleNamespace(cache_config=SimpleNamespace(block_size=16))

    def __init__(self) -> None:
        self.cached_tokens = 0
        self.no_room_for: set[ChunkId] = set()
        self.unheard_prefills = 0
        self.prefills: list[SamplingParams] = []
        self.answer: Any = None
        self._complete: set[str] = set()

    async def generate(
        self, prompt: Any, sampling: SamplingParams, request_id: str, priority: int
    ) -> AsyncIterator[Any]:
        self.prefills.append(sampling)
        cached = 0 if sampling.skip_reading_prefix_cache else self.cached_tokens
        captures = sampling.extra_args["kv_transfer_params"]["capture"]
        self._complete = {id_ for id_, start, _ in captures if start >= cached and id_ not in self.no_room_for}
        if len(self.prefills) <= self.unheard_prefills:
            self._complete = set()
        yield SimpleNamespace(num_cached_tokens=cached)

    async def collective_rpc(self, method: str, timeout: float, args: Sequence[Any]) -> list[Any]:  # noqa: ASYNC109  # vLLM's
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is not None:
            await self.answer
        return [(sorted(self._complete & set(args[0])), sorted(self.no_room_for & set(args[0])))]


@pytest.fixture
def llm() -> OneWorker:
    return OneWorker()


@pytest.fixture
def engine(llm: OneWorker) -> MemoryEngine:
    return MemoryEngine(llm, "model", 1, None)


async def test_what_the_prefix_cache_had_is_prefilled_again_to_be_captured(
    engine: MemoryEngine, llm: OneWorker
) -> None:
    llm.cached_tokens = 4
    assert await engine.encode("r", range(8), [A, B], "salt") == {"a", "b"}
    assert [sampling.skip_reading_prefix_cache for sampling in llm.prefills] == [False, True]


async def test_what_was_computed_unheard_of_is_prefilled_again(engine: MemoryEngine, llm: OneWorker) -> None:
    llm.unheard_prefills = 1
    assert await engine.encode("r", range(8), [A, B], "salt") == {"a", "b"}
    assert len(llm.prefills) == 2


async def test_what_a_worker_has_no_room_for_is_not_prefilled_again(engine: MemoryEngine, llm: OneWorker) -> None:
    llm.no_room_for = {A.id, B.id}
    assert await engine.encode("r", range(8), [A, B], "salt") == set()
    assert len(llm.prefills) == 1


@pytest.mark.parametrize("failure", [EngineDeadError(), Exception("Call to collective_rpc method failed: no memory")])
async def test_a_call_that_the_workers_failed_is_a_failure_of_the_engine(
    engine: MemoryEngine, llm: OneWorker, failure: Exception
) -> None:
    llm.answer = failure
    with pytest.raises(EngineFailed) as failed:
        await engine.drop([A.id])
    assert "memory" not in failed.value.message, "what went wrong inside is for the log"


async def test_a_call_that_is_not_answered_in_time_is_a_failure_of_the_engine(
    engine: MemoryEngine, llm: OneWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "RPC_TIMEOUT_S", 0.01)
    llm.answer = asyncio.get_running_loop().create_future()
    with pytest.raises(EngineFailed):
        await engine.drop([A.id])
