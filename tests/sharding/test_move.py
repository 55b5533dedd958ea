"""A move, whatever happens in it: nothing is served twice, nobody waits for ever, nothing is dropped that is needed."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding.move import DROP_TRIES, SWITCH_TRIES, Do, End, Moving, Outcome, after

CANNOT_FAIL = {Do.GO, Do.STAY, Do.DISTRUST}


@dataclass
class World:
    """Two shards and a directory, as far as a move changes them."""

    owner: str = "source"
    source_has_chunks: bool = True
    source_has_facts: bool = True
    writes_wait: bool = False
    reads_wait: bool = False
    copied: bool = False
    log: list[Do] = field(default_factory=list)

    def execute(self, do: Do, outcome: Outcome) -> None:
        """An instruction that failed may have been done all the same: its answer was lost."""
        self.log.append(do)
        if do is Do.SWITCH:
            assert self.writes_wait, "a write could be acknowledged by one who is not the owner any more"
            assert self.reads_wait, "a read could miss what the target has acknowledged"
            assert self.copied
            if outcome is Outcome.REFUSED:
                self.owner = "another"
            elif outcome is Outcome.DONE:
                self.owner = "target"
        elif do is Do.COPY_TAIL:
            assert self.writes_wait, "what is written behind the tail's copy would be left behind"
            self.copied = outcome is Outcome.DONE
        elif do is Do.PAUSE:
            self.writes_wait = True
        elif do is Do.CLOSE:
            self.reads_wait = True
        elif do in CANNOT_FAIL:
            self.writes_wait = self.reads_wait = False
            self.source_has_facts = do is Do.STAY
        elif do is Do.UNDO:
            assert self.owner == "source", "the owner's chunks would be dropped"
        elif do is Do.DROP:
            assert self.owner == "target", "a copy would be dropped that is the only one"
            self.source_has_chunks = self.source_has_chunks and outcome is not Outcome.DONE


def possible(do: Do, drawn: Outcome) -> Outcome:
    if do in CANNOT_FAIL:
        return Outcome.DONE
    return Outcome.FAILED if drawn is Outcome.REFUSED and do is not Do.SWITCH else drawn


outcomes = st.lists(st.sampled_from(list(Outcome)), min_size=30, max_size=30)


@given(outcomes, st.booleans())
def test_every_move_ends_with_one_owner_who_serves_and_nobody_waiting(told: list[Outcome], lost: bool) -> None:
    world, moving = World(), Moving()
    for drawn in told:
        if moving.do is None:
            break
        outcome = possible(moving.do, drawn)
        world.execute(moving.do, outcome)
        if moving.do is Do.SWITCH and outcome is Outcome.FAILED and lost:
            world.owner = "target"  # it was done, and nobody heard of it
        moving = after(moving, outcome)
    assert moving.do is None, "it goes on for ever"
    assert not world.writes_wait
    assert not world.reads_wait
    if moving.end is End.MOVED:
        assert world.owner == "target"
        assert not world.source_has_facts
    if moving.end is End.STAYED and world.owner == "source":
        assert world.source_has_facts
        assert world.source_has_chunks
    if world.owner != "source":
        assert not world.source_has_facts, "the source would serve another's user"


def walked(*told: Outcome) -> tuple[list[Do], End | None]:
    """The instructions when outcomes are these, and then DONE."""
    moving, done, rest = Moving(), [], list(told)
    while moving.do is not None:
        done.append(moving.do)
        moving = after(moving, rest.pop(0) if rest else Outcome.DONE)
    return done, moving.end


def test_a_move_that_goes_well_copies_before_it_pauses() -> None:
    assert walked() == ([Do.COPY, Do.PAUSE, Do.COPY_TAIL, Do.CLOSE, Do.SWITCH, Do.GO, Do.DROP], End.MOVED)


@pytest.mark.parametrize("step", range(4))
def test_a_failure_before_the_switch_drops_the_targets_copy_and_the_user_stays(step: int) -> None:
    done, end = walked(*[Outcome.DONE] * step, Outcome.FAILED)
    assert (done[-2:], end) == ([Do.STAY, Do.UNDO], End.STAYED)
    assert Do.SWITCH not in done


def test_after_the_switch_only_the_drop_is_tried_again() -> None:
    done, end = walked(*[Outcome.DONE] * 6, *[Outcome.FAILED] * 99)
    assert (done[6:], end) == ([Do.DROP] * DROP_TRIES, End.MOVED)


def test_a_switch_that_is_not_answered_is_repeated_and_then_nobody_believes_anything() -> None:
    done, end = walked(*[Outcome.DONE] * 4, *[Outcome.FAILED] * 99)
    assert (done[4:], end) == ([Do.SWITCH] * SWITCH_TRIES + [Do.DISTRUST], End.UNKNOWN)


def test_a_user_who_is_anothers_by_now_is_left_alone() -> None:
    done, end = walked(*[Outcome.DONE] * 4, Outcome.REFUSED)
    assert (done[4:], end) == ([Do.SWITCH, Do.DISTRUST], End.STAYED)


def test_an_ended_move_does_nothing_more() -> None:
    with pytest.raises(ValueError, match="ended"):
        after(Moving(None, End.MOVED), Outcome.DONE)
