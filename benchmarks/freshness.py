"""What becomes of answers when a fact is corrected: with the memory as it was, the correction beside it, and rebuilt.

For each invented profile of a hundred facts, one fact after the other gets another answer, and is asked about:

    text        all facts as text, the corrected one among them: what the others are held against
    old memory  every chunk as it was, the old fact's included: nothing was done about the correction
    left out    stale chunks without the corrected fact: what the others' chunks still tell of its old text
    as text     the correction in one phrasing, prefilled nearest to the question, behind stale chunks
    as chunk    the same, encoded behind the facts told last, and injected
    warm        the memory rebuilt: what depends on the fact encoded anew. The next fact is corrected in this memory
    full        a memory built from nothing

A chat takes the `TOP_K` facts nearest to the question, as the product does. The answer's beginning is given, as the
canary gives it. It is new that contains the new value as whole words, and old that contains the old one. What
rebuilding costs is counted in tokens: those in the prompts that are prefilled, and those of them that the engine
computed, the rest being in its prefix cache.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import track

from benchmarks.in_process import shard_in_process
from benchmarks.quality_questions import Person, before_and_after
from connector.chunk import ChunkId
from connector.plan import Piece
from connector.port import CHAT_PRIORITY
from connector.windows import EncodeJob, FactChunks, Line
from deployments.canary import PHRASINGS
from deployments.scoring import is_right
from deployments.trial import Trial
from sharding.errors import MemshardError
from sharding.ids import FactId

FACTS = 100
PROFILES, CORRECTIONS = 2, 12
QUICK_PROFILES, QUICK_CORRECTIONS = 1, 10
TOP_K = 10
ANSWER_TOKENS = 8
AT_ONCE = 8
CORRECTION = FactId("correction")

TEXT, OLD, LEFT_OUT, WARM, FULL = "text", "old memory", "left out", "warm rebuild", "full rebuild"


@dataclass(frozen=True, slots=True)
class Answer:
    """One arm's answer to the question about one corrected fact."""

    arm: str
    profile: str
    question: str
    new: bool
    old: bool


@dataclass(frozen=True, slots=True)
class Cost:
    """What one correction cost in one arm: tokens of the prompts that were prefilled to encode it, those of them that
    the engine computed, and tokens of text that each chat about it prefills besides."""

    arm: str
    prompt_tokens: int = 0
    computed_tokens: int = 0
    chat_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    model: str
    window_facts: int
    answers: list[Answer]
    costs: list[Cost]


def as_text(phrasing: str) -> str:
    return f'as text "{phrasing}"'


def as_chunk(phrasing: str) -> str:
    return f'as chunk "{phrasing}"'


async def run(model: Path | None, profiles: int, corrections: int, console: Console) -> Measured:
    """Raises `StartupError`, and MemshardError where something cannot be encoded or an answer is not its arm's."""
    console.print("Starting an engine, about half a minute")
    async with shard_in_process(model) as opened:
        shard = opened.shard
        trial = Trial(shard.engine, shard.template, shard.embedder, shard.encoder, shard.tiers, priority=CHAT_PRIORITY)
        await trial.encode_head()
        measured = Measured(opened.model, opened.window_facts, [], [])
        for seed in range(profiles):
            before, after = before_and_after(seed, FACTS)
            profile = Profile(trial, before, opened.window_facts)
            await profile.build()
            step = FACTS / corrections
            places = [int(n * step) for n in range(corrections)]
            for place in track(places, f"Correcting {before.name}", console=console, transient=True):
                answers, costs = await profile.correct(place, after)
                measured.answers.extend(answers)
                measured.costs.extend(costs)
            await profile.forget()
        return measured


