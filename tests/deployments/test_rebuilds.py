"""Corrections on a shard: served at once beside the memory, and built into it by the policy or on demand."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from resident_home import PLACEMENT, Home
from slow_engine import dead
from tiered_shard import TieredShard, chunk_files, tiered_shard

from deployments.deterministic import mark
from deployments.memory_calls import DeleteCall, RebuildCall, UpdateCall
from deployments.messages import Verdict
from deployments.rebuilds import AGAIN_S, Rebuilds
from deployments.resident_use import ResidentUse
from sharding.ids import FactId, Placement
from sharding.rebuilding import RebuildPolicy
from sharding.user_memory import UserMemory
from tests.deployments.test_chat_plan import Asking, text

ROOMY = 100_000


@pytest.fixture
async def home() -> AsyncIterator[Home]:
    home = Home(keep_stale=True)
    yield home
    home.encoder.close()
    home.ledger.check_integrity()


class OneUser:
    """The part of `UserTable` and `ResidentUse` that looks after one user."""

    def __init__(self, home: Home) -> None:
        self.home = home

    def memories(self) -> list[UserMemory]:
        return [self.home.memory]

    def use(self, placement: Placement) -> Any:
        assert placement == PLACEMENT
        return _Used(self.home.memory)


class _Used:
    def __init__(self, memory: UserMemory) -> None:
        self.memory = memory

    async def __aenter__(self) -> UserMemory:
        return self.memory

    async def __aexit__(self, *_: object) -> None: ...


def rebuilds_of(home: Home, policy: RebuildPolicy) -> Rebuilds:
    one: Any = OneUser(home)
    users: ResidentUse = one
    return Rebuilds(one, users, home.residents, policy, clock=lambda: home.now)


async def told(home: Home, count: int) -> None:
    await home.tell(*range(count))
    await home.settled()


async def test_the_old_text_is_in_no_chunk_of_its_own_when_the_correction_is_done(home: Home) -> None:
    await told(home, 5)
    await home.correct(1, "fact one")
    assert home.worker_texts() == ["- fact 0\n", "- fact 2\n", "- fact 3\n", "- fact 4\n"]
    await home.settled()
    assert "- fact one\n" not in home.worker_texts(), "a rebuild makes it, with what it makes stale"
    assert home.encoded() == {0, 2, 3, 4}


async def test_a_deletion_leaves_nothing_that_was_encoded_behind_the_fact_or_an_older_text_of_it(home: Home) -> None:
    await told(home, 5)
    await home.correct(1, "fact one")
    home.engine.fails_with = RuntimeError("nothing is encoded again in this test")
    await home.delete(1)
    assert home.worker_texts() == ["- fact 0\n", "- fact 4\n"]


async def test_after_a_rebuild_the_chunks_are_those_of_a_full_build(home: Home) -> None:
    await told(home, 7)
    await home.correct(2, "fact two")
    done = await home.residents.rebuild(home.memory)
    assert done.facts == 4, "itself, 3, 4 and 5"
    corrected = set(home.engine.chunks)
    full = Home()
    await full.tell(*range(7))
    await full.correct(2, "fact two")
    await full.settled()
    assert corrected == set(full.engine.chunks)
    assert set(home.ledger.ids_of(PLACEMENT.user)) == corrected, "nothing stale is left"
    full.encoder.close()


async def test_a_rebuild_says_what_it_prefills_and_what_a_full_build_would(home: Home) -> None:
    await told(home, 20)
    before = sum(len(prefill.token_ids) for prefill in home.engine.prefills)
    await home.correct(9, "fact nine")
    done = await home.residents.rebuild(home.memory)
    prefilled = sum(len(prefill.token_ids) for prefill in home.engine.prefills) - before
    assert done.tokens == prefilled
    assert done.full_tokens == pytest.approx(before, rel=0.05)
    assert done.share == done.tokens / done.full_tokens < 0.3


async def test_a_rebuild_without_room_leaves_the_memory_as_it_was_served(home: Home) -> None:
    await told(home, 5)
    await home.correct(1, "fact one")
    held = set(home.engine.chunks)
    home.ledger.budget_bytes = home.ledger.bytes
    assert (await home.residents.rebuild(home.memory)).facts == 0
    assert set(home.engine.chunks) == held


async def test_the_policy_decides_when_and_the_counters_say_what_it_cost(home: Home) -> None:
    rebuilds = rebuilds_of(home, RebuildPolicy(after_s=60.0))
    await told(home, 5)
    await rebuilds.look()
    await home.correct(1, "fact one")
    await rebuilds.look()
    stale = sum(len("- fact n\n") for _ in range(2)) + len("- fact one\n")
    assert rebuilds.stale() == (2, stale)
    home.now = 59.0
    await rebuilds.look()
    assert rebuilds.counters["rebuilds"] == 0
    home.now = 60.0
    await rebuilds.look()
    assert rebuilds.stale() == (0, 0)
    assert (rebuilds.counters["rebuilds"], rebuilds.counters["rebuilt_facts"]) == (1, 3)
    assert 0 < rebuilds.counters["rebuild_tokens"] < rebuilds.counters["rebuild_full_tokens"]


async def test_a_rebuild_that_failed_is_tried_again_and_not_at_once(home: Home) -> None:
    rebuilds = rebuilds_of(home, RebuildPolicy(stale_share=0.0))
    await told(home, 5)
    await home.correct(1, "fact one")
    home.engine.drops_fail_with = dead()
    await rebuilds.look()
    home.engine.drops_fail_with = None
    await home.correct(1, "fact uno")
    await rebuilds.look()
    assert rebuilds.stale() != (0, 0)
    home.now = AGAIN_S
    await rebuilds.look()
    assert rebuilds.stale() == (0, 0)
    assert "- fact uno\n" in home.worker_texts()


# -- what is served meanwhile -----------------------------------------------------------------------------------------


async def asking(home: Home) -> Asking:
    asking = Asking(home)
    await asking.heads.piece(home.template.default_head())
    await told(home, 4)
    await asking.heads.encoded()
    return asking


async def test_a_correction_is_text_nearest_to_the_question_and_the_rest_comes_out_of_chunks(home: Home) -> None:
    chat = await asking(home)
    home.canary.verdict = Verdict("passed", 0, "as good", phrasing="Correction: {}")
    assert (await chat.ask(("user", "Which?"))).use.fact_ids[0] != "f1"
    await home.correct(1, "fact new")
    plan = await chat.ask(("user", "Which?"))
    assert plan.use.fact_ids[0] == "f1"
    assert text(plan).endswith("- Correction: fact new\n\n[user] Which?\n[assistant]")
    assert len(plan.prompt.load) == 4, "the head and three facts"
    assert plan.prompt.unready is None


async def test_after_the_rebuild_the_fact_stands_where_it_belongs(home: Home) -> None:
    chat = await asking(home)
    ranked = (await chat.ask(("user", "Which?"))).use.fact_ids
    assert ranked[0] != "f1"
    await home.correct(1, "fact new")
    await home.residents.rebuild(home.memory)
    plan = await chat.ask(("user", "Which?"))
    assert len(plan.prompt.load) == 5
    assert plan.use.fact_ids == ranked
    assert "- fact new\n" in text(plan)


async def test_where_memory_is_text_nothing_is_out_of_order_or_put_otherwise(home: Home) -> None:
    chat = await asking(home)
    await home.correct(0, "fact new")
    home.canary.verdict = Verdict("failed", None, "worse than text", phrasing="Correction: {}")
    plan = await chat.ask(("user", "Which?"))
    assert "Correction" not in text(plan)
    assert plan.prompt.load == ()


# -- a whole shard ----------------------------------------------------------------------------------------------------


@pytest.fixture
async def shard(own_valkey: tuple[Redis, str], tmp_path: Path) -> AsyncIterator[TieredShard]:
    await own_valkey[0].flushall()
    sizes: dict[str, Any] = {"chunk_device_bytes": ROOMY, "rebuild_after_s": 1e9, "rebuild_stale_share": 1.0}
    async with tiered_shard("here", *own_valkey, tmp_path, **sizes) as shard:
        yield shard


async def corrected(shard: TieredShard, placement: Placement, fact: FactId, text: str) -> None:
    await shard.shard.ask(UpdateCall(uuid.uuid4().hex, placement, fact, text))
    await shard.shard.encoder.settled(placement.user)


FACTS = ("Ann keeps bees.", "Ann lives in Oslo.", "Ann rows on Sunday.", "Ann sails on Monday.")


async def test_no_chat_reads_an_old_text_before_the_rebuild_or_after_it(shard: TieredShard) -> None:
    ann = await shard.owns("ann")
    facts = await shard.told(ann, *FACTS)
    await corrected(shard, ann, facts[1], "Ann lives in Riga.")
    expected = {mark(text) for text in (*FACTS, "Ann lives in Riga.") if text != FACTS[1]}
    read, finished = await shard.asked(ann, "Where does Ann live?")
    assert set(read) == expected
    assert read[-1] == mark("Ann lives in Riga."), "nearest to the question"
    assert finished.memory.injected_tokens
    assert finished.memory.stale_facts == 2, "those told after it"
    done = await shard.shard.ask(RebuildCall("r", ann))
    assert 0 < done.tokens < done.full_tokens
    read, finished = await shard.asked(ann, "Where does Ann live?")
    assert set(read) == expected
    assert (finished.memory.fallback, finished.memory.stale_facts) == (None, 0)


async def test_files_hold_nothing_stale_once_it_is_rebuilt_or_its_reason_deleted(
    shard: TieredShard, tmp_path: Path
) -> None:
    ann = await shard.owns("ann")
    facts = await shard.told(ann, *FACTS)
    held = shard.shard.tiers.ids_of("ann")
    await corrected(shard, ann, facts[1], "Ann lives in Riga.")
    stale = shard.shard.tiers.ids_of("ann") & held
    assert len(stale) == 3
    await shard.shard.ask(DeleteCall("r", ann, facts[1]))
    assert len(shard.shard.tiers.ids_of("ann") & stale) == 1, "the one that was told before it"
    names = [path.name for path in chunk_files(tmp_path)]
    assert sum(any(id_ in name for name in names) for id_ in stale) == 1
    await corrected(shard, ann, facts[0], "Ann keeps wasps.")
    await shard.shard.ask(RebuildCall("r", ann))
    await shard.shard.tiers.writer.written()
    assert shard.shard.rebuilds.stale() == (0, 0)
    assert not shard.shard.tiers.ids_of("ann") & held


async def test_where_nothing_stale_may_be_served_an_update_drops_what_a_deletion_would(
    own_valkey: tuple[Redis, str], tmp_path: Path
) -> None:
    await own_valkey[0].flushall()
    sizes: dict[str, Any] = {"chunk_device_bytes": ROOMY, "serve_stale": False}
    async with tiered_shard("here", *own_valkey, tmp_path, **sizes) as shard:
        ann = await shard.owns("ann")
        facts = await shard.told(ann, *FACTS)
        held = shard.shard.tiers.ids_of("ann")
        await corrected(shard, ann, facts[1], "Ann lives in Riga.")
        assert len(shard.shard.tiers.ids_of("ann") & held) == 1
        assert shard.shard.rebuilds.stale() == (0, 0)
