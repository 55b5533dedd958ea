"""A prompt's plan: the same tokens injected or not, the nearest facts kept, never longer than the context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.chunk import ChunkId, memory_salt, text_salt
from connector.plan import Piece, PromptPlan, plan_memory, plan_plain
from sharding.errors import ContextTooLong

tokens = st.integers(0, 999)
chunks = st.none() | st.integers(0, 10**6).map(lambda n: ChunkId(f"{n:032x}"))
pieces = st.builds(Piece, st.lists(tokens, min_size=1, max_size=9).map(tuple), chunks)


@dataclass(frozen=True)
class Asked:
    head: Piece
    facts: list[Piece]
    tail: list[int]
    owner: str
    max_model_len: int
    max_tokens: int

    def plan(self, *, inject: bool, prefill_nearest: int = 0) -> PromptPlan:
        limits = {"max_model_len": self.max_model_len, "max_tokens": self.max_tokens}
        how: dict[str, Any] = {"inject": inject, "prefill_nearest": prefill_nearest}
        return plan_memory(self.head, self.facts, self.tail, self.owner, **how, **limits)


@st.composite
def servable(draw: st.DrawFn) -> Asked:
    """What is asked of a model whose context takes at least head, tail and answer."""
    head, tail = draw(pieces), draw(st.lists(tokens, max_size=9))
    max_tokens = draw(st.integers(1, 20))
    least = len(head.token_ids) + len(tail) + max_tokens
    return Asked(
        head,
        draw(st.lists(pieces, max_size=8)),
        tail,
        draw(st.text(max_size=5)),
        least + draw(st.integers(0, 50)),
        max_tokens,
    )


@given(servable())
def test_injected_and_prefilled_memory_are_the_same_prompt(asked: Asked) -> None:
    injected, prefilled = asked.plan(inject=True), asked.plan(inject=False)
    assert injected.token_ids == prefilled.token_ids
    assert (injected.kept, injected.left_out) == (prefilled.kept, prefilled.left_out)
    assert prefilled.load == ()
    assert prefilled.salt == text_salt(asked.owner)


@given(servable())
def test_the_nearest_facts_are_kept_and_stand_reversed_between_head_and_tail(asked: Asked) -> None:
    plan = asked.plan(inject=True)
    assert plan.kept + plan.left_out == len(asked.facts)
    memory = [token for fact in reversed(asked.facts[: plan.kept]) for token in fact.token_ids]
    assert plan.token_ids == (*asked.head.token_ids, *memory, *asked.tail)
    assert plan.memory_tokens == len(memory)


@given(servable())
def test_prompt_and_answer_fit_the_context_and_a_fact_is_left_out_only_where_it_would_not_fit(asked: Asked) -> None:
    plan = asked.plan(inject=True)
    room = asked.max_model_len - asked.max_tokens - len(plan.token_ids)
    assert room >= 0
    if plan.left_out:
        assert len(asked.facts[plan.kept].token_ids) > room


@given(servable())
def test_what_is_loaded_is_the_front_of_the_prompt_up_to_the_first_piece_without_a_chunk(asked: Asked) -> None:
    plan = asked.plan(inject=True)
    front = [asked.head, *reversed(asked.facts[: plan.kept])]
    encoded = next((i for i, piece in enumerate(front) if piece.chunk is None), len(front))
    assert plan.load == tuple((piece.chunk, len(piece.token_ids)) for piece in front[:encoded])
    assert plan.load_tokens == sum(len(piece.token_ids) for piece in front[:encoded])


@given(servable(), st.integers(0, 9))
def test_the_facts_to_prefill_are_the_nearest_ones_and_the_others_are_loaded_as_ever(asked: Asked, r: int) -> None:
    every, plan = asked.plan(inject=True), asked.plan(inject=True, prefill_nearest=r)
    assert (plan.token_ids, plan.kept, plan.left_out) == (every.token_ids, every.kept, every.left_out)
    assert plan.load == every.load[: 1 + max(0, plan.kept - r)]


@given(servable())
def test_with_every_fact_prefilled_nothing_but_the_head_is_loaded(asked: Asked) -> None:
    plan = asked.plan(inject=True, prefill_nearest=len(asked.facts))
    head = [] if asked.head.chunk is None else [(asked.head.chunk, len(asked.head.token_ids))]
    assert list(plan.load) == head


@given(servable(), st.integers(0, 9))
def test_the_salt_covers_what_is_loaded_and_nothing_behind_it(asked: Asked, r: int) -> None:
    plan, every = asked.plan(inject=True, prefill_nearest=r), asked.plan(inject=True)
    assert plan.salt == (memory_salt(asked.owner, plan.load) if plan.load else text_salt(asked.owner))
    assert (plan.salt == every.salt) == (plan.load == every.load)


@given(servable())
def test_the_salt_is_private_to_the_composition_exactly_where_something_is_loaded(asked: Asked) -> None:
    plan = asked.plan(inject=True)
    expected = memory_salt(asked.owner, plan.load) if plan.load else text_salt(asked.owner)
    assert plan.salt == expected
    assert (plan.salt == asked.plan(inject=False).salt) == (not plan.load)


@given(servable(), st.text(max_size=5))
def test_two_owners_never_plan_under_one_salt(asked: Asked, other: str) -> None:
    theirs = Asked(asked.head, asked.facts, asked.tail, other, asked.max_model_len, asked.max_tokens)
    for mine in (True, False):
        for their in (True, False):
            same = asked.plan(inject=mine).salt == theirs.plan(inject=their).salt
            assert not same or other == asked.owner


@given(servable(), st.integers(1, 30))
def test_a_prompt_that_does_not_fit_even_without_facts_is_refused_with_the_numbers(asked: Asked, over: int) -> None:
    prompt = len(asked.head.token_ids) + len(asked.tail)
    limits = {"max_model_len": prompt + asked.max_tokens - over, "max_tokens": asked.max_tokens}
    with pytest.raises(ContextTooLong, match=f"take {prompt} and max_tokens asks for {asked.max_tokens}") as memory:
        plan_memory(asked.head, asked.facts, asked.tail, asked.owner, inject=True, **limits)
    assert memory.value.details == {"field": "messages"}
    with pytest.raises(ContextTooLong):
        plan_plain([*asked.head.token_ids, *asked.tail], asked.owner, **limits)


@given(st.lists(tokens, min_size=1, max_size=30), st.text(max_size=5))
def test_a_prompt_without_memory_loads_nothing_and_may_fill_the_context_to_the_last_token(
    prompt: list[int], owner: str
) -> None:
    plan = plan_plain(prompt, owner, max_model_len=len(prompt) + 1, max_tokens=1)
    assert plan == PromptPlan(tuple(prompt), (), text_salt(owner))
    assert plan_plain(prompt, None, max_model_len=len(prompt) + 1, max_tokens=1).salt is None
