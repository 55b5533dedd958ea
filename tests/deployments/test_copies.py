"""Chunks are sent to the shard that a user moves to, from wherever they are, and nothing outlives its reason."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from copying_pair import encoded_tokens
from moving_pair import ALICE, FACTS, QUESTION, Pair
from tiered_shard import chunk_files

from connector.moves import PEER, Move
from deployments import arrivals, copies
from deployments.deterministic import DeterministicEngine, mark
from deployments.memory_calls import ArrivedCall, DropCopyCall, MemoryCall, OfferCall, UpdateCall
from sharding.errors import WrongShard
from sharding.ids import Placement, ShardId, UserId
from sharding.move import End
from sharding.placement import PlacementPolicy


async def test_every_chunk_is_injected_at_the_target_and_none_encoded(pair: Pair) -> None:
    before = encoded_tokens(pair)
    report = await pair.move()
    assert report.end is End.MOVED
    assert report.sent_chunks == len(FACTS)
    read, finished = await pair.other.asked(await pair.placement(), QUESTION)
    assert sorted(read) == sorted(map(mark, FACTS))
    assert finished.memory.injected_tokens >= finished.memory.memory_tokens > 0
    assert encoded_tokens(pair) == before
    await pair.other.shard.tiers.writer.written()
    disk = pair.other.shard.tiers.files[0]
    assert len(disk.ledger) == len(FACTS), "what was sent is written to files, too"


async def test_what_is_in_files_alone_is_sent_from_there(pair: Pair) -> None:
    await pair.one.shard.tiers.writer.written()
    await pair.one.shard.tiers.demote(ALICE)
    assert pair.one.shard.tiers.device.ids_of(ALICE) == []
    before = encoded_tokens(pair)
    assert (await pair.move()).sent_chunks == len(FACTS)
    await pair.everything_is_served_by_one()
    assert encoded_tokens(pair) == before


async def test_a_damaged_file_keeps_no_other_chunk_from_being_sent(pair: Pair) -> None:
    await pair.one.shard.tiers.writer.written()
    await pair.one.shard.tiers.demote(ALICE)
    damaged = chunk_files(Path(pair.one.shard.tiers.files[0].url))[2]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert (await pair.move()).sent_chunks == len(FACTS) - 1
    await pair.everything_is_served_by_one()


async def test_what_has_no_room_on_the_targets_device_goes_to_its_files(pair: Pair) -> None:
    pair.other.shard.tiers.device.budget_bytes = pair.other.shard.tiers.device.bytes
    assert (await pair.move()).sent_chunks == len(FACTS)
    assert len(pair.other.shard.tiers.files[0].ledger) == len(FACTS)
    assert pair.other.shard.tiers.device.ids_of(ALICE) == []
    await pair.everything_is_served_by_one()


async def test_a_target_without_any_room_encodes_again(pair: Pair) -> None:
    for ledger in (pair.other.shard.tiers.device, pair.other.shard.tiers.files[0].ledger):
        ledger.budget_bytes = ledger.bytes
    report = await pair.move()
    assert (report.end, report.sent_chunks) == (End.MOVED, 0)
    assert pair.other.shard.arrivals.counters["refused_offers"] > 0
    await pair.everything_is_served_by_one()


async def test_another_model_is_sent_nothing(pair: Pair) -> None:
    pair.other.shard.engine.model_digest = "another"
    report = await pair.move()
    assert (report.end, report.sent_chunks) == (End.MOVED, 0)
    await pair.everything_is_served_by_one()


async def test_what_a_correction_makes_go_while_it_is_copied_is_gone_there_before_the_answer(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "SLICE_BYTES", 64)  # a chunk each
    placement = await pair.placement()
    here, there = pair.one.shard.tiers, pair.other.shard.tiers
    corrected = "boat 2 is called Zoe"

    async def corrects(shard: ShardId, call: MemoryCall[Any]) -> None:
        if isinstance(call, OfferCall) and len(there.ids_of(ALICE)) == len(FACTS) - 1 and not gone:
            before = here.ids_of(ALICE)
            pair.told[pair.told.index(FACTS[2])] = corrected
            await pair.one.shard.ask(UpdateCall("u", placement, pair.ids[FACTS[2]], corrected))
            gone.update(before - here.ids_of(ALICE))
            assert not gone & there.ids_of(ALICE)

    gone: set[str] = set()
    assert pair.neighbours is not None
    pair.neighbours.before = corrects
    assert (await pair.move()).end is End.MOVED
    assert gone
    await pair.everything_is_served_by_one()


async def test_a_guest_who_does_not_come_is_seen_off(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "GUEST_S", 0.05)
    copy = pair.one.shard.courier.copy(await pair.placement(), pair.other.me)
    assert copy is not None
    assert await copy.run()
    copy.close()  # its process was killed
    async with asyncio.timeout(10):
        while pair.other.shard.tiers.ids_of(ALICE):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert pair.other.shard.arrivals.counters["guests_seen_off"] == 1
    await pair.everything_is_served_by_one()


@pytest.mark.parametrize("more", [-1, 1], ids=["an older epoch", "an epoch to come"])
async def test_an_offer_under_an_epoch_that_does_not_stand_is_refused(pair: Pair, more: int) -> None:
    standing = await pair.placement()
    stale = Placement(ALICE, standing.shard, standing.epoch + more)
    offer = OfferCall("t", stale, "line", pair.one.shard.engine.model_digest, (), (("0" * 32, 3),))
    for call in (offer, DropCopyCall("t", stale, None)):
        with pytest.raises(WrongShard):
            await pair.other.shard.ask(call)
    assert pair.other.shard.tiers.ids_of(ALICE) == set()


async def test_the_owner_takes_no_offers_of_its_own_user(pair: Pair) -> None:
    standing = await pair.placement()
    before = pair.one.shard.tiers.ids_of(ALICE)
    with pytest.raises(WrongShard):
        await pair.one.shard.ask(DropCopyCall("t", standing, None))
    assert pair.one.shard.tiers.ids_of(ALICE) == before


async def test_a_large_memory_goes_in_several_transfers(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "SLICE_BYTES", 64)
    report = await pair.move()
    assert report.sent_chunks == len(FACTS)
    assert pair.neighbours is not None
    assert len(pair.neighbours.of(ArrivedCall)) == len(FACTS)
    await pair.everything_is_served_by_one()


async def test_a_line_is_kept_for_the_next_user(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    listen = DeterministicEngine.listen

    async def counting(engine: DeterministicEngine, line: str, nccl: bool) -> list[tuple[str, int]]:
        opened.append(line)
        return await listen(engine, line, nccl)

    monkeypatch.setattr(DeterministicEngine, "listen", counting)
    for _ in range(4):  # there and back, twice
        assert (await pair.move()).sent_chunks == len(FACTS)
    assert len(opened) == 2
    assert all(Move(PEER + line, "", "", "", ()).over_line for line in opened)


async def test_a_drained_shard_sends_its_users_chunks_along(pair: Pair) -> None:
    bob = await pair.one.owns("bob")
    await pair.one.told(bob, "bob rows")
    before = encoded_tokens(pair)
    report = await pair.one.shard.mover.drain(pair.one.me, PlacementPolicy(), 20.0)
    assert (report.moved, report.left) == (2, 0)
    assert pair.one.shard.courier.counters["sent_chunks"] == len(FACTS) + 1
    for user in ("alice", "bob"):
        placement = await pair.one.directory.lookup(UserId(user))
        assert placement is not None
        _, finished = await pair.other.asked(placement, QUESTION)
        assert finished.memory.injected_tokens >= finished.memory.memory_tokens > 0
    assert encoded_tokens(pair) == before
