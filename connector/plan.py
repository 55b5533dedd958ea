"""The prompt's layout, decided before anything is done: which tokens, which of them out of chunks, under which salt.

    [ template head + memory preamble | fact k … fact 1 | rest of the prompt ]
      └──────────────── chunks, from the front on ────┘   └ always prefilled

Facts stand in reverse order of proximity, the nearest beside the question. Token ids are joined, never re-tokenised,
so injected and prefilled memory are the same prompt. Only a prefix can come out of chunks: from the first piece that
has none (durable, but not encoded yet) on, everything is prefilled as text, in its place. The facts nearest to the
question may be prefilled on purpose (`prefill_nearest`): they then attend to everything in front of them, at a cost
that does not grow with the memory.

Pure functions; nothing is imported but names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from connector.chunk import ChunkId, ChunkRef, memory_salt, text_salt
from connector.reason import Reason
from sharding.errors import ContextTooLong


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of prompt and the chunk that holds its KV, or why there is none."""

    token_ids: tuple[int, ...]
    chunk: ChunkId | None = None
    unready: Reason | None = None


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """`kept` counts the facts that fit (the nearest ones), `left_out` those that did not; `memory_tokens` are the kept
    facts' tokens. `load` names the chunks that the prompt starts with. Where a piece has none, `unready` says why, and
    `unready_tokens` counts what is text for that reason, from it on."""

    token_ids: tuple[int, ...]
    load: tuple[ChunkRef, ...]
    salt: str | None
    kept: int = 0
    left_out: int = 0
    memory_tokens: int = 0
    unready: Reason | None = None
    unready_tokens: int = 0

    @property
    def load_tokens(self) -> int:
        return sum(tokens for _, tokens in self.load)


def plan_plain(token_ids: Sequence[int], owner: str | None, *, max_model_len: int, max_tokens: int) -> PromptPlan:
    """A prompt without memory. Raises `ContextTooLong`."""
    _check_room(len(token_ids), max_model_len, max_tokens)
    return PromptPlan(tuple(token_ids), (), text_salt(owner) if owner is not None else None)


def plan_memory(
    head: Piece,
    facts: Sequence[Piece],
    tail: Sequence[int],
    owner: str,
    *,
    inject: bool,
    max_model_len: int,
    max_tokens: int,
    prefill_nearest: int = 0,
) -> PromptPlan:
    """A prompt with the `facts` (nearest first) that fit beside `head`, `tail` and `max_tokens` of output.

    With `inject` false nothing is loaded: the same tokens, all prefilled. The `prefill_nearest` facts beside the tail
    are never loaded; where they are all facts, the prompt is text behind the head, which is exact. Raises
    `ContextTooLong` where not even the prompt without facts fits.
    """
    room = _check_room(len(head.token_ids) + len(tail), max_model_len, max_tokens)
    kept: list[Piece] = []
    for fact in facts:
        if len(fact.token_ids) > room:
            break
        room -= len(fact.token_ids)
        kept.append(fact)
    front = [head, *reversed(kept)]
    load: list[ChunkRef] = []
    wanted = front[: max(1, len(front) - prefill_nearest)]
    for piece in wanted:
        if not inject or piece.chunk is None:
            break
        load.append((piece.chunk, len(piece.token_ids)))
    tokens = [token for piece in front for token in piece.token_ids]
    memory_tokens = len(tokens) - len(head.token_ids)
    unready = wanted[len(load)].unready if inject and len(load) < len(wanted) else None
    return PromptPlan(
        token_ids=(*tokens, *tail),
        load=tuple(load),
        salt=memory_salt(owner, load) if load else text_salt(owner),
        kept=len(kept),
        left_out=len(facts) - len(kept),
        memory_tokens=memory_tokens,
        unready=unready,
        unready_tokens=sum(len(piece.token_ids) for piece in wanted[len(load) :]) if unready else 0,
    )


def _check_room(prompt_tokens: int, max_model_len: int, max_tokens: int) -> int:
    room = max_model_len - max_tokens - prompt_tokens
    if room < 0:
        raise ContextTooLong(
            f"This model's context is {max_model_len} tokens; the messages take {prompt_tokens} and max_tokens asks "
            f"for {max_tokens}. Shorten the messages or lower max_tokens.",
            field="messages",
        )
    return room
