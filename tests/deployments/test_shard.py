"""A shard's calls, with the real planner, residents and ledger behind them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from resident_home import PLACEMENT, Home
from slow_engine import dead

from connector.chunk import ChunkId
from connector.engine import EngineDelta
from connector.plan import PromptPlan
from connector.reason import Reason
from deployments.heads import Heads
from deployments.memory_calls import DeleteCall
from deployments.messages import ChatCall, ChatFinished, ChatStarted, MemoryUse, Sampling
from deployments.shard import Shard
from sharding.errors import EngineFailed, NotFound, WrongShard
from sharding.ids import FactId, Placement
from sharding.user_memory import UserMemory

HELLO = ({"role": "user", "content": "What is fact 1?"},)


class OneUser:
    """The table and the store of a shard with one user, who may turn out to be another shard's."""

    def __init__(self, memory: UserMemory) -> None:
        self.memory = memory
        self.owned = True

    def __contains__(self, user: object) -> bool:
        return self.owned

    def drop(self, placement: Placement) -> None: ...

    @asynccontextmanager
    async def use(self, placement: Placement) -> AsyncIterator[UserMemory]:
        if not self.owned:
            raise WrongShard("moved")
        yield self.memory

    @property
    def registry(self) -> OneUser:
        return self

    async def unregister(self, *_: object, empty: bool) -> None: ...

    async def delete(self, placement: Placement, fact_ids: Sequence[FactId]) -> int:
        return sum(id_ in self.memory for id_ in fact_ids)


class House:
    """A shard around a `Home`, and what its engine was seen to do."""

    def __init__(self) -> None:
        self.home = home = Home()
        self.table = OneUser(home.memory)
        self.pinned_at_abort: bool | None = None
        self.ends = False
        engine: Any = home.engine
        engine.max_model_len, engine.generate = 1_000, self.generate
        heads = Heads("model", home.encoder, home.ledger, home.template.default_head())
        parts: Any = (engine, home.tiers, home.encoder, heads, home.residents, home.embedder, home.template)
        self.shard = Shard(
            *parts, self.table, self.table, canary=home.canary, max_requests_in_flight=1, max_fact_tokens=99
        )  # type: ignore[arg-type]

    async def generate(self, request_id: str, plan: PromptPlan, sampling: Any) -> AsyncGenerator[EngineDelta, None]:
        try:
            while not self.ends:
                yield EngineDelta((1,), "a", None, 0, 0, None)
            yield EngineDelta((1,), "a", "stop", plan.load_tokens, 0, None)
        finally:
            await asyncio.sleep(0)
            everything = self.home.ledger.budget_bytes
            self.pinned_at_abort = self.home.ledger.reserve("bob", [(ChunkId("bob"), everything - 1)]) is None


@pytest.fixture
async def house() -> AsyncIterator[House]:
    house = House()
    await house.home.tell(0, 1, 2)
    await house.home.settled()
    yield house
    house.shard.encoder.close()
    house.home.ledger.check_integrity()


async def test_a_chat_that_is_closed_is_aborted_before_its_chunks_may_be_evicted(house: House) -> None:
    await house.shard.heads.piece(house.home.template.default_head())
    await house.shard.heads.encoded()
    async with aclosing(house.shard.chat(ChatCall("r", PLACEMENT, HELLO, Sampling()))) as events:
        started = await anext(events)
        assert isinstance(started, ChatStarted)
        assert len(started.memory.fact_ids) == 3
    assert house.pinned_at_abort


async def test_memory_that_is_text_is_counted_and_told_under_its_reason_until_its_chunk_is_there(house: House) -> None:
    house.ends = True
    head = len(house.home.template.default_head())

    async def last_of_a_chat() -> MemoryUse:
        events = [event async for event in house.shard.chat(ChatCall("r", PLACEMENT, HELLO, Sampling()))]
        assert isinstance(events[-1], ChatFinished)
        return events[-1].memory

    use = await last_of_a_chat()  # the facts have chunks, the head has none yet, and only a prefix can be injected
    assert use.fallback == Reason.NOT_ENCODED
    counted = house.shard.memory_counts.plain()
    assert counted["memory_tokens_prefilled_not_encoded"] == head + use.memory_tokens
    await house.shard.heads.encoded()
    assert (await last_of_a_chat()).fallback is None
    assert house.shard.memory_counts.plain() == counted | {"memory_tokens_injected": head + use.memory_tokens}


async def test_a_user_who_moved_away_leaves_no_chunk_here(house: House) -> None:
    house.table.owned = False
    with pytest.raises(WrongShard):
        await anext(house.shard.chat(ChatCall("r", PLACEMENT, HELLO, Sampling())))
    await house.shard.users.background_done()
    assert house.home.ledger.ids_of(PLACEMENT.user) == []
    assert house.home.engine.chunks == {}


async def test_a_deletion_is_not_acknowledged_until_the_workers_have_dropped_it_however_often_it_is_tried(
    house: House,
) -> None:
    call = DeleteCall("r", PLACEMENT, FactId("f2"))
    house.home.engine.drops_fail_with = dead()
    for _ in range(2):
        with pytest.raises(EngineFailed):
            await house.shard.ask(call)
    assert "- fact 2\n" in house.home.worker_texts()
    house.home.engine.drops_fail_with = None
    with pytest.raises(NotFound):
        await house.shard.ask(call)
    assert "- fact 2\n" not in house.home.worker_texts()
