"""Two shards whose workers reach each other, and what has to hold of both at a test's end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from moving_pair import ALICE, Pair, two_shards
from redis.asyncio import Redis

from deployments import deterministic_lines
from deployments.deterministic import DeterministicEngine


@pytest.fixture
async def pair(own_valkey: tuple[Redis, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    monkeypatch.setattr(deterministic_lines, "STALL_S", 0.3)
    async with AsyncExitStack() as opened:
        pair = await two_shards(opened, own_valkey, tmp_path)
        pair.meet()
        await pair.begin()
        yield pair
        for shard in (pair.one, pair.other):
            await shard.shard.tiers.writer.written()
            shard.shard.tiers.check_integrity()
            engine = shard.shard.engine
            assert isinstance(engine, DeterministicEngine)
            device = shard.shard.tiers.device
            assert set(engine.chunks) == {id_ for id_ in engine.chunks if device.peek_resident(id_)}, "left on a worker"
            assert len(device) == len(engine.chunks), "room that is never given back"


def encoded_tokens(pair: Pair) -> int:
    return int(pair.other.shard.engine.counters["encode_prefilled_tokens"])


async def left_nothing(pair: Pair) -> None:
    """The target has nothing of a user who stayed."""
    assert (await pair.placement()).shard == pair.one.me
    assert pair.other.shard.tiers.ids_of(ALICE) == set()
