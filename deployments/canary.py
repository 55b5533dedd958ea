"""Whether this model answers as well from injected memory as from text, asked before memory is injected for anybody.

    facts that nobody knows ─► encode ─► each question with all facts, as text and injected, the cheapest setting first
                                 ─► the first whose score is at least text's; none: memory stays text
                                 ─► the same with few facts: where that is worse than text, so few are served as text
                                 ─► each fact corrected, as text beside the others' chunks: in which phrasing most of
                                    the answers are the new ones

Models differ in what they lose by facts that were encoded apart, and nothing else at a start would show it: a shard
serves text until the verdict is in. It is kept under a digest of everything that it depends on, so that the next start
finds it. A model that fails the questions with text as well has shown nothing, and is served text too.

An answer's beginning is given, and its next word compared: one step instead of a sentence, and what is asked about is
memory, not manners.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Protocol

from connector.plan import Piece
from deployments.messages import Verdict
from deployments.scoring import words
from deployments.trial import Trial
from sharding.errors import MemshardError, Unavailable

OWNER = "\ufffdcanary"
"""No user's: ids with this character are refused."""

SETTINGS = (0, 3, 5)
"""Facts prefilled as text beside the question, the cheapest setting first."""

QUESTIONS = (
    # how the fact and the answer begin, the word that ends both, the question
    ("My friend Oscar lives in the city of", "Lisbon", "In which city does my friend Oscar live?"),
    ("My friend Nina lives in the city of", "Oslo", "In which city does my friend Nina live?"),
    ("My friend Hugo lives in the city of", "Dublin", "In which city does my friend Hugo live?"),
    ("My friend Clara lives in the city of", "Prague", "In which city does my friend Clara live?"),
    ("Emil works as a", "baker", "What does Emil work as?"),
    ("Stella works as a", "pilot", "What does Stella work as?"),
    ("Walter works as a", "judge", "What does Walter work as?"),
    ("Ruth works as a", "painter", "What does Ruth work as?"),
    ("The dog of Felix is called", "Rex", "What is the dog of Felix called?"),
    ("The cat of Paula is called", "Luna", "What is the cat of Paula called?"),
    ("The horse of Anton is called", "Storm", "What is the horse of Anton called?"),
    ("The parrot of Ida is called", "Kiwi", "What is the parrot of Ida called?"),
    ("The favourite food of Theo is", "pizza", "What is the favourite food of Theo?"),
    ("The favourite food of Sara is", "soup", "What is the favourite food of Sara?"),
    ("The favourite food of Leo is", "steak", "What is the favourite food of Leo?"),
    ("On Sunday Karl plays", "tennis", "What does Karl play on Sunday?"),
    ("On Sunday Vera plays", "chess", "What does Vera play on Sunday?"),
    ("On Sunday Jonas plays", "golf", "What does Jonas play on Sunday?"),
    ("The car of Irene is painted", "green", "What colour is the car of Irene?"),
    ("The boat of Boris is painted", "yellow", "What colour is the boat of Boris?"),
    ("The house of Alma is painted", "white", "What colour is the house of Alma?"),
    ("Gustav was born in the year", "1962", "In which year was Gustav born?"),
    ("Doris was born in the year", "1985", "In which year was Doris born?"),
    ("Edgar was born in the year", "2001", "In which year was Edgar born?"),
)
"""Invented. Each is asked with the nearest `FEW` facts and with all."""

CORRECTED = (
    *("Vienna", "Madrid", "Athens", "Warsaw"),
    *("farmer", "nurse", "singer", "plumber"),
    *("Bruno", "Bella", "Flash", "Coco"),
    *("rice", "fish", "salad"),
    *("football", "cards", "hockey"),
    *("red", "blue", "black"),
    *("1971", "1990", "1958"),
)
"""What the answers are after each fact was corrected."""

PHRASINGS = (
    "{}",
    "Correction: {}",
    "This has changed, and is true now: {}",
    "Forget what was said before about this. {}",
)
"""How a corrected fact may be put, the plainest first."""

FEW = 5
"""Injected facts carry traces of those that they were encoded behind; among few, that weighs most (docs/quality.md)."""

FORMAT = 2  # counts changes of what is asked and how it is scored
AT_ONCE = 4  # so that a chat waits behind little
ANSWER_TOKENS = 5
LEAST_RIGHT = 8
"""Fewer right answers from text than these, of 48, say nothing of injection."""

log = logging.getLogger(__name__)


class Known(Protocol):
    """Where verdicts are kept from one start to the next: `sharding.directory.Directory`."""

    async def verdict(self, name: str) -> str | None: ...

    async def keep_verdict(self, name: str, told: str) -> None: ...


