"""Signals in, no processes left: what `memshard serve` needs from the operating system.

Ray starts workers, workers start engines, and any of them may die before its children do. As a child subreaper we
become the parent of such orphans, so at every moment all of them are below us in the process tree and can be ended.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

import psutil

_PR_SET_CHILD_SUBREAPER = 36
TERMINATE_S = 3.0  # between asking leftovers to end and killing them
INTERRUPTED = 130  # exit status after Ctrl-C, by convention


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent dies, instead of the system's init."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(terminate_s: float = TERMINATE_S) -> None:
    """Ask every process below this one to end, kill those that have not after `terminate_s`, and reap them all."""
    below = psutil.Process().children(recursive=True)
    _send(below, signal.SIGTERM)
    psutil.wait_procs(below, timeout=terminate_s)
    kill_descendants()


def kill_descendants() -> None:
    """Kill every process below this one at once, those that appear meanwhile included, and reap them."""
    while below := [p for p in psutil.Process().children(recursive=True) if runs(p)]:
        _send(below, signal.SIGKILL)
        psutil.wait_procs(below, timeout=1.0)


def leave(status: int) -> NoReturn:
    """Exit now, without the exit handlers of the interpreter and of native libraries.

    For use when everything is undone already: Ray's threads, interrupted in the middle of a start, were seen to crash
    (SIGSEGV) in theirs.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT and SIGTERM raise KeyboardInterrupt once; the next one kills everything and exits at once."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    listen(_interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def listen_again() -> None:
    """Take the signals back from `ray.init`, which installs a handler of its own for SIGTERM."""
    listen(_interrupt)


def listen(handler: signal.Handlers | object) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)  # type: ignore[arg-type]


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    listen(_give_up)
    raise KeyboardInterrupt


def _give_up(_number: int, _frame: FrameType | None) -> None:
    kill_descendants()
    leave(INTERRUPTED)


def _send(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def runs(process: psutil.Process) -> bool:
    """Whether it is there, and more than what its parent has not reaped yet."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
