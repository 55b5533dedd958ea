"""Invented facts with one question each: what the benchmarks remember and ask.

25 tokens a fact on average (without `longer`) with the packaged model, its `- ` and line feed counted. Names are made
of syllables, so that no model knows them; everything follows from the seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

FACTS_PER_PERSON = 60

_ONSETS = ("Ba", "Da", "Ke", "La", "Mo", "Na", "Pe", "Ri", "So", "Ta", "Vi", "Ze")
_CODAS = ("bel", "dan", "lin", "mar", "nor", "ran", "rik", "sa", "ton", "vik", "mond", "la")
_THINGS = ("lantern", "compass", "violin", "kettle", "telescope", "carpet", "chess set", "clock", "mirror", "saddle")
_COLOURS = ("red", "green", "copper", "silver", "blue", "yellow", "black", "white")
_TRADES = ("baker", "pilot", "surgeon", "teacher", "gardener", "carpenter", "judge", "painter")
_SEASONS = ("spring", "summer", "autumn", "winter")
_ADVERBS = ("today", "again", "still", "often", "here", "now")  # one token each
_RELATIONS = ("neighbour", "cousin", "colleague", "aunt", "landlord", "old friend")
_PATTERNS = (
    (
        "My {relation} {name} keeps a {colour} {thing} in a house near {place} and shows it every {season}.",
        "Where does {name} keep the {colour} {thing}?",
    ),
    (
        "{name}, my {relation}, works as a {trade} in {place} and collects one {colour} {thing} every {season}.",
        "What does {name} in {place} work as?",
    ),
    (
        "In {season} I travelled to {place} with my {relation} {name} to sell a {colour} {thing}.",
        "With whom did I travel to {place} to sell a {thing}?",
    ),
    (
        "The {colour} {thing} in my kitchen was a gift from {name}, a {trade} whom I met in {place}.",
        "Which {thing} did the {trade} from {place} give me?",
    ),
)


@dataclass(frozen=True, slots=True)
class Fact:
    """A sentence to remember and a question that it answers."""

    text: str
    question: str


def person_facts(seed: int, count: int = FACTS_PER_PERSON, longer: float = 0.0) -> tuple[Fact, ...]:
    """`count` facts of one person, all different, on average `longer` words (and tokens) longer than others'.

    Another seed is another person.
    """
    rng = random.Random(f"facts-{seed}")
    names, families, places = _invented(rng), _invented(rng), _invented(rng)
    facts = []
    for index in range(count):
        told, asked = _PATTERNS[index % len(_PATTERNS)]
        slots = {
            "name": f"{next(names)} {next(families)}",
            "place": next(places),
            "thing": rng.choice(_THINGS),
            "colour": rng.choice(_COLOURS),
            "trade": rng.choice(_TRADES),
            "season": rng.choice(_SEASONS),
            "relation": rng.choice(_RELATIONS),
        }
        words = " ".join(_ADVERBS[n % len(_ADVERBS)] for n in range(int((index + 1) * longer) - int(index * longer)))
        told = told.replace(".", f" {words}.") if words else told
        facts.append(Fact(told.format(**slots), asked.format(**slots)))
    return tuple(facts)


def _invented(rng: random.Random) -> Iterator[str]:
    """Names, none twice."""
    names = [onset + coda for onset in _ONSETS for coda in _CODAS]
    rng.shuffle(names)
    yield from names