class Profile:
    """Somebody's memory, built and then corrected fact by fact."""

    def __init__(self, trial: Trial, person: Person, window_facts: int) -> None:
        self._trial = trial
        self._window_facts = window_facts
        self._name = person.name
        self._facts = list(person.facts)
        self._questions = person.questions
        self._lines = trial.lines(self._facts)
        self._chunks = FactChunks(
            self._name,
            trial.engine.model_digest,
            trial.head,
            window_facts=window_facts,
            room_tokens=trial.engine.max_model_len - 1,
            keep_stale=True,
        )

    async def build(self) -> None:
        self._chunks.update(self._lines)
        await self._encode(self._chunks)

    async def forget(self) -> None:
        await self._trial.forget(self._name)

    async def correct(self, place: int, after: Person) -> tuple[list[Answer], list[Cost]]:
        """The answers of all arms about one fact, and what they cost; the memory is rebuilt then."""
        new, was = after.questions[place], self._chunks.piece(self._lines[place].fact)
        begins = after.facts[place].rpartition(new.answers[0])[0].strip()
        asked = _Asked(begins, new.text, new.answers, self._questions[place].answers)
        self._facts[place] = after.facts[place]
        self._lines = self._trial.lines(self._facts)
        (ranked,) = await self._trial.ranked(self._facts, [asked.question])
        nearest = [int(fact) for fact in ranked[:TOP_K]]
        self._chunks.update(self._lines)
        stale = {n: self._served(n) for n in nearest}
        others = [stale[n] for n in nearest if n != place]
        arms: dict[str, tuple[list[Piece], int | None]] = {
            TEXT: ([Piece(self._lines[n].token_ids) for n in nearest], None),
            OLD: ([was if n == place else stale[n] for n in nearest], 0),
            LEFT_OUT: (others, 0),
        }
        costs: list[Cost] = []
        for phrasing in PHRASINGS if place in nearest else ():
            piece, cost = await self._encoded(phrasing.format(self._facts[place]), as_chunk(phrasing))
            arms[as_text(phrasing)] = ([Piece(piece.token_ids), *others], 1)
            arms[as_chunk(phrasing)] = ([piece, *others], 0)
            costs += [Cost(as_text(phrasing), chat_tokens=len(piece.token_ids)), cost]
        answers = await self._ask(self._name, arms, asked)
        self._chunks.renew(uuid.uuid4().hex)
        costs.append(await self._encode(self._chunks, WARM))
        self._chunks.settle(self._trial.tiers.peek_held)
        standing = self._chunks.standing()
        await self._trial.encoder.forget(sorted(self._trial.tiers.ids_of(self._name) - standing))
        warm = [self._chunks.piece(self._lines[n].fact) for n in nearest]
        answers += await self._ask(self._name, {WARM: (warm, 0)}, asked)
        full, cost = await self._built_from_nothing()
        answers += await self._ask(f"{self._name} anew", {FULL: ([full[n] for n in nearest], 0)}, asked)
        await self._trial.forget(f"{self._name} anew")
        return answers, [*costs, cost]

    def _served(self, place: int) -> Piece:
        line = self._lines[place]
        return Piece(line.token_ids, self._chunks.served(line.fact, self._trial.tiers.peek_held))

    async def _encoded(self, text: str, arm: str) -> tuple[Piece, Cost]:
        """A correction as if it were told last."""
        (line,) = self._trial.lines([text])
        told = FactChunks(
            self._name,
            self._trial.engine.model_digest,
            self._trial.head,
            window_facts=self._window_facts,
            room_tokens=self._trial.engine.max_model_len - 1,
        )
        told.update([*self._lines, Line(CORRECTION, len(self._lines), line.token_ids)])
        piece = told.piece(CORRECTION)
        assert piece.chunk is not None
        return piece, await self._encode(_Only(told, piece.chunk), arm)

    async def _built_from_nothing(self) -> tuple[list[Piece], Cost]:
        chunks = FactChunks(
            f"{self._name} anew",
            self._trial.engine.model_digest,
            self._trial.head,
            window_facts=self._window_facts,
            room_tokens=self._trial.engine.max_model_len - 1,
        )
        chunks.update(self._lines)
        cost = await self._encode(chunks, FULL, f"{self._name} anew")
        return [chunks.piece(line.fact) for line in self._lines], cost

    async def _encode(self, wishes: FactChunks | _Only, arm: str = "", owner: str | None = None) -> Cost:
        """Returns when all of it is here. Raises MemshardError where there is no room."""
        trial, owner = self._trial, owner or self._name
        prompts = sum(len(job.token_ids) for job in wishes.jobs(trial.tiers.peek_held))
        before = trial.engine.counters["encode_prefilled_tokens"]
        await trial.encoder.submit(owner, wishes)
        await trial.encoder.settled(owner)
        if not all(map(trial.tiers.device.peek_resident, wishes.ids())):
            raise MemshardError(f"The chunk store is too small for the {FACTS} facts of {self._name}")
        return Cost(arm, prompts, trial.engine.counters["encode_prefilled_tokens"] - before)

    async def _ask(self, owner: str, arms: dict[str, tuple[list[Piece], int | None]], asked: _Asked) -> list[Answer]:
        room = asyncio.Semaphore(AT_ONCE)

        async def ask(arm: str, facts: Sequence[Piece], prefill_nearest: int | None) -> Answer:
            plan = self._trial.plan(owner, asked.question, facts, prefill_nearest, ANSWER_TOKENS, asked.begins)
            async with room:
                told = await self._trial.ask(plan, ANSWER_TOKENS)
            if plan.left_out or told.injected_tokens + told.cached_tokens < plan.load_tokens:
                raise MemshardError(f"An answer is not what {arm} means: not all that was planned was injected")
            new, old = is_right(told.text, asked.new), is_right(told.text, asked.old)
            return Answer(arm, self._name, asked.question, new, old)

        return await asyncio.gather(*(ask(arm, *how) for arm, how in arms.items()))


class _Asked(NamedTuple):
    """A question, how its answer begins, and how that ends after the correction and before."""

    begins: str
    question: str
    new: tuple[str, ...]
    old: tuple[str, ...]


class _Only:
    """One of a memory's chunks, for the encoder."""

    def __init__(self, chunks: FactChunks, wanted: ChunkId) -> None:
        self._chunks = chunks
        self._wanted = wanted

    def ids(self) -> list[ChunkId]:
        return [self._wanted]

    def jobs(self, resident: Callable[[ChunkId], bool]) -> Iterator[EncodeJob]:
        return self._chunks.jobs(lambda id_: id_ != self._wanted or resident(id_))


def shares_of_full_build(
    turns: int, turn_facts: int, window_facts: int, fact_tokens: int, head_tokens: int
) -> list[float]:
    """For each turn of a memory, if its facts are corrected: prefilled tokens of the rebuild over a full build's, with
    nothing in the prefix cache. Facts are all alike; nothing is computed but counts."""

    def line(seq: int, version: int) -> Line:
        return Line(FactId(f"{seq}"), seq, (seq, version, *range(fact_tokens - 2)))

    told = [line(seq, 0) for seq in range(turns * turn_facts)]
    head = range(head_tokens)
    chunks = FactChunks("", "", head, window_facts=window_facts, room_tokens=1 << 30, keep_stale=True)
    chunks.update(told)
    held = set(chunks.ids()).__contains__
    shares: list[float] = []
    for first in range(0, len(told), turn_facts):
        corrected = [line(seq, 1) for seq in range(first, first + turn_facts)]
        chunks.update([*told[:first], *corrected, *told[first + turn_facts :]])
        chunks.renew()
        shares.append(sum(len(job.token_ids) for job in chunks.jobs(held)) / chunks.full_tokens)
        chunks.update(told)
    return shares
