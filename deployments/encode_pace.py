"""When the next prefill of an encode may begin: live chats come first.

vLLM's priorities order what waits inside the engine; they do not shorten a step that runs, and what a step has room for
beside a chat's prefill goes to encodes and makes that step longer. So encodes are kept out of the engine instead:

- at most `step_tokens` tokens of them are in it at a time: one short step's worth, of one user or of many; where there
  are chats a shorter one's;
- none is begun while a chat waits for its first token, for as long as `PATIENCE_S`: under chats without a pause
  encoding has to go on, for a fact without a chunk makes every chat that needs it slower;
- where there are chats, an encode is followed by a rest `REST` times as long as it took, so that most chats find none
  running.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

PATIENCE_S = 1.0
LIVE_S = 5.0
"""For so long after a chat there are chats."""

REST = 2.0

CPU_STEP_TOKENS = (256, 160)  # 0.14 and 0.1 s of a core with a model of 135M; blocks of the cache have 128 there
GPU_STEP_TOKENS = (8192, 2048)  # a guess: no machine at hand had a GPU


class EncodePace:
    """Belongs to one event loop. `step_tokens`: without chats, and with."""

    def __init__(self, step_tokens: tuple[int, int], clock: Callable[[], float] = time.monotonic) -> None:
        self._step_tokens = step_tokens
        self._clock = clock
        self._chats_waiting = 0
        self._last_chat_at = -math.inf
        self._tokens_running = 0
        self._rest_until = -math.inf
        self._changed = asyncio.Event()

    @property
    def step_tokens(self) -> int:
        """How long a step may be now."""
        return self._step_tokens[self._live()]

    def _live(self) -> bool:
        return bool(self._chats_waiting) or self._clock() - self._last_chat_at < LIVE_S

    @contextmanager
    def chat_waits(self) -> Iterator[None]:
        """A chat waits for its first token."""
        self._chats_waiting += 1
        try:
            yield
        finally:
            self._chats_waiting -= 1
            self._last_chat_at = self._clock()
            self._changed.set()

    @asynccontextmanager
    async def turn(self, tokens: int) -> AsyncIterator[None]:
        """Entered when a prefill of so many tokens may begin; it has ended when this is left."""
        impatient_at = self._clock() + PATIENCE_S
        while (wait_s := self._wait_s(tokens, impatient_at)) > 0:
            self._changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), None if wait_s == math.inf else wait_s)
        self._tokens_running += tokens
        began = self._clock()
        try:
            yield
        finally:
            self._tokens_running -= tokens
            ended = self._clock()
            if self._live():
                self._rest_until = max(self._rest_until, ended + REST * (ended - began))
            self._changed.set()

    def _wait_s(self, tokens: int, impatient_at: float) -> float:
        """How long from now nothing can begin, unless something changes."""
        now = self._clock()
        if self._tokens_running and self._tokens_running + tokens > self.step_tokens:
            return math.inf
        if self._chats_waiting and now < impatient_at:
            return impatient_at - now
        return self._rest_until - now
