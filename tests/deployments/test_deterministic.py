"""The engine without a model answers from what it was given to read, so that a wrong answer shows."""

from __future__ import annotations

import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.chunk import CaptureRange, chunk_id
from connector.plan import Piece, PromptPlan, plan_memory
from connector.reason import Reason
from deployments.deterministic import (
    ByteTokenizer,
    DeterministicEngine,
    WordEmbedder,
    answer,
    decode,
    facts_in,
    mark,
    open_shard,
)
from deployments.memory_calls import AddCall, DeleteCall
from deployments.messages import ChatCall, ChatDelta, ChatFinished, Mode, Sampling
from deployments.settings import ShardSettings
from deployments.shard import Shard
from sharding.client import connect
from sharding.directory import Directory
from sharding.errors import EngineFailed
from sharding.facts import FactStore
from sharding.ids import Placement, ShardId, UserId
from sharding.keys import KeySpace
from sharding.lease import Lease
from tests.sharding.real_valkey import running_valkey

ME = ShardId("here")
TOKENIZER = ByteTokenizer()


def piece(text: str, owner: str = "alice") -> Piece:
    tokens = tuple(TOKENIZER.encode(text))
    return Piece(tokens, chunk_id("model", owner, (), tokens))


def plan(*facts: Piece) -> PromptPlan:
    tail = TOKENIZER.encode("<user>Which?</>")
    return plan_memory(piece("head:\n"), facts, tail, "alice", inject=True, max_model_len=1_000, max_tokens=50)


async def hold(engine: DeterministicEngine, *pieces: Piece) -> None:
    for held in pieces:
        assert held.chunk is not None
        await engine.encode("r", held.token_ids, [CaptureRange(held.chunk, 0, len(held.token_ids))], "salt")


async def ask(engine: DeterministicEngine, asked: PromptPlan, max_tokens: int = 50) -> tuple[str, Any]:
    deltas = [delta async for delta in engine.generate("r", asked, engine.sampling(max_tokens))]
    return "".join(delta.text for delta in deltas), deltas[-1]


@given(st.text())
def test_tokens_can_be_read_back(text: str) -> None:
    assert decode(TOKENIZER.encode(text)) == text


def test_a_fact_is_marked_by_its_text_alone() -> None:
    assert mark("a  b\n") == mark("a b") != mark("a c")


async def test_the_answer_marks_the_facts_that_were_read_in_their_order() -> None:
    engine = DeterministicEngine(1 << 20)
    facts = [piece("- nearest\n"), piece("- farther\n")]
    await hold(engine, piece("head:\n"), *facts)
    text, last = await ask(engine, plan(*facts))
    assert text == answer(["farther", "nearest"]) == f"2 facts: {mark('farther')} {mark('nearest')}"
    assert (last.finish_reason, last.fallback) == ("stop", None)
    assert last.injected_tokens == plan(*facts).load_tokens


async def test_what_is_injected_is_what_the_chunks_hold_and_not_what_the_prompt_says() -> None:
    engine = DeterministicEngine(1 << 20)
    mine, others = piece("- mine\n"), piece("- hers\n", "bob")
    await hold(engine, piece("head:\n"), mine, others)
    assert mine.chunk is not None
    assert others.chunk is not None
    engine.chunks[mine.chunk] = engine.chunks[others.chunk]
    text, _ = await ask(engine, plan(mine))
    assert text == answer(["hers"])


async def test_a_missing_chunk_is_read_as_text_and_reported() -> None:
    engine = DeterministicEngine(1 << 20)
    await hold(engine, piece("head:\n"))
    text, last = await ask(engine, plan(piece("- gone\n")))
    assert text == answer(["gone"])
    assert (last.injected_tokens, last.fallback) == (0, Reason.MISSING_CHUNK)


async def test_a_longer_answer_than_asked_for_is_cut() -> None:
    text, last = await ask(DeterministicEngine(0), plan(piece("- a\n")), max_tokens=2)
    assert (text, last.finish_reason) == ("1 facts:", "length")


async def test_chunks_beyond_the_budget_are_not_kept() -> None:
    engine = DeterministicEngine(30, token_bytes=10)
    await hold(engine, piece("123456"), piece("654321"))
    assert [rank["bytes"] for rank in await engine.stats()] == [20]


