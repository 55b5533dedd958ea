"""Users move between shards while they talk: nothing is lost, doubled, stale or refused, wherever it is cut off."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from moving_pair import FACTS, QUESTION, Pair, two_shards
from redis.asyncio import Redis
from tiered_shard import chunk_files

from deployments.memory_calls import ForgetCall, MoveCall, MoveReport
from deployments.mover import _Move
from sharding.errors import EngineFailed, InvalidRequest, Unavailable, WrongShard
from sharding.ids import ShardId, UserId
from sharding.move import DROP_TRIES, Do, End, Outcome
from sharding.placement import PlacementPolicy


@pytest.fixture(params=["by a shared path", "by encoding again", "from worker to worker"])
async def pair(own_valkey: tuple[Redis, str], tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    shared = {"chunk_shared_url": str(tmp_path / "shared"), "chunk_shared_bytes": 1 << 30}
    async with AsyncExitStack() as opened:
        pair = await two_shards(opened, own_valkey, tmp_path, **(shared if request.param == "by a shared path" else {}))
        if request.param == "from worker to worker":
            pair.meet()
        await pair.begin()
        yield pair


async def test_a_user_moves_there_and_back_and_answers_the_same(pair: Pair) -> None:
    for _ in range(4):
        before = await pair.placement()
        report = await pair.move()
        after = await pair.placement()
        assert (report.end, report.placement) == (End.MOVED, after)
        assert after.epoch == before.epoch + 1
        await pair.everything_is_served_by_one()
        source = pair.shards[before.shard].shard
        assert source.ledger.ids_of("alice") == []
        assert chunk_files(Path(source.tiers.files[0].url)) == []


async def test_chunks_that_both_see_need_not_be_encoded_again(pair: Pair, tmp_path: Path) -> None:
    if not (tmp_path / "shared").exists():
        pytest.skip("there is no shared path")
    encoded = pair.other.shard.engine.counters["encode_prefilled_tokens"]
    await pair.move()
    _, finished = await pair.other.asked(await pair.placement(), QUESTION)
    assert finished.memory.injected_tokens >= finished.memory.memory_tokens > 0
    assert pair.other.shard.engine.counters["encode_prefilled_tokens"] == encoded


async def test_nothing_is_lost_or_refused_under_reads_and_writes_that_go_on(pair: Pair) -> None:
    async with pair.talked_to():
        for _ in range(5):
            await asyncio.sleep(0.02)
            assert (await pair.move()).end is End.MOVED
    assert len(pair.told) > len(FACTS)
    await pair.everything_is_served_by_one()


@pytest.mark.parametrize("step", list(Do))
async def test_a_move_that_is_cut_off_anywhere_leaves_one_owner_who_serves_everything(
    pair: Pair, step: Do, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of the source is not killed here, but it is told nothing more: what it holds then must do no harm."""
    if step in (Do.STAY, Do.UNDO):
        monkeypatch.setattr(_Move, "_copy", _fails)
    if step is Do.DISTRUST:
        monkeypatch.setattr(_Move, "_switch", _fails)
    outcome = _Move._outcome

    async def cut_off(move: _Move, do: Do) -> Outcome:
        if do is step:
            raise asyncio.CancelledError
        return await outcome(move, do)

    monkeypatch.setattr(_Move, "_outcome", cut_off)
    with pytest.raises(asyncio.CancelledError):
        await pair.move()
    monkeypatch.undo()
    await pair.tell("boat 9 is called Nora", await pair.placement())
    await pair.everything_is_served_by_one()
    assert (await pair.move()).end is End.MOVED
    await pair.everything_is_served_by_one()


@pytest.mark.parametrize("fails", [False, True], ids=["it moves", "it stays"])
async def test_a_deletion_waits_for_a_move_and_leaves_nothing_on_either_shard(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    before = await pair.placement()
    copied, gate = asyncio.Event(), asyncio.Event()
    copy_tail = _Move._copy_tail

    async def held(move: _Move) -> None:
        copied.set()
        await gate.wait()
        if fails:
            raise Unavailable("the way there is lost")
        await copy_tail(move)

    monkeypatch.setattr(_Move, "_copy_tail", held)
    moving = asyncio.create_task(pair.move())
    await copied.wait()
    source = pair.shards[before.shard].shard
    deleting = asyncio.create_task(source.ask(ForgetCall("r", before)))
    await asyncio.sleep(0.05)
    assert not deleting.done()
    gate.set()
    assert (await moving).end is (End.STAYED if fails else End.MOVED)
    if fails:
        assert await deleting == len(FACTS)
    else:
        with pytest.raises(WrongShard):
            await deleting
        after = await pair.placement()
        assert await pair.shards[after.shard].shard.ask(ForgetCall("r", after)) == len(FACTS)
    for each in pair.shards.values():
        await each.shard.users.background_done()
        assert each.shard.tiers.ids_of("alice") == set()
    assert chunk_files(tmp_path) == []


@pytest.mark.parametrize("lost", [False, True], ids=["refused", "done, and not heard of"])
async def test_a_switch_without_an_answer_makes_nobody_serve_what_is_not_theirs(
    pair: Pair, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch = _Move._switch

    async def unheard(move: _Move) -> None:
        if lost:
            await switch(move)
        raise Unavailable("Redis is away")

    monkeypatch.setattr(_Move, "_switch", unheard)
    assert (await pair.move()).end is End.UNKNOWN
    monkeypatch.undo()
    assert (await pair.placement()).shard == (pair.other.me if lost else pair.one.me)
    await pair.everything_is_served_by_one()


async def test_workers_that_do_not_drop_do_not_keep_a_user_from_moving(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = itertools.count()

    async def fails(move: _Move) -> None:
        next(tried)
        raise EngineFailed("no answer")

    monkeypatch.setattr(_Move, "_drop", fails)
    monkeypatch.setattr("deployments.mover.RETRY_S", 0.0)
    assert (await pair.move()).end is End.MOVED
    assert next(tried) == DROP_TRIES
    await pair.everything_is_served_by_one()


async def test_two_moves_at_once_end_with_one_owner(pair: Pair) -> None:
    reports = await asyncio.gather(*(pair.move() for _ in range(3)), return_exceptions=True)
    assert any(isinstance(report, MoveReport) and report.end is End.MOVED for report in reports)
    await pair.everything_is_served_by_one()


async def test_a_target_that_is_not_there_is_refused(pair: Pair) -> None:
    placement = await pair.placement()
    for target in ("nobody", placement.shard):
        with pytest.raises(InvalidRequest, match="no other shard"):
            await pair.one.shard.ask(MoveCall("r", placement, ShardId(target)))


async def test_a_drained_shard_has_nobody_left(pair: Pair) -> None:
    bob = await pair.one.owns("bob")
    await pair.one.told(bob, "bob rows")
    report = await pair.one.shard.mover.drain(pair.one.me, PlacementPolicy(), 20.0)
    assert (report.moved, report.left) == (2, 0)
    for user in ("alice", "bob"):
        placement = await pair.one.directory.lookup(UserId(user))
        assert placement is not None
        assert placement.shard == pair.other.me
    assert pair.one.shard.table.memories() == []
    await pair.everything_is_served_by_one()


async def _fails(move: _Move) -> None:
    raise Unavailable("not now")