class Canary:
    """The verdict on one shard's model. `known` keeps it. `fixed` is what the operator decided; nothing is asked
    then, unless on demand."""

    def __init__(self, trial: Trial, known: Known, *, window_facts: int, fixed: int | None) -> None:
        self._trial = trial
        self._known = known
        self._window_facts = window_facts
        self._proving = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self.verdict = Verdict(
            "pending", None, "whether this model answers as well from injected memory is not known yet"
        )
        self._fixed = fixed
        if fixed is not None:
            self.verdict = Verdict("fixed", fixed, "the operator decided how memory is injected")

    def begin(self) -> None:
        """Finds the verdict in the background, if it is not decided."""
        if self.verdict.state == "pending":
            self._task = asyncio.create_task(self._begin())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _begin(self) -> None:
        try:
            await self.prove(again=False)
        except MemshardError as error:
            log.warning("Memory is served as text: the canary failed: %s", error)

    async def prove(self, *, again: bool = True) -> Verdict:
        """Asks, or with `again` false believes what was found before. Chats go on meanwhile, under the last verdict.
        Raises `EngineFailed`."""
        async with self._proving:
            kept = None if again else await self._kept()
            found = kept or await self._judged()
            if kept is None and found.state in ("passed", "failed"):
                await self._keep(found)
            say = log.info if found.state == "passed" else log.warning
            say("The canary %s: %s", found.state, found.reason)
            if self._fixed is not None:
                found = replace(self.verdict, reason=found.reason, phrasing=found.phrasing)
            self.verdict = found
            return self.verdict

    async def _judged(self) -> Verdict:
        """Asks text, then one setting after the other until one is as good."""
        if (refusal := self._trial.engine.refusal) is not None:
            return Verdict("unjudged", None, f"this model's memory can only be served as text: {refusal}")
        facts = [f"{begins} {answer}." for begins, answer, _ in QUESTIONS]
        ranked = await self._trial.ranked(facts, [question for *_, question in QUESTIONS])
        pieces = await self._trial.encode(OWNER, facts, self._window_facts)
        if pieces is None:
            return Verdict("unjudged", None, "there was no room for the canary's facts in the chunk store")
        try:
            few, every = ([[pieces[int(fact)] for fact in order[:k]] for order in ranked] for k in (FEW, len(facts)))
            found = await self._compared(few, every)
            if found.prefill_nearest is None:
                return found
            return replace(found, phrasing=await self._phrasing(every, found.prefill_nearest))
        finally:
            await self._trial.forget(OWNER)

    async def _compared(self, few: list[list[Piece]], every: list[list[Piece]]) -> Verdict:
        """The verdict on the facts for each question, nearest first: `FEW` of them, and all."""
        of_few, of_all = await self._right(few, None), await self._right(every, None)
        if of_few + of_all < LEAST_RIGHT:
            asked = len(few) + len(every)
            reason = f"this model answers {of_few + of_all} of {asked} questions even from text, too few to judge by"
            return Verdict("unjudged", None, reason)
        best = 0
        for r in SETTINGS:
            best = max(best, right := await self._right(every, r))
            if right < of_all:
                continue
            few_right = await self._right(few, r)
            reason = (
                f"of {len(every)} facts {right} right injected and {of_all} as text, of {FEW} {few_right} and {of_few}"
            )
            return Verdict("passed", r, reason, 0 if few_right >= of_few else FEW)
        return Verdict("failed", None, f"of {len(every)} facts at best {best} right injected, {of_all} as text")

    async def _phrasing(self, every: list[list[Piece]], prefill_nearest: int) -> str:
        """The one in which most corrections are followed while the others' chunks tell of the old texts."""
        told = self._trial.lines([f"{begins} {answer}." for begins, answer, _ in QUESTIONS])
        followed: dict[str, int] = {}
        for phrasing in PHRASINGS:
            news = [phrasing.format(f"{q[0]} {new}.") for q, new in zip(QUESTIONS, CORRECTED, strict=True)]
            corrections = [Piece(line.token_ids) for line in self._trial.lines(news)]
            facts = [
                [correction, *(piece for piece in pieces if piece.token_ids != old.token_ids)]
                for correction, old, pieces in zip(corrections, told, every, strict=True)
            ]
            followed[phrasing] = await self._right(facts, prefill_nearest + 1, CORRECTED)
        log.info("Corrections followed, of %d, by phrasing: %s", len(CORRECTED), followed)
        return max(PHRASINGS, key=lambda phrasing: followed[phrasing])

    async def _right(
        self, facts: list[list[Piece]], prefill_nearest: int | None, answers: Sequence[str] | None = None
    ) -> int:
        """How many questions are answered right, each about its own facts; `answers` instead of those that were told
        first."""
        room = asyncio.Semaphore(AT_ONCE)
        right = answers or [answer for _, answer, _ in QUESTIONS]

        async def ask(nearest: list[Piece], answer: str, begins: str, question: str) -> bool:
            plan = self._trial.plan(OWNER, question, nearest, prefill_nearest, ANSWER_TOKENS, begins)
            async with room:
                told = await self._trial.ask(plan, ANSWER_TOKENS)
            return words(told.text)[:1] == words(answer)

        zipped = zip(facts, right, QUESTIONS, strict=True)
        asked = (ask(nearest, answer, begins, question) for nearest, answer, (begins, _, question) in zipped)
        return sum(await asyncio.gather(*asked))

    async def _kept(self) -> Verdict | None:
        try:
            found = await self._known.verdict(self._name())
        except Unavailable as error:
            log.warning("The canary is asked anew: %s", error)
            return None
        if found is None:
            return None
        return Verdict(**json.loads(found))

    async def _keep(self, verdict: Verdict) -> None:
        try:
            await self._known.keep_verdict(self._name(), json.dumps(asdict(verdict)))
        except Unavailable as error:
            log.warning("The next start will ask the canary again: %s", error)

    def _name(self) -> str:
        """A digest of what the verdict depends on."""
        asked = (SETTINGS, QUESTIONS, CORRECTED, PHRASINGS)
        depends = (FORMAT, self._trial.engine.model_digest, self._window_facts, self._trial.head, asked)
        return hashlib.blake2b(repr(depends).encode(), digest_size=16).hexdigest()
