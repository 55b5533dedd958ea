"""How a user moves from one living shard to another: what is done next, after what came of the last thing.

    COPY ─► PAUSE ─► COPY_TAIL ─► CLOSE ─► SWITCH ─► GO ─► DROP ─► moved
      └───────┴──────────┴──────────┘         │       reads and writes wait from CLOSE to GO, writes from PAUSE on
                   │ failed                   ├ refused: the user is another's already ─► DISTRUST ─► stayed
                   ▼                          └ no answer: asked again, it can be repeated; then DISTRUST ─► unknown
                 STAY ─► UNDO ─► stayed

The switch is one step in Redis: before it the source serves, after it the target does. A failure before it drops what
the target got of the copy; after it only the drop at the source is tried again. Whoever executes this may be killed
anywhere: nothing durable has changed but the placement.

Pure: outcomes in, instructions out. `deployments/mover.py` executes them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum


class Do(StrEnum):
    """What is to be done next. GO, STAY and DISTRUST cannot fail."""

    COPY = "copy"  # what there is, while the source serves
    PAUSE = "pause"  # writes wait from here on
    COPY_TAIL = "copy_tail"  # what came meanwhile
    CLOSE = "close"  # reads wait from here on
    SWITCH = "switch"  # the target owns the user, under the next epoch
    GO = "go"  # the source forgets the user's facts; what waited goes on, and finds the target
    STAY = "stay"  # what waited goes on at the source
    DISTRUST = "distrust"  # what waited goes on, and asks the directory first
    UNDO = "undo"  # the target drops its copy
    DROP = "drop"  # the source drops its chunks


class Outcome(StrEnum):
    """What came of it."""

    DONE = "done"
    FAILED = "failed"  # or was not answered
    REFUSED = "refused"  # of a switch only: the placement does not stand any more


class End(StrEnum):
    """How a move ends. UNKNOWN: whether the target owns the user is for the directory to say, when it can be asked."""

    MOVED = "moved"
    STAYED = "stayed"
    UNKNOWN = "unknown"


SWITCH_TRIES = 3
DROP_TRIES = 5

_ON_THE_WAY = {Do.COPY: Do.PAUSE, Do.PAUSE: Do.COPY_TAIL, Do.COPY_TAIL: Do.CLOSE, Do.CLOSE: Do.SWITCH}


@dataclass(frozen=True, slots=True)
class Moving:
    """A move between two instructions: `do` is the next, or None at its `end`. `tries` counts those of this one."""

    do: Do | None = Do.COPY
    end: End | None = None
    tries: int = 1


def after(moving: Moving, outcome: Outcome) -> Moving:
    """Where a move stands when its instruction had this outcome."""
    do, done = moving.do, outcome is Outcome.DONE
    if do is None:
        raise ValueError("the move has ended")
    if do in _ON_THE_WAY:
        return Moving(_ON_THE_WAY[do] if done else Do.STAY)
    if do is Do.SWITCH:
        if done:
            return Moving(Do.GO)
        if outcome is Outcome.REFUSED:
            return Moving(Do.DISTRUST, End.STAYED)
        if moving.tries < SWITCH_TRIES:
            return replace(moving, tries=moving.tries + 1)
        return Moving(Do.DISTRUST, End.UNKNOWN)
    if do is Do.GO:
        return Moving(Do.DROP)
    if do is Do.DROP:
        if not done and moving.tries < DROP_TRIES:
            return replace(moving, tries=moving.tries + 1)
        return Moving(None, End.MOVED)  # what could not be dropped is dropped with what is dropped later
    if do is Do.STAY:
        return Moving(Do.UNDO)
    return Moving(None, moving.end or End.STAYED)
