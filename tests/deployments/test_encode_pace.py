"""Encodes wait for chats, and do not wait for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from deployments.encode_pace import LIVE_S, PATIENCE_S, REST, EncodePace

STEP_TOKENS = (100, 50)


class Clock:
    """Stands still unless a test moves it."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class Encodes:
    """Prefills that wait for their turn at a pace, and run until they are told to end."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.pace = EncodePace(STEP_TOKENS, self.clock)
        self.running: list[int] = []
        self._ends: list[asyncio.Event] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self, *sizes: int) -> None:
        self._tasks += [asyncio.create_task(self._run(tokens)) for tokens in sizes]
        await self.pass_by()

    async def end_all(self) -> None:
        for end in self._ends:
            end.set()
        await self.pass_by()

    async def wait(self, seconds: float) -> None:
        """Time goes by; whoever waits looks at the clock when something changes."""
        self.clock.now += seconds
        self.pace._changed.set()  # instead of the time-out that real time would bring
        await self.pass_by()

    async def pass_by(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, tokens: int) -> None:
        async with self.pace.turn(tokens):
            self._ends.append(end := asyncio.Event())
            self.running.append(tokens)
            await end.wait()
            self.running.remove(tokens)


@pytest.fixture
async def encodes() -> AsyncIterator[Encodes]:
    encodes = Encodes()
    yield encodes
    await encodes.close()


async def test_as_many_run_as_one_step_has_room_for(encodes: Encodes) -> None:
    await encodes.begin(60, 30, 20, 10)
    assert encodes.running == [60, 30, 10]
    await encodes.end_all()
    assert encodes.running == [20]


async def test_where_there_are_chats_a_step_is_shorter(encodes: Encodes) -> None:
    with encodes.pace.chat_waits():
        pass
    await encodes.begin(40, 20)
    assert encodes.running == [40]
    await encodes.wait(2 * LIVE_S)
    assert encodes.running == [40, 20]


async def test_one_that_is_larger_than_a_step_runs_alone(encodes: Encodes) -> None:
    await encodes.begin(150, 1)
    assert encodes.running == [150]


async def test_none_begins_while_a_chat_waits_for_its_first_token(encodes: Encodes) -> None:
    with encodes.pace.chat_waits():
        await encodes.begin(10)
        await encodes.wait(0.9 * PATIENCE_S)
        assert encodes.running == []
    await encodes.pass_by()
    assert encodes.running == [10]


async def test_under_chats_without_a_pause_one_begins_all_the_same(encodes: Encodes) -> None:
    with encodes.pace.chat_waits():
        await encodes.begin(10)
        await encodes.wait(1.1 * PATIENCE_S)
        assert encodes.running == [10]


async def test_after_a_step_there_is_a_rest_where_there_are_chats(encodes: Encodes) -> None:
    with encodes.pace.chat_waits():
        pass
    await encodes.begin(10)
    await encodes.wait(0.2)
    await encodes.end_all()
    await encodes.begin(20)
    await encodes.wait(0.9 * REST * 0.2)
    assert encodes.running == []
    await encodes.wait(0.2 * REST * 0.2)
    assert encodes.running == [20]


async def test_there_is_no_rest_where_there_are_no_chats(encodes: Encodes) -> None:
    with encodes.pace.chat_waits():
        pass
    await encodes.wait(2 * LIVE_S)
    await encodes.begin(10)
    await encodes.wait(0.2)
    await encodes.end_all()
    await encodes.begin(20)
    assert encodes.running == [20]


async def test_in_real_time_it_goes_on_by_itself() -> None:
    pace = EncodePace(STEP_TOKENS)
    with pace.chat_waits():
        async with asyncio.timeout(10 * PATIENCE_S), pace.turn(10):
            pass
