"""The connector's half in the engine core: how many tokens a request need not prefill, and into which slots they go.

vLLM asks in this order for each waiting request, possibly many times before it is scheduled, and again after every
preemption: `matched_tokens` (pure), then `allocated` once blocks are there, then `step` once for the whole step.
Nothing here may raise for one request's sake: an exception in a hook ends the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from connector.metadata import Capture, Load, StepMetadata, StepReport, Wishes
from connector.reason import Reason


@dataclass(slots=True)
class _Known:
    """A request that wants chunks loaded or captured, from its arrival to its end."""

    wishes: Wishes
    prompt_tokens: int
    salt: str | None = None
    local_tokens: int = 0  # of the last prefix-cache lookup
    injected_tokens: int = 0  # of the last load
    hit_tokens: int = 0  # what of the load was in the prefix cache then
    fallback: Reason | None = None  # why that load failed, if it did

    @property
    def load_tokens(self) -> int:
        """Capped at the prompt less one token: with nothing left to compute there would be nothing to sample from, and
        vLLM's synchronous path asserts it."""
        return min(self.wishes.load_tokens, self.prompt_tokens - 1)


@dataclass(slots=True)
class Scheduled:
    """A request's part in one step: positions `start` up to `start + tokens` are computed, in these blocks."""

    request_id: str
    start: int
    tokens: int
    blocks: Sequence[int]


@dataclass(slots=True)
class SchedulerSide:
    """`block_tokens` is the paged cache's block size."""

    block_tokens: int
    _known: dict[str, _Known] = field(default_factory=dict)
    _loads: dict[str, Load] = field(default_factory=dict)  # allocated since the last step

    def arrived(
        self,
        request_id: str,
        params: dict[str, Any] | None,
        prompt_tokens: int,
        *,
        salt: str | None = None,
        reads_cache: bool = True,
    ) -> None:
        """A new request. One that reads no prefix cache has everything computed: vLLM takes nothing from us for it."""
        wishes = Wishes.of(params)
        if wishes.load or wishes.capture:
            self._known[request_id] = known = _Known(wishes, prompt_tokens, salt)
            if wishes.load and not reads_cache:
                known.fallback = Reason.READS_NO_CACHE

    def matched_tokens(self, request_id: str, local_tokens: int) -> int | None:
        """How many tokens behind the `local_tokens` of a prefix-cache hit come out of chunks.

        A request whose load failed before is not tried again. None asks again in the next step: vLLM publishes a load's
        blocks as soon as it is scheduled, and who hits them in the same step would keep them if the load then failed.
        """
        known = self._known.get(request_id)
        if known is None:
            return 0
        if any(id_ != request_id and self._known[id_].salt == known.salt for id_ in self._loads):
            return None
        if known.fallback is not None:
            return 0
        known.local_tokens = local_tokens
        return max(0, known.load_tokens - local_tokens)

    def allocated(self, request_id: str, blocks: Sequence[int], external_tokens: int) -> None:
        """Blocks are there: the slots of `external_tokens` tokens that follow the local hit are fixed now."""
        known = self._known.get(request_id)
        if known is None or known.fallback is not None:
            return
        end = known.load_tokens
        start = end - external_tokens
        known.injected_tokens = external_tokens
        known.hit_tokens = start if external_tokens else min(known.local_tokens, end)
        self._loads.pop(request_id, None)
        if external_tokens == 0:
            return
        first, last = start // self.block_tokens, (end - 1) // self.block_tokens
        self._loads[request_id] = Load(
            request_id,
            known.wishes.load,
            skip=start,
            slots=self._slots(blocks, start, end),
            blocks=tuple(blocks[first : last + 1]),
        )

    def captures_anything(self, request_id: str) -> bool:
        """Whether `step` needs to hear of this request."""
        known = self._known.get(request_id)
        return known is not None and bool(known.wishes.capture)

    def step(self, scheduled: Iterable[Scheduled]) -> StepMetadata:
        """What the worker has to load before this step's forward pass and to capture during it."""
        meta = StepMetadata(loads=list(self._loads.values()))
        self._loads.clear()
        for part in scheduled:
            for range_ in self._known[part.request_id].wishes.capture:
                start = max(range_.start, part.start)
                end = min(range_.start + range_.tokens, part.start + part.tokens)
                if start < end:
                    slots = self._slots(part.blocks, start, end)
                    offset = start - range_.start
                    meta.captures.append(Capture(range_.id, range_.start, range_.tokens, offset, slots))
        return meta

    def reported(self, report: StepReport) -> None:
        """The worker's outcome of a step."""
        for request_id, reason in report.failed.items():
            if (known := self._known.get(request_id)) is not None:
                known.injected_tokens = 0
                known.fallback = reason

    def finished(self, request_id: str) -> dict[str, Any] | None:
        """The request ended in whatever way. What it is told: tokens injected, and why not, if not."""
        self._loads.pop(request_id, None)
        known = self._known.pop(request_id, None)
        if known is None:
            return None
        told = {"injected_tokens": known.injected_tokens, "hit_tokens": known.hit_tokens}
        return {**told, "fallback": known.fallback and known.fallback.value}

    def _slots(self, blocks: Sequence[int], start: int, end: int) -> tuple[int, ...]:
        size = self.block_tokens
        runs = (
            range(
                blocks[first // size] * size + max(start - first, 0),
                blocks[first // size] * size + min(end - first, size),
            )
            for first in range(start // size * size, end, size)
        )
        return tuple(chain.from_iterable(runs))
