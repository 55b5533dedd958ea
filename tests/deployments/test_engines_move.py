"""A user moves between two shards with real engines: chunks go from one's worker to the other's, and answers stay."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from neighbours import Neighbours
from redis.asyncio import Redis
from transformers import AutoTokenizer

from connector.engine import EngineSettings, MemoryEngine
from connector.template import PromptTemplate
from deployments.deterministic import WordEmbedder
from deployments.encode_pace import CPU_STEP_TOKENS, EncodePace
from deployments.memory_calls import AddCall, MoveCall
from deployments.messages import ChatCall, ChatDelta, ChatFinished, Sampling
from deployments.settings import ShardSettings
from deployments.shard import Shard
from deployments.shard_parts import put_together
from sharding.directory import Directory
from sharding.facts import FactStore
from sharding.ids import Placement, ShardId, UserId
from sharding.keys import KeySpace
from sharding.lease import Lease
from sharding.move import End
from sharding.placement import ShardReport
from sharding.user_memory import UserTable
from tests.connector.conftest import language_model, tiny_llama  # noqa: F401
from tests.connector.engines import check_integrity  # and cores for engines

ADA = UserId("ada")
FACTS = tuple(f"Boat {n} is called {name}." for n, name in enumerate(("Anna", "Berta", "Clara", "Dora", "Emma")))
KEYS = KeySpace("test", "tiny")


@pytest.fixture(scope="module")
async def shards(
    own_valkey: tuple[Redis, str],
    tiny_llama: Path,  # noqa: F811
) -> AsyncIterator[dict[ShardId, Shard]]:
    redis, url = own_valkey
    directory, store = Directory(redis, KEYS), FactStore(redis, KEYS)
    async with AsyncExitStack() as undo:
        shards: dict[ShardId, Shard] = {}
        for name in ("one", "other"):
            engine = await MemoryEngine.start(
                EngineSettings(
                    tiny_llama, 8 << 20, kv_cache_bytes=32 << 20, max_model_len=512, dtype="float32", eager=True
                )
            )
            undo.callback(engine.shutdown)
            me = ShardId(name)
            shards[me] = a_shard(me, engine, tiny_llama, url, directory, store)
            undo.callback(shards[me].close)
            await shards[me].warm_up()
            report = ShardReport(shard=me, model="tiny", ready=True, free_bytes=0, users=0, requests_in_flight=0)
            await directory.heartbeat(report.model_dump_json(), me, 600.0)
        Neighbours(shards)
        yield shards


def a_shard(me: ShardId, engine: MemoryEngine, model: Path, url: str, directory: Directory, store: FactStore) -> Shard:
    sizes: dict[str, Any] = {"kv_cache_bytes": 1, "chunk_device_bytes": 8 << 20, "window_facts": 2}
    more: dict[str, Any] = {"threads": 1, "max_model_len": None, "max_fact_tokens": 99, "max_requests_in_flight": 9}
    times = {"heartbeat_interval_s": 1.0, "heartbeat_ttl_s": 600.0, "redis_grace_s": 1.0}
    settings = ShardSettings("tiny", model, model, url, "test", 1, **sizes, **more, **times)
    lease, embedder = Lease(600.0, 600.0), WordEmbedder()
    lease.acknowledged(time.monotonic())
    table = UserTable(me, directory, store, lease, dim=embedder.dim, capacity=9, embedding_model=embedder.model)
    template, pace = PromptTemplate(AutoTokenizer.from_pretrained(model)), EncodePace(CPU_STEP_TOKENS)
    return put_together(settings, engine, embedder, template, table, store, directory, pace)


async def answer(shard: Shard, placement: Placement) -> tuple[str, ChatFinished]:
    call = ChatCall(
        uuid.uuid4().hex,
        placement,
        ({"role": "user", "content": "What is boat 3 called?"},),
        Sampling(max_tokens=16, temperature=0.0),
        "inject",
        len(FACTS),
    )
    events = [event async for event in shard.chat(call)]
    assert isinstance(events[-1], ChatFinished)
    return "".join(event.text for event in events if isinstance(event, ChatDelta)), events[-1]


@pytest.mark.all_models  # every run moves a user on the whole server: tests/cluster/test_whole_path.py
async def test_a_user_answers_the_same_at_the_target_and_nothing_is_encoded_again(
    shards: dict[ShardId, Shard],
) -> None:
    one, other = shards.values()
    placement = await one.table.directory.claim(ADA, ShardId("one"), None)
    await one.ask(AddCall("a", placement, FACTS))
    await one.encoder.settled(ADA)
    here, finished = await answer(one, placement)
    memory = finished.memory
    assert memory.injected_tokens >= memory.memory_tokens > 0
    encoded = other.engine.counters["encode_prefilled_tokens"]

    async def talk() -> set[str]:
        """Reads go on: they find whoever has the user."""
        heard = set()
        while not moving.done():
            standing = await one.table.directory.lookup(ADA)
            assert standing is not None
            heard.add((await answer(shards[standing.shard], standing))[0])
        return heard

    moving = asyncio.ensure_future(one.ask(MoveCall("m", placement, ShardId("other"))))
    heard = await talk() if not moving.done() else set()
    report = await moving
    assert (report.end, report.sent_chunks) == (End.MOVED, len(FACTS))
    assert heard <= {here}
    there, finished = await answer(other, report.placement)
    assert there == here
    assert (finished.memory.injected_tokens, finished.memory.fallback) == (memory.injected_tokens, None)
    assert other.engine.counters["encode_prefilled_tokens"] == encoded
    assert one.tiers.ids_of(ADA) == set()
    lines = [sum(rank["line_bytes"] for rank in await shard.engine.stats()) for shard in (one, other)]
    assert lines == [report.sent_bytes] * 2

    back = await other.ask(MoveCall("b", report.placement, ShardId("one")))
    assert (back.end, back.sent_chunks) == (End.MOVED, len(FACTS))
    assert (await answer(one, back.placement))[0] == here
    for shard in shards.values():
        shard.tiers.check_integrity()
        assert isinstance(shard.engine, MemoryEngine)
        await check_integrity(shard.engine)
