"""Who the load's users are, what each has told, and whether what comes back is theirs: the history that answers are
checked against.

Every person has a mark, a word that nobody else says and that stands in each of the person's facts. Each write is
remembered with the time it was sent and the time it was acknowledged; between the two, both outcomes are right. A write
that failed may have happened or not until a listing tells (`settle`).

    a fact in an answer   was told by this person, and its deletion was not acknowledged before the question was sent
    a fact not in it      was not acknowledged before the question, or its deletion was sent, or nearer ones stand there
    a text in an answer   has no other person's mark, and with the deterministic engine is exactly what it must be

Pure: times come from the caller, in seconds.
"""

from __future__ import annotations

import math
import random
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from benchmarks.load_client import Answer
from deployments.deterministic import answer as deterministic_answer

MARK = re.compile(r"\bzq[0-9a-f]{10}\b")
NEVER = math.inf

_THINGS = ("lantern", "compass", "violin", "kettle", "telescope", "carpet", "clock", "mirror", "saddle", "drum")
_PLACES = ("Bergen", "Lisbon", "Prague", "Quito", "Osaka", "Tunis", "Perth", "Riga", "Lima", "Cork")
_COLOURS = ("red", "green", "copper", "silver", "blue", "yellow", "black", "white")


@dataclass(slots=True)
class Told:
    """One fact. `texts` are what it says, with the time each was sent and acknowledged; a deletion that was never asked
    for is at `NEVER`."""

    texts: list[tuple[str, float, float]]
    delete_sent: float = NEVER
    deleted: float = NEVER

    @property
    def told(self) -> float:
        """When it was first acknowledged."""
        return self.texts[0][2]

    def readings(self, asked: float, answered: float) -> list[str]:
        """What it may have said to a question that was asked and answered then."""
        sure = max((place for place, (_, _, done) in enumerate(self.texts) if done < asked), default=0)
        return [text for text, sent, _ in self.texts[sure:] if sent <= answered]


@dataclass(slots=True)
class Person:
    """One user and the facts by id. `doubtful` are texts whose telling failed: they may have come through."""

    user: str
    mark: str
    rng: random.Random
    facts: dict[str, Told] = field(default_factory=dict)
    doubtful: set[str] = field(default_factory=set)
    adds_running: int = 0
    count: int = 0

    def invent(self) -> str:
        """A fact that was not told before."""
        self.count += 1
        rng = self.rng
        thing = f"{rng.choice(_COLOURS)} {rng.choice(_THINGS)}"
        return f"The user {self.mark} keeps {thing} number {self.count} in a house near {rng.choice(_PLACES)}."

    def question(self) -> str:
        """About one of the things that people keep."""
        rng = self.rng
        return f"Where is the {rng.choice(_COLOURS)} {rng.choice(_THINGS)} kept, case {rng.randrange(10**6)}?"

    def deletable(self) -> list[str]:
        """Facts that nobody is deleting or changing."""
        return [id_ for id_, told in self.facts.items() if told.delete_sent == NEVER and told.texts[-1][2] < NEVER]


@dataclass(frozen=True, slots=True)
class Question:
    """What was asked of whom, and when."""

    person: Person
    mode: str
    top_k: int
    asked: float
    answered: float


class Population:
    """Everybody, by popularity: the first is the most popular."""

    def __init__(self, count: int, run: str, seed: int, zipf: float) -> None:
        """The nth is asked for in proportion to 1 / n**zipf; 0 makes all alike."""
        rng = random.Random(f"people-{seed}")
        self.people = [
            Person(f"load-{run}-{n}", f"zq{rng.getrandbits(40):010x}", random.Random(f"person-{seed}-{n}"))
            for n in range(count)
        ]
        self._marks = {person.mark for person in self.people}
        self._shares = list(accumulate((n + 1) ** -zipf for n in range(count)))

    def pick(self, rng: random.Random) -> Person:
        """Somebody, the popular ones more often."""
        return self.people[bisect_left(self._shares, rng.random() * self._shares[-1])]

    def wrong(self, question: Question, answer: Answer, exact: bool, final: bool = False) -> str | None:
        """What is wrong about an answer, or None; `exact`: the deterministic engine gave it. Where a fact is not known
        yet, because its telling was not acknowledged, the sentence begins with "unknown": ask again when `final`."""
        person = question.person
        if foreign := set(MARK.findall(answer.text)) & self._marks - {person.mark}:
            return f"the text has another user's mark: {sorted(foreign)}"
        if question.mode == "off":
            return "there are facts without memory" if answer.fact_ids else None
        if len(set(answer.fact_ids)) != len(answer.fact_ids):
            return "a fact stands in the answer twice"
        for id_ in answer.fact_ids:
            told = person.facts.get(id_)
            if told is None:
                return "a fact is not this user's" if final else "unknown fact"
            if told.deleted < question.asked:
                return "a deleted fact was served"
        return _missing(question, answer) or (_misread(question, answer) if exact else None)


def settle(person: Person, listed: Mapping[str, str]) -> list[str]:
    """What is wrong about the person's facts as they are listed (id to text) when nothing runs any more. What was in
    doubt is known then."""
    wrong: list[str] = []
    for id_, text in listed.items():
        told = person.facts.get(id_)
        if told is None and text in person.doubtful:
            person.facts[id_] = Told([(text, -NEVER, -NEVER)])
        elif told is None:
            wrong.append("a listed fact was never told")
        elif told.deleted < NEVER:
            wrong.append("a deleted fact is listed")
        elif text not in told.readings(NEVER, NEVER) and text not in _in_doubt(told):
            wrong.append("a listed fact says something else than was told")
    wrong += ["an acknowledged fact is lost"] * sum(
        told.delete_sent == NEVER and id_ not in listed for id_, told in person.facts.items()
    )
    return wrong


def _missing(question: Question, answer: Answer) -> str | None:
    facts = question.person.facts.items()
    sure = {id_ for id_, told in facts if told.told < question.asked and not told.delete_sent <= question.answered}
    served = len(answer.fact_ids) + answer.left_out
    if served < min(question.top_k, len(sure)):
        return "fewer facts were found than there are"
    may_be = sum(told.deleted >= question.asked for _, told in facts) + len(question.person.doubtful)
    all_wanted = may_be + question.person.adds_running <= question.top_k
    if all_wanted and not answer.left_out and not sure <= set(answer.fact_ids):
        return "an acknowledged fact was not found"
    return None


def _misread(question: Question, answer: Answer) -> str | None:
    """The nearest fact is the first of the ids and the last in the prompt."""
    words = answer.text.split(" ")
    facts = [question.person.facts[id_] for id_ in reversed(answer.fact_ids)]
    readings = [told.readings(question.asked, question.answered) for told in facts]
    expected = [{deterministic_answer([text]).split(" ")[-1] for text in texts} for texts in readings]
    wanted: Sequence[set[str]] = [{f"{len(facts)}"}, {"facts:"}, *expected]
    cut = answer.finish_reason == "length"
    fits = len(words) <= len(wanted) if cut else len(words) == len(wanted)
    if not fits or any(word not in right for word, right in zip(words, wanted, strict=False)):
        return "the text is not what the facts say"
    return None


def _in_doubt(told: Told) -> list[str]:
    return [text for text, _, done in told.texts if done == NEVER]
