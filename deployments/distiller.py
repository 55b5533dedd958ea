"""Asks the served model what a conversation turn says about its user, and what of it is new. Answers are JSON by
constrained decoding, so a small model is sometimes wrong and never unreadable.

    extract   a turn -> at most five facts, one sentence each
    decide    a fact and the known ones nearest to it -> add it, put it in the place of one, or leave it

Injected memory plays no part: these prompts are plain text under the user's own salt.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from connector.plan import plan_plain
from connector.port import ENCODE_PRIORITY, Engine
from connector.template import PromptTemplate
from deployments.salts import Salts
from sharding.errors import EngineFailed, ShardGone
from sharding.ids import UserId

MAX_FACTS = 5
MAX_FACT_CHARS = 200
MAX_KNOWN = 5
EXTRACT_TOKENS = 512  # five of the longest facts, in JSON, with any tokenizer of a language model
TURN_CHARS = 12_000  # of a turn that the model is shown, its end: about 3,000 tokens

EXTRACT = (
    "You write down what a conversation tells about its user, for later conversations. List at most five short, "
    'complete sentences about the user, each one fact, in the third person ("The user …"). Write nothing that was not '
    "said. If nothing was said about the user, the list is empty."
)
EXAMPLE_TURN = "user: Hi! My name is Tom and I just moved to Bern. What's the weather like?\nassistant: Sunny, Tom."
EXAMPLE_FACTS = ["The user's name is Tom.", "The user has moved to Bern."]
DECIDE = (
    "A new fact about a user is compared with what is already known. Answer NONE if it is known already, the number "
    "of the known fact that it corrects or replaces, or ADD if it is about something else."
)

FACTS_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "facts": {
            "type": "array",
            "maxItems": MAX_FACTS,
            "items": {"type": "string", "minLength": 1, "maxLength": MAX_FACT_CHARS},
        }
    },
    "required": ["facts"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do with a fact: "ADD", "NONE", or "UPDATE" of the known fact `known`, an index."""

    what: str
    known: int = 0


class Distils(Protocol):
    """What turns a conversation into facts."""

    async def extract(self, user: UserId, messages: Sequence[tuple[str, str]], instructions: str | None) -> list[str]:
        """At most `MAX_FACTS` facts. Raises `EngineFailed`, `ContextTooLong`; `ShardGone` where the engine died."""

    async def decide(self, user: UserId, fact: str, known: Sequence[str]) -> Decision:
        """What to do with `fact`, given the known ones nearest to it, nearest first. Raises as `extract` does."""


class ModelDistiller(Distils):
    """By the engine of this shard, behind its chats."""

    def __init__(self, engine: Engine, template: PromptTemplate, salts: Salts | None = None) -> None:
        self._engine = engine
        self._salts = salts or Salts()
        self._template = template

    async def extract(self, user: UserId, messages: Sequence[tuple[str, str]], instructions: str | None) -> list[str]:
        told = "\n".join(f"{role}: {text}" for role, text in messages)[-TURN_CHARS:]
        system = EXTRACT if instructions is None else f"{EXTRACT}\n{instructions}"
        answer = await self._ask(
            user,
            [
                {"role": "system", "content": system},
                {"role": "user", "content": EXAMPLE_TURN},
                {"role": "assistant", "content": json.dumps({"facts": EXAMPLE_FACTS})},
                {"role": "user", "content": told},
            ],
            EXTRACT_TOKENS,
            FACTS_SCHEMA,
        )
        facts = [" ".join(fact.split()) for fact in answer["facts"][:MAX_FACTS]]
        return list(dict.fromkeys(fact for fact in facts if fact))

    async def decide(self, user: UserId, fact: str, known: Sequence[str]) -> Decision:
        known = known[:MAX_KNOWN]
        choices = ["ADD", "NONE", *(str(place + 1) for place in range(len(known)))]
        schema = {
            "type": "object",
            "properties": {"answer": {"enum": choices}},
            "required": ["answer"],
            "additionalProperties": False,
        }
        listed = "\n".join(f"{place + 1}. {text}" for place, text in enumerate(known))
        answer = await self._ask(
            user,
            [{"role": "system", "content": DECIDE}, {"role": "user", "content": f"Known:\n{listed}\n\nNew: {fact}"}],
            32,
            schema,
        )
        chosen = answer["answer"]
        return Decision(chosen) if chosen in ("ADD", "NONE") else Decision("UPDATE", int(chosen) - 1)

    async def _ask(
        self, user: UserId, messages: list[dict[str, str]], max_tokens: int, schema: dict[str, Any]
    ) -> dict[str, Any]:
        tokens = self._template.plain(messages)
        plan = plan_plain(
            tokens, self._salts.name(user), max_model_len=self._engine.max_model_len, max_tokens=max_tokens
        )
        sampling = self._engine.sampling(max_tokens, schema=schema, temperature=0.0)
        texts: list[str] = []
        id = f"distil-{uuid.uuid4().hex}"
        try:
            async with aclosing(self._engine.generate(id, plan, sampling, priority=ENCODE_PRIORITY)) as deltas:
                texts += [delta.text async for delta in deltas]
        except EngineFailed as error:
            if self._engine.dead:  # then so is this shard, and another one can do it
                raise ShardGone(error.message, certain=True) from error
            raise
        try:
            answer: dict[str, Any] = json.loads("".join(texts))
        except ValueError as error:  # cut off by its token limit
            raise EngineFailed("The model's answer about this turn was not complete.") from error
        return answer
