"""What goes into a chat's prompt: memory where it fits and helps, and never a refusal because of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from resident_home import PLACEMENT, Home

from deployments.chat_plan import DEFAULT_MAX_TOKENS, ChatPlan, ChatPlanner
from deployments.heads import Heads
from deployments.messages import ChatCall, MemoryUse, Sampling, Verdict
from sharding.errors import ContextTooLong

ROOM = 600  # a token is a letter here
LETTERS = "[user] \n[assistant]"  # what a prompt takes beside the question


class Asking:
    """A planner for the user of a `Home`."""

    def __init__(self, home: Home) -> None:
        self.home = home
        home.engine.max_model_len = ROOM
        self.heads = Heads("model", home.encoder, home.ledger, home.template.default_head())
        parts: Any = (home.engine, home.template, home.embedder, self.heads, home.residents, home.canary)
        self.planner = ChatPlanner(*parts)

    async def ask(
        self,
        *messages: tuple[str, str],
        max_tokens: int | None = 10,
        top_k: int = 10,
        prefill_nearest: int | None = None,
    ) -> ChatPlan:
        given = tuple({"role": role, "content": content} for role, content in messages)
        sampling = Sampling(max_tokens=max_tokens)
        call = ChatCall("r", PLACEMENT, given, sampling, "inject", top_k, prefill_nearest=prefill_nearest)
        return await self.planner.with_memory(call, self.home.memory)


@pytest.fixture
async def asking() -> AsyncIterator[Asking]:
    home = Home()
    asking = Asking(home)
    await asking.heads.piece(home.template.default_head())
    await home.tell(0, 1, 2)
    await home.settled()
    await asking.heads.encoded()
    yield asking
    home.encoder.close()
    home.ledger.check_integrity()


def text(plan: ChatPlan) -> str:
    return "".join(map(chr, plan.prompt.token_ids))


async def test_facts_stand_in_the_prompt_and_come_out_of_chunks(asking: Asking) -> None:
    plan = await asking.ask(("user", "What is fact 1?"))
    assert sorted(plan.use.fact_ids) == ["f0", "f1", "f2"]
    assert len(plan.prompt.load) == 4, "the head and three facts"
    nearest = asking.home.memory.get(plan.use.fact_ids[0])
    assert nearest is not None
    assert text(plan).endswith(f"- {nearest.text}\n\n[user] What is fact 1?\n[assistant]")


async def test_the_canary_says_how_many_of_the_nearest_facts_are_prefilled_and_the_caller_knows_better(
    asking: Asking,
) -> None:
    every = await asking.ask(("user", "What is fact 1?"))
    asking.home.canary.verdict = Verdict("passed", 2, "as good")
    plan = await asking.ask(("user", "What is fact 1?"))
    assert plan.prompt.token_ids == every.prompt.token_ids
    assert plan.prompt.load == every.prompt.load[:2], "the head and the farthest fact"
    assert (await asking.ask(("user", "What is fact 1?"), prefill_nearest=1)).prompt.load == every.prompt.load[:3]
    asking.home.canary.verdict = Verdict("passed", 0, "as good", text_facts=2)
    assert (await asking.ask(("user", "What is fact 1?"))).prompt == every.prompt
    few = await asking.ask(("user", "What is fact 1?"), top_k=2)
    assert (few.prompt.load, few.use.fallback) == (every.prompt.load[:1], None)


async def test_where_injection_is_worse_than_text_the_same_prompt_is_text_and_says_why(asking: Asking) -> None:
    every = await asking.ask(("user", "What is fact 1?"))
    asking.home.canary.verdict = Verdict("failed", None, "worse than text")
    plan = await asking.ask(("user", "What is fact 1?"))
    assert (plan.prompt.token_ids, plan.prompt.load) == (every.prompt.token_ids, ())
    assert (plan.use.mode, plan.use.fallback) == ("inject", "worse than text")
    wished = await asking.ask(("user", "What is fact 1?"), prefill_nearest=0)
    assert (wished.prompt.load, wished.use.fallback) == (every.prompt.load, None)


async def test_a_prompt_that_fits_without_memory_is_served_without_it_and_says_so(asking: Asking) -> None:
    question = "x" * (ROOM - 10 - len(LETTERS))
    plan = await asking.ask(("user", question), top_k=2)
    assert (plan.use.fact_ids, plan.use.left_out, plan.prompt.load) == ((), 2, ())
    assert text(plan) == f"[user] {question}\n[assistant]"


async def test_where_no_fact_fits_behind_the_preamble_there_is_no_preamble(asking: Asking) -> None:
    head = len(asking.home.template.default_head()) + 1
    plan = await asking.ask(("user", "x" * (ROOM - 10 - len(LETTERS) - head)))
    assert (plan.use.fact_ids, plan.use.left_out) == ((), 3)
    assert text(plan).startswith("[user] x")


async def test_a_prompt_that_does_not_fit_even_without_memory_is_refused(asking: Asking) -> None:
    with pytest.raises(ContextTooLong):
        await asking.ask(("user", "x" * (ROOM - 9 - len(LETTERS))))


async def test_a_prompt_too_long_for_memory_queues_no_head(asking: Asking) -> None:
    before = len(asking.home.engine.prefills)
    for _ in range(3):
        await asking.ask(("system", "s" * (ROOM - 50)), ("user", "x"))
    await asking.heads.encoded()
    assert len(asking.home.engine.prefills) == before


@pytest.mark.parametrize("messages", [[("system", "Hi.")], [("user", " ")], [("user", "fact 1"), ("user", "")]])
async def test_without_a_question_there_is_nothing_to_search_memory_for(
    asking: Asking, messages: list[tuple[str, str]]
) -> None:
    plan = await asking.ask(*messages)
    assert plan.use.fact_ids == ()
    assert "fact 0" not in text(plan)


async def test_a_user_with_no_facts_is_asked_nothing_of(asking: Asking) -> None:
    asking.home.memory.clear()
    asking.home.embedder.asked.clear()
    assert (await asking.ask(("user", "x"))).use == MemoryUse("inject")
    assert asking.home.embedder.asked == []


async def test_a_fact_deleted_while_the_question_is_embedded_is_not_in_the_prompt(asking: Asking) -> None:
    await asking.home.residents.ready(asking.home.memory)
    asking.home.embedder.gate.clear()
    planning = asyncio.create_task(asking.ask(("user", "What is fact 1?")))
    await asyncio.sleep(0.05)
    await asking.home.delete(1)
    asking.home.embedder.gate.set()
    assert sorted((await planning).use.fact_ids) == ["f0", "f2"]


async def test_a_fact_deleted_while_the_head_is_queued_is_not_in_the_prompt(asking: Asking) -> None:
    class SlowHeads(Heads):
        async def piece(self, token_ids: Any) -> Any:
            await asking.home.delete(1)
            return await super().piece(token_ids)

    home = asking.home
    asking.planner._heads = SlowHeads("model", home.encoder, home.ledger, home.template.default_head())
    assert sorted((await asking.ask(("user", "What is fact 1?"))).use.fact_ids) == ["f0", "f2"]


@pytest.mark.parametrize(("letters", "expected"), [(10, DEFAULT_MAX_TOKENS), (500, ROOM - 500), (ROOM - 1, 1)])
async def test_an_answer_that_names_no_length_has_what_the_prompt_leaves(
    asking: Asking, letters: int, expected: int
) -> None:
    asking.home.memory.clear()
    assert (await asking.ask(("user", "x" * (letters - len(LETTERS))), max_tokens=None)).max_tokens == expected


async def test_an_answer_that_names_no_length_is_refused_only_where_nothing_is_left(asking: Asking) -> None:
    with pytest.raises(ContextTooLong):
        await asking.ask(("user", "x" * (ROOM - len(LETTERS))), max_tokens=None)
