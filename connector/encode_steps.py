"""An encode job as prefills of bounded length, so that none of them keeps a chat waiting for long.

An engine step cannot be interrupted: what is computed in one is what a chat that arrives meanwhile waits for. A job is
therefore cut into steps, each a request of its own behind what the steps before it left in vLLM's prefix cache:

    head  window                         facts
    │─────┼──────────────────────────────┼────┼────┼────┼────┼────┼────┤
    └── step: no captures ──┴── step: no captures ──┴─ step: captures ─┴─ …

The cache holds whole blocks, so a step computes again what its predecessor computed behind the last block's border.
Steps that capture nothing end on a border; the others end with a fact that ends close behind one.

Pure: a job in, jobs out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from connector.chunk import CaptureRange
from connector.windows import EncodeJob


def steps(job: EncodeJob, *, step_tokens: int, block_tokens: int) -> Iterator[EncodeJob]:
    """The job's captures, in order of their place, in prefills that compute at most `step_tokens` tokens each; more
    where one fact or one block (`block_tokens`, of the paged cache) takes more. Cut along all its `facts`, if it names
    any.

    `known_tokens` of each is what those before it left in the cache.
    """
    wanted = set(job.captures)
    captures = sorted(job.facts or job.captures, key=lambda range_: range_.start)
    done = _border(job.known_tokens, block_tokens)
    stride = max(_border(step_tokens, block_tokens), block_tokens)
    while captures:
        while captures[0].start - done >= stride:
            yield EncodeJob(job.token_ids[: done + stride], (), done)
            done += stride
        taken = _taken(captures, done, step_tokens, block_tokens)
        end = _end(captures[taken - 1])
        yield EncodeJob(job.token_ids[:end], tuple(filter(wanted.__contains__, captures[:taken])), done)
        done = _border(end, block_tokens)
        captures = captures[taken:]


def _taken(captures: Sequence[CaptureRange], done: int, step_tokens: int, block_tokens: int) -> int:
    """How many captures the next step takes: all that are left, or those behind which least is computed again, at least
    half a step full."""
    fitting = sum(_end(range_) - done <= step_tokens for range_ in captures)
    if fitting == len(captures):
        return fitting
    full_enough = [n for n in range(1, fitting + 1) if 2 * (_end(captures[n - 1]) - done) >= step_tokens]
    return min(full_enough, key=lambda n: (_end(captures[n - 1]) % block_tokens, -n), default=max(fitting, 1))


def _border(tokens: int, block_tokens: int) -> int:
    return tokens // block_tokens * block_tokens


def _end(range_: CaptureRange) -> int:
    return range_.start + range_.tokens