async def test_one_that_was_shut_down_answers_nobody() -> None:
    engine = DeterministicEngine(1 << 20)
    engine.shutdown()
    with pytest.raises(EngineFailed):
        await ask(engine, plan(piece("- a\n")))


async def test_texts_that_share_words_are_near() -> None:
    near, question, far = await WordEmbedder().embed(["my dog is brown", "which dog is brown", "three old clocks"])
    assert near @ question > 0.5 > far @ question


def test_it_loads_neither_vllm_nor_torch() -> None:
    program = "import sys, deployments.deterministic as d; print([n for n in ('vllm', 'torch') if n in sys.modules])"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout == "[]\n"


# -- in a shard -------------------------------------------------------------------------------------------------------


class House:
    """A shard around it, on a real Redis, and how to talk to it."""

    def __init__(self, shard: Shard, directory: Directory) -> None:
        self.shard, self._directory = shard, directory

    async def owns(self, user: str) -> Placement:
        return await self._directory.claim(UserId(user), ME, None)

    async def told(self, placement: Placement, *texts: str) -> list[str]:
        added = await self.shard.ask(AddCall(uuid.uuid4().hex, placement, texts))
        await self.shard.encoder.settled(placement.user)
        return [fact.fact.id for fact in added]

    async def asked(self, placement: Placement, question: str, mode: Mode = "inject") -> tuple[str, ChatFinished]:
        call = ChatCall("r", placement, ({"role": "user", "content": question},), Sampling(), mode)
        events = [event async for event in self.shard.chat(call)]
        finished = events[-1]
        assert isinstance(finished, ChatFinished)
        return "".join(event.text for event in events if isinstance(event, ChatDelta)), finished


@pytest.fixture(scope="module")
async def house(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    folder = tmp_path_factory.mktemp("v")
    nowhere = Path("/nonexistent")
    sizes: dict[str, Any] = {"kv_cache_bytes": 1, "chunk_device_bytes": 1 << 20, "window_facts": 2}
    more: dict[str, Any] = {"threads": 1, "max_model_len": None, "max_fact_tokens": 99, "max_requests_in_flight": 9}
    times = {"heartbeat_interval_s": 1.0, "heartbeat_ttl_s": 60.0, "redis_grace_s": 1.0}
    with running_valkey(folder) as valkey:
        settings = ShardSettings("m", nowhere, nowhere, valkey.url, "test", 1, **sizes, **more, **times)
        async with connect(valkey.url) as redis:
            keys = KeySpace("test", "m")
            directory, lease = Directory(redis, keys), Lease(60.0, 60.0)
            lease.acknowledged(time.monotonic())
            shard = await open_shard(settings, ME, directory, FactStore(redis, keys), lease)
            yield House(shard, directory)
            shard.close()
            shard.ledger.check_integrity()


@pytest.mark.parametrize("mode", ["inject", "prompt"])
async def test_each_user_is_answered_from_the_own_facts_alone(house: House, mode: Mode) -> None:
    texts = {user: [f"{user} owns boat {n}" for n in range(3)] for user in (f"{mode}-alice", f"{mode}-bob")}
    for user, told in texts.items():
        await house.told(await house.owns(user), *told)
    for user, told in texts.items():
        text, finished = await house.asked(await house.owns(user), "Who owns boat 1 ?", mode)
        assert text.split(" ")[2:][-1] == mark(told[1]), "the nearest is the last"
        assert sorted(text.split(" ")[2:]) == sorted(map(mark, told))
        assert (finished.memory.injected_tokens > 0) == (mode == "inject")


async def test_a_deleted_fact_is_not_read_again(house: House) -> None:
    carol = await house.owns("carol")
    first, _ = await house.told(carol, "carol likes tea", "carol likes rain")
    await house.shard.ask(DeleteCall("r", carol, first))  # type: ignore[arg-type]
    text, _ = await house.asked(carol, "What does carol like?")
    assert text == answer(["carol likes rain"])


async def test_without_memory_no_fact_is_read(house: House) -> None:
    dave = await house.owns("dave")
    await house.told(dave, "dave is tall")
    text, _ = await house.asked(dave, "Who is tall?", "off")
    assert text == answer([])


def test_lists_in_a_prompt_are_facts() -> None:
    assert facts_in("head\n- a b\n- c\n<user>d - e</>") == ["a b", "c"]
