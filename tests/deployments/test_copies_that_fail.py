"""Whatever fails while chunks are sent to another shard, nothing is lost, left over or waited for."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from copying_pair import left_nothing
from moving_pair import ALICE, FACTS, Pair

from deployments import deterministic_lines
from deployments.deterministic import DeterministicEngine
from deployments.deterministic_lines import SocketLine
from deployments.memory_calls import ArrivedCall, MemoryCall, OfferCall
from deployments.mover import _Move
from sharding.errors import DeadlineExceeded, EngineFailed, MemshardError, ShardGone, Unavailable, WrongShard
from sharding.ids import ShardId
from sharding.move import Do, End, Outcome

ERRORS = [
    ShardGone("It is gone.", certain=True),
    ShardGone("It is not to be found.", certain=False),
    DeadlineExceeded("It took too long."),
    EngineFailed("It died."),
    WrongShard("It says that this is not the owner."),
]


@pytest.mark.parametrize("heard", [False, True], ids=["unheard", "answer lost"])
@pytest.mark.parametrize("error", ERRORS, ids=[f"{type(e).__name__}{e.details}" for e in ERRORS])
@pytest.mark.parametrize("kind", [OfferCall, ArrivedCall])
async def test_a_call_that_fails_loses_nothing(pair: Pair, kind: type, error: MemshardError, heard: bool) -> None:
    async def fails(shard: ShardId, call: MemoryCall[Any]) -> None:
        if isinstance(call, kind):
            raise error

    assert pair.neighbours is not None
    setattr(pair.neighbours, "after" if heard else "before", fails)
    report = await pair.move()
    assert report.end is (End.STAYED if isinstance(error, ShardGone) else End.MOVED)
    await pair.everything_is_served_by_one()
    if report.end is End.STAYED:
        await left_nothing(pair)
    pair.meet()
    assert (await pair.move()).end is End.MOVED
    await pair.everything_is_served_by_one()


@pytest.mark.parametrize("who", ["source", "target"])
@pytest.mark.parametrize("what", ["dies", "stops in the middle", "sends something else", "flips a bit", "is late"])
async def test_a_line_that_fails_in_the_middle_loses_nothing(
    pair: Pair, who: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, receive = SocketLine.send, SocketLine.receive

    async def sends(line: SocketLine, hello: bytes, frames: Any, sizes: Any) -> None:
        if what == "dies":
            line.close()
        elif what == "is late":
            await asyncio.sleep(2 * deterministic_lines.STALL_S)
        elif what == "stops in the middle":
            frames, sizes = frames[:2], sizes[:2]
        elif what == "sends something else":
            hello = bytes(len(hello))
        else:
            frames = [frames[0][:-1] + bytes([frames[0][-1] ^ 1]), *frames[1:]]
        await send(line, hello, frames, sizes)

    async def receives(line: SocketLine, hello: bytes, sizes: Any) -> list[bytes]:
        if what == "dies":
            line.close()
        elif what == "is late":
            await asyncio.sleep(2 * deterministic_lines.STALL_S)
        elif what == "stops in the middle":
            await receive(line, hello, sizes[:2])
            line.close()
        elif what == "sends something else":
            hello = bytes(len(hello))
        return await receive(line, hello, sizes)

    if who == "source":
        monkeypatch.setattr(SocketLine, "send", sends)
    else:
        monkeypatch.setattr(SocketLine, "receive", receives)
    report = await pair.move()
    assert report.end is End.MOVED
    await pair.everything_is_served_by_one()
    monkeypatch.undo()
    assert (await pair.move()).end is End.MOVED
    await pair.everything_is_served_by_one()


ON_THE_WAY = [Do.COPY, Do.PAUSE, Do.COPY_TAIL, Do.CLOSE, Do.SWITCH, Do.GO, Do.DROP]


@pytest.mark.parametrize("how", ["fails", "is cut off", "is cut off when it is done"])
@pytest.mark.parametrize("step", ON_THE_WAY)
async def test_whatever_breaks_in_a_move_nobody_who_talks_meanwhile_notices(
    pair: Pair, step: Do, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken: list[Do] = []
    outcome = _Move._outcome

    async def breaks(move: _Move, do: Do) -> Outcome:
        if do is not step or broken or (do is Do.GO and how == "fails"):
            return await outcome(move, do)
        broken.append(do)
        if how == "fails":
            return Outcome.FAILED
        if how == "is cut off when it is done":
            await outcome(move, do)
        raise asyncio.CancelledError

    monkeypatch.setattr(_Move, "_outcome", breaks)
    monkeypatch.setattr("deployments.mover.RETRY_S", 0.0)
    async with pair.talked_to():
        await asyncio.sleep(0.01)
        if how == "fails":
            await pair.move()
        else:
            with pytest.raises(asyncio.CancelledError):
                await pair.move()
        await asyncio.sleep(0.01)
        assert (await pair.move()).end is End.MOVED
    await pair.everything_is_served_by_one()
    assert len(pair.told) > len(FACTS)
    for shard in (pair.one, pair.other):
        await shard.shard.encoder.settled(ALICE)
        await shard.shard.users.background_done()


async def test_a_target_that_died_while_it_was_copied_to_is_not_moved_to(pair: Pair) -> None:
    async def dies(shard: ShardId, call: MemoryCall[Any]) -> None:
        if isinstance(call, ArrivedCall):
            raise ShardGone("It died.", certain=True)

    assert pair.neighbours is not None
    pair.neighbours.before = dies
    report = await pair.move()
    assert report.end is End.STAYED
    await pair.everything_is_served_by_one()


async def test_chunks_are_not_gone_while_the_target_does_not_confirm_it(pair: Pair) -> None:
    copy = pair.one.shard.courier.copy(await pair.placement(), pair.other.me)
    assert copy is not None
    assert await copy.run()
    everything = pair.one.shard.tiers.ids_of(ALICE)
    one = sorted(everything)[:1]

    async def silent(shard: ShardId, call: MemoryCall[Any]) -> None:
        raise DeadlineExceeded("It took too long.")

    assert pair.neighbours is not None
    pair.neighbours.before = silent
    with pytest.raises(Unavailable, match="copy"):
        await pair.one.shard.encoder.forget(one)
    pair.neighbours.calm()
    await pair.one.shard.encoder.forget([])  # as with the next ones: what was not confirmed is asked for again
    assert pair.other.shard.tiers.ids_of(ALICE) == everything - set(one)
    await copy.undo()
    copy.close()
    await left_nothing(pair)


@pytest.mark.parametrize("who", ["source", "target"])
async def test_a_line_that_was_lost_since_the_last_move_is_opened_again(pair: Pair, who: str) -> None:
    for _ in range(2):
        await pair.move()
    engine = (pair.one if who == "source" else pair.other).shard.engine
    assert isinstance(engine, DeterministicEngine)
    engine.lines.close()
    assert (await pair.move()).sent_chunks == len(FACTS)
    await pair.everything_is_served_by_one()


async def test_what_could_not_be_sent_is_not_tried_again_while_writes_wait(pair: Pair) -> None:
    async def fails(shard: ShardId, call: MemoryCall[Any]) -> None:
        if isinstance(call, OfferCall):
            waiting.append(pair.one.shard.table.memories()[0].write_lock.locked())
            raise DeadlineExceeded("It took too long.")

    waiting: list[bool] = []
    assert pair.neighbours is not None
    pair.neighbours.before = fails
    assert (await pair.move()).end is End.MOVED
    assert waiting == [False, False]
    await pair.everything_is_served_by_one()
