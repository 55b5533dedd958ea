"""The memories and questions of `memshard bench quality`: invented ones by seed, or LoCoMo's out of its file.

Four kinds of invented question, each with one short answer that stands in the facts that answer it:

    single     one fact names it                  "Oscar Reed works as a baker." · "What does … work as?"
    two        two facts, told at different times "My dentist is Ida Holt." · "Ida Holt lives in Bergen."
    temporal   a day, a year, or what held then   "Hugo Wells lived in Turin from 1994 to 1999." · "Where … in 1996?"
    shared     two people with one first name     both work, in different trades

The names are common ones; who does what is drawn by seed, so that no model knows it. Facts are told in random order.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sharding.errors import MemshardError

LARGE, SMALL = 60, 10
"""Facts of a person: more than are ever retrieved, and hardly any."""

_PEOPLE = ((LARGE, 4), (SMALL, 12))
_PARTS = {LARGE: (21, 6, 12, 6), SMALL: (4, 1, 2, 1)}  # single, pairs for `two`, temporal, pairs for `shared`


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_FIRST = _words("""
Adam Agnes Albert Alma Anton Bella Boris Bruno Carl Cara Cedric Clara Daisy David Doris Edgar Edith Ella Emil
Erik Esther Felix Flora Frank Frida George Gloria Grace Gustav Hanna Harry Hazel Helen Henry Hugo Ida Irene Ivan Jacob
Jane Jonas Judith Karl Laura Leo Linda Louis Lucy Marcus Maria Martin Max Nina Nora Oliver Oscar Otto Paula Peter Philip
Rosa Ruth Samuel Sara Simon Sofia Stella Theo Thomas Tina Ursula Victor Vera Walter Wanda""")
_FAMILIES = _words("""
Adler Baker Barnes Becker Bell Berg Black Bond Brown Burke Carter Chase Clark Cole Cook Cross Dale Dean
Drake Dunn Ellis Fields Finch Fisher Ford Fox Frost Gray Green Hall Hart Hill Holt Hunt Jones King Klein Lake Lane Long
Marsh May Miller Moore Nash North Page Park Porter Price Reed Rice Rose Ross Shaw Snow Stone Swift Todd Wade Walsh Ward
Webb Wells West White Wolf Wood Woods Young""")
_TOWNS = _words("""
Athens Berlin Bergen Boston Bristol Brussels Cairo Chicago Cologne Dallas Delhi Denver Dublin Florence Geneva
Glasgow Hamburg Havana Houston Istanbul Jakarta Kiev Kyoto Leeds Lima Lisbon London Lyon Madrid Manila Marseille Memphis
Miami Milan Moscow Mumbai Munich Nairobi Naples Oslo Oxford Paris Phoenix Prague Rome Seattle Seoul Sydney Tokyo Toronto
Turin Venice Vienna Warsaw Zurich""")
_TRADES = ("baker", "pilot", "surgeon", "teacher", "gardener", "carpenter", "judge", "painter", "plumber", "singer")
_THINGS = ("lantern", "compass", "violin", "kettle", "telescope", "carpet", "clock", "mirror", "saddle", "piano")
_ROOMS = ("kitchen", "cellar", "attic", "garage", "hall", "garden")
_ANIMALS = ("dog", "cat", "parrot", "horse", "rabbit", "turtle")
_RELATIONS = ("neighbour", "cousin", "colleague", "aunt", "uncle", "friend")
_ROLES = ("dentist", "lawyer", "landlord", "tailor", "barber", "tutor", "coach", "accountant", "butcher", "mechanic")
_SPORTS = ("tennis", "chess", "golf", "hockey", "badminton", "football", "volleyball", "squash", "bowling", "rugby")
_RELATION_KIND = 4  # of `_singles`: there are fewer relations than facts
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


@dataclass(frozen=True, slots=True)
class Question:
    """`answers` are all that count as right."""

    text: str
    answers: tuple[str, ...]
    kind: str


@dataclass(frozen=True, slots=True)
class Person:
    """One user's memory, in the order of telling, and what is asked about it. `memory` is the kind of memory: answers
    are counted by it."""

    name: str
    facts: tuple[str, ...]
    questions: tuple[Question, ...]
    memory: str


def invented_people(seed: int = 0) -> tuple[Person, ...]:
    """316 questions about 4 people with 60 facts each and 12 with 10."""
    rng = random.Random(f"quality-{seed}")
    sizes = [size for size, count in _PEOPLE for _ in range(count)]
    return tuple(_person(f"person-{number}", size, rng) for number, size in enumerate(sizes))


def before_and_after(seed: int, facts: int) -> tuple[Person, Person]:
    """Somebody with so many facts, each asked about, and the same one later: in the place of each fact stands one that
    gives its question another answer, so that any of them can be corrected."""
    rng = random.Random(f"freshness-{seed}")
    names = [f"{first} {family}" for first in _FIRST for family in _FAMILIES]
    rng.shuffle(names)
    kinds = [list(_singles(2 * facts, iter(names), rng))[kind::6] for kind in range(6) if kind != _RELATION_KIND]
    told: list[tuple[str, str, Question, Question]] = []
    for of_kind in kinds:
        answers = list(dict.fromkeys(question.answers[0] for _, question in of_kind))
        for (fact,), question in of_kind:
            old = question.answers[0]
            new = answers[(answers.index(old) + 1) % len(answers)]
            before, _, after = fact.rpartition(old)
            told.append((fact, f"{before}{new}{after}", question, Question(question.text, (new,), question.kind)))
    told = rng.sample(told, facts)
    old_facts, new_facts, old_questions, new_questions = zip(*told, strict=True)
    name = f"profile-{seed}"
    kind = f"{facts} facts"
    return Person(name, old_facts, old_questions, kind), Person(name, new_facts, new_questions, kind)


def locomo_people(path: Path) -> tuple[Person, ...]:
    """LoCoMo's conversations: the dated observations of both speakers are the facts. The adversarial questions
    (category 5) are left out, as in its paper (Maharana et al. 2024). Raises MemshardError for another file."""
    try:
        return tuple(_conversation(told) for told in json.loads(path.read_text()))
    except (OSError, ValueError, LookupError, TypeError) as failure:
        raise MemshardError(f"{path} is not LoCoMo's file: {failure!r}") from failure


def first_questions(people: Iterable[Person], most: int) -> tuple[Person, ...]:
    """Of every kind of memory the first people, until they were asked about `most` questions; the last of them less."""
    kept: list[Person] = []
    left: dict[str, int] = {}
    for person in people:
        room = left.setdefault(person.memory, most)
        if room > 0:
            kept.append(replace(person, questions=person.questions[:room]))
            left[person.memory] = room - len(kept[-1].questions)
    return tuple(kept)


def _person(name: str, size: int, rng: random.Random) -> Person:
    single, two, temporal, shared = _PARTS[size]
    names = _names(rng)
    told = [*_singles(single, names, rng), *_pairs(two, names, rng), *_dates(temporal, names, rng)]
    told += _namesakes(shared, names, rng)
    facts = [fact for of_question, _ in told for fact in of_question]
    questions = [question for _, question in told]
    rng.shuffle(facts)
    rng.shuffle(questions)
    return Person(name, tuple(facts), tuple(questions), f"{size} facts")


Told = tuple[tuple[str, ...], Question]
"""Facts, and a question about them."""


def _singles(count: int, names: Iterator[str], rng: random.Random) -> Iterator[Told]:
    roles = rng.sample(_RELATIONS, len(_RELATIONS))
    for number in range(count):
        name, town, trade, pet = next(names), *map(rng.choice, (_TOWNS, _TRADES, _FIRST))
        thing, room, animal = map(rng.choice, (_THINGS, _ROOMS, _ANIMALS))
        price, code, role = str(rng.randint(21, 99)), str(rng.randint(1000, 9999)), roles[number // 6 % len(roles)]
        fact, question, answer = (
            (f"The code of the {room} of {name} is {code}.", f"What is the code of the {room} of {name}?", code),
            (f"The {thing} of {name} cost {price} dollars.", f"How much did the {thing} of {name} cost?", price),
            (f"The {animal} of {name} is called {pet}.", f"What is the {animal} of {name} called?", pet),
            (f"{name} works as a {trade}.", f"What does {name} work as?", trade),
            (f"My {role} is called {name}.", f"What is my {role} called?", name),
            (f"{name} lives in {town}.", f"In which city does {name} live?", town),
        )[number % 6]
        yield (fact,), Question(question, (answer,), "single")


def _pairs(count: int, names: Iterator[str], rng: random.Random) -> Iterator[Told]:
    for number, role in enumerate(rng.sample(_ROLES, count)):
        name, town, trade = next(names), rng.choice(_TOWNS), rng.choice(_TRADES)
        if number % 2 == 0:
            facts = (f"My {role} is called {name}.", f"{name} lives in {town}.")
            yield facts, Question(f"In which city does my {role} live?", (town,), "two")
        else:
            partner = next(names)
            facts = (f"{name} is married to {partner}.", f"{partner} works as a {trade}.")
            yield facts, Question(f"What does the person work as who is married to {name}?", (trade,), "two")


def _dates(count: int, names: Iterator[str], rng: random.Random) -> Iterator[Told]:
    for number in range(count):
        name, (before, after) = next(names), rng.sample(_TOWNS, 2)
        year, sport, day = rng.randint(1950, 2010), rng.choice(_SPORTS), rng.choice(_DAYS)
        until = year + rng.randint(4, 7)
        facts, question, answer = (
            ((f"{name} moved to {before} in {year}.",), f"In which year did {name} move to {before}?", str(year)),
            ((f"{name} plays {sport} on {day}.",), f"On which day does {name} play {sport}?", day),
            ((f"{name} was born in {year}.",), f"In which year was {name} born?", str(year)),
            (
                (f"{name} lived in {before} until {year}.", f"{name} lived in {after} from {year} to {until}."),
                f"In which city did {name} live in {rng.randint(year + 1, until - 1)}?",
                after,
            ),
        )[number % 4]
        yield facts, Question(question, (answer,), "temporal")


def _namesakes(count: int, names: Iterator[str], rng: random.Random) -> Iterator[Told]:
    for number in range(count):
        first = next(names)
        for family, trade, town in zip(*(rng.sample(what, 2) for what in (_FAMILIES, _TRADES, _TOWNS)), strict=True):
            name = f"{first} {family}"
            if number % 2 == 0:
                yield (f"{name} works as a {trade}.",), Question(f"What does {name} work as?", (trade,), "shared")
            else:
                yield (f"{name} lives in {town}.",), Question(f"In which city does {name} live?", (town,), "shared")


def _names(rng: random.Random) -> Iterator[str]:
    """None twice."""
    yield from rng.sample(_FIRST, len(_FIRST))


def _conversation(told: dict[str, Any]) -> Person:
    facts: list[str] = []
    for number in range(1, len(told["observation"]) + 1):
        day = told["conversation"][f"session_{number}_date_time"].partition(" on ")[2]
        for observed in told["observation"][f"session_{number}_observation"].values():
            facts += [f"{day}: {fact}" for fact, *_ in observed]
    kinds = {1: "two", 2: "temporal", 3: "open", 4: "single"}
    questions = tuple(
        Question(asked["question"], (str(asked["answer"]),), kinds[asked["category"]])
        for asked in told["qa"]
        if asked["category"] in kinds
    )
    return Person(told["sample_id"], tuple(facts), questions, "LoCoMo")
