"""Another model's word on which answers are right, where matching words would be too strict. Not deterministic.

It is asked through the OpenAI API: any server that has it, another Memshard's included.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.quality import Answer
from sharding.errors import MemshardError

if TYPE_CHECKING:
    from openai import AsyncOpenAI

AT_ONCE = 8
ANSWER_TOKENS = 4
PROMPT = """Question: {question}
Expected answer: {expected}
Given answer: {told}

Does the given answer say what the expected one says? Reply with one word, yes or no."""


async def judged(answers: Sequence[Answer], client: AsyncOpenAI, model: str) -> list[Answer]:
    """The answers with the judge's verdict on each; the same words about the same question are judged once. Raises
    MemshardError where it gives none."""
    from openai import OpenAIError

    room = asyncio.Semaphore(AT_ONCE)

    async def ask(question: str, expected: tuple[str, ...], told: str) -> bool:
        prompt = PROMPT.format(question=question, expected=" or ".join(expected), told=told.strip())
        async with room:
            try:
                said = await client.chat.completions.create(
                    model=model,
                    messages=[{"role": "user", "content": prompt}],
                    temperature=0,
                    max_completion_tokens=ANSWER_TOKENS,
                )
            except OpenAIError as error:
                raise MemshardError(f"The judge {model} at {client.base_url} failed: {error}") from error
        word = (said.choices[0].message.content or "").strip().lower()
        if not word.startswith(("yes", "no")):
            raise MemshardError(f"The judge {model} said neither yes nor no: {word!r}")
        return word.startswith("yes")

    asked = list(dict.fromkeys((one.question.text, one.question.answers, one.told) for one in answers))
    verdicts = dict(zip(asked, await asyncio.gather(*(ask(*one) for one in asked)), strict=True))
    return [replace(one, verdict=verdicts[one.question.text, one.question.answers, one.told]) for one in answers]
