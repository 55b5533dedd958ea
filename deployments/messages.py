"""What crosses the border between gateway and shard: frozen, small, picklable, each with its request id.

Tensors never appear here; facts' texts, token counts and ids do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from sharding.ids import FactId, Placement, ShardId, UserId

Mode = Literal["inject", "prompt", "off"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """OpenAI's sampling fields, already validated; None means the model's own default."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_tokens: int | None = None

    def given(self) -> dict[str, Any]:
        """What was asked of the sampler, by name; `max_tokens` and `stop` apart."""
        names = ("temperature", "top_p", "seed", "presence_penalty", "frequency_penalty", "min_tokens")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True)
class ChatCall:
    """One chat completion for a shard. `placement` is None for a caller without identity (then `mode` is "off"), and
    for a `user` for whom nothing was ever stored."""

    request_id: str
    placement: Placement | None
    messages: tuple[dict[str, str], ...]  # {"role", "content"}: plain text content, in order
    sampling: Sampling
    mode: Mode = "inject"
    top_k: int = 10
    user: UserId | None = None
    prefill_nearest: int | None = (
        None  # injected facts that are prefilled as text all the same; None: the shard's choice
    )

    @property
    def asker(self) -> UserId | None:
        """Who asks, placed or not."""
        return self.placement.user if self.placement is not None else self.user


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What a chat took from memory. Token counts are prompt tokens; seconds are wall time inside the shard."""

    mode: Mode
    fact_ids: tuple[FactId, ...] = ()  # nearest to the question first
    memory_tokens: int = 0  # tokens of the facts in the prompt, however they got there
    injected_tokens: int = 0  # of the prompt's tokens, those whose KV was composed from chunks
    prefix_cached_tokens: int = 0  # of the prompt's tokens, those found in vLLM's own prefix cache
    fallback: str | None = None  # why memory was prefilled as text, all of it or from some fact on: a `Reason`
    left_out: int = 0  # retrieved facts that did not fit the context
    stale_facts: int = 0  # injected from chunks that were encoded behind a text that was corrected since
    embed_s: float = 0.0
    search_s: float = 0.0
    engine_ttft_s: float = 0.0  # from handing the prompt to the engine to its first token


@dataclass(frozen=True, slots=True)
class ChatStarted:
    """First event of every chat stream, sent with the first token: what went into the prompt.

    `memory.injected_tokens` and what depends on it are as planned here; as they turned out in `ChatFinished`.
    """

    prompt_tokens: int
    memory: MemoryUse


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """A piece of the answer's text (never empty)."""

    text: str


@dataclass(frozen=True, slots=True)
class ChatFinished:
    """Last event of every chat stream that ends well."""

    finish_reason: Literal["stop", "length"]
    completion_tokens: int
    memory: MemoryUse


ChatEvent = ChatStarted | ChatDelta | ChatFinished


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the canary (`canary.py`) found about injected memory, and how it is served therefore."""

    state: Literal["pending", "fixed", "passed", "failed", "unjudged"]  # fixed: the operator decided
    prefill_nearest: int | None  # facts to prefill as text; None: all of them, memory is not injected
    reason: str
    text_facts: int = 0  # a chat that takes at most so many facts prefills them all
    phrasing: str = "{}"  # how a corrected fact is put, until what was encoded behind its old text is rebuilt

    def prefilled(self, facts: int) -> int | None:
        """Of so many facts those nearest to the question that are prefilled; None: all, and nothing is injected."""
        return facts if self.prefill_nearest is not None and facts <= self.text_facts else self.prefill_nearest


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """What a shard reports of itself, in its heartbeat and to `memshard status`."""

    shard: ShardId
    model: str
    ready: bool
    started_at: str
    users: int  # users whose memory is resident
    facts: int
    chunks: int
    requests_in_flight: int
    encode_backlog: int  # facts waiting for their KV
    tiers: tuple[tuple[str, int, int], ...]  # (tier, bytes held, budget in bytes)
    counters: dict[str, Any]  # chats by mode, facts added, `MemoryCounts.plain`, … since the start
    canary: Verdict
    active_bytes: int = 0  # on the device, of users who were active lately
    load_per_s: float = 0.0  # requests, averaged over minutes
    latencies: dict[str, dict[str, float]] = field(default_factory=dict)  # of first tokens: `recent.Recent.summary`
    stale_chunks: int = 0  # encoded behind texts that were corrected since
    stale_tokens: int = 0  # of the facts that rebuilds would encode
