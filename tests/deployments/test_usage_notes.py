from collections.abc import Iterable
from typing import Any

import pytest

from deployments.usage import NOTES_A_BEAT, UsageNotes
from sharding.directory import Usage
from sharding.errors import Unavailable
from sharding.ids import Placement, ShardId, UserId


class Notebook:
    """The part of `Directory` that takes notes."""

    def __init__(self) -> None:
        self.away = False
        self.noted: dict[str, Usage] = {}

    async def note(self, usages: Iterable[tuple[Placement, Usage]]) -> None:
        if self.away:
            raise Unavailable("Redis is away.")
        self.noted |= {placement.user: usage for placement, usage in usages}


def placed(user: str) -> Placement:
    return Placement(UserId(user), ShardId("here"), 1)


async def test_a_user_is_noted_once_however_often_served() -> None:
    notes, directory = UsageNotes(lambda user: 7 if user == "ada" else 0, clock=lambda: 5.0), Notebook()
    told: Any = directory
    for user in ("ada", "bob", "ada"):
        notes.served(placed(user))
    await notes.tell(told)
    assert directory.noted == {"ada": Usage("device", 7, 5.0), "bob": Usage("text", 0, 5.0)}
    assert len(notes) == 0


async def test_a_burst_is_spread_over_several_heartbeats() -> None:
    notes, directory = UsageNotes(lambda user: 0), Notebook()
    told: Any = directory
    for n in range(NOTES_A_BEAT + 1):
        notes.served(placed(f"u{n}"))
    await notes.tell(told)
    assert len(directory.noted) == NOTES_A_BEAT
    await notes.tell(told)
    assert len(directory.noted) == NOTES_A_BEAT + 1


async def test_what_could_not_be_told_is_told_later() -> None:
    notes, directory = UsageNotes(lambda user: 0, clock=lambda: 5.0), Notebook()
    told: Any = directory
    notes.served(placed("ada"))
    directory.away = True
    with pytest.raises(Unavailable):
        await notes.tell(told)
    directory.away = False
    await notes.tell(told)
    assert list(directory.noted) == ["ada"]
