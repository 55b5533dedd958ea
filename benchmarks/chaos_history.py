"""What each user of a chaos run was promised, and whether an answer keeps it: the history that answers are checked
against. Pure.

A user does one thing at a time, so there is an order, and an answer is right where it is explained by it:

    must     told and acknowledged, not deleted: in every answer
    may      a telling or a deletion that failed: in an answer or not, until one shows it
    nothing else, above all: no deleted fact, no fact of another user

A telling that failed may still come to pass later (its shard was paused, say), and stays in `may` until it is seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from deployments.deterministic import mark


@dataclass(slots=True)
class History:
    """One user. Facts by text, which is never told twice."""

    user: str
    must: dict[str, str | None] = field(default_factory=dict)  # text -> id, where it is known
    may: set[str] = field(default_factory=set)
    count: int = 0
    text_of: dict[str, str] = field(default_factory=dict)  # of every id that was ever acknowledged

    def next_text(self) -> str:
        """A fact that was not told before and names its user."""
        self.count += 1
        return f"The {self.count}th box of {self.user} holds something that nobody else has."

    def told(self, text: str, id: str) -> None:
        """A telling was acknowledged."""
        self.may.discard(text)
        self.must[text] = id
        self.text_of[id] = text

    def deleted(self, text: str) -> None:
        """A deletion was acknowledged."""
        del self.must[text]
        self.may.discard(text)

    def doubtful(self, text: str) -> None:
        """A telling or a deletion failed."""
        self.must.pop(text, None)
        self.may.add(text)

    def listed(self, facts: dict[str, str]) -> str | None:
        """What is wrong about a listing, text to id; what it shows is a promise from now on."""
        wrong = self._wrong(facts, {text: text for text in (*self.must, *self.may)})
        for text in self.may & facts.keys():
            self.told(text, facts[text])
        return wrong

    def answered(self, text: str) -> str | None:
        """What is wrong about the deterministic engine's answer to a question that all facts are retrieved for."""
        marks = text.split(" ")[2:]
        names = {mark(known): known for known in (*self.must, *self.may)}
        return self._wrong(marks, names)

    def served(self, ids: Iterable[str]) -> str | None:
        """What is wrong about the facts that an answer says it was given, by id. One whose telling was not acknowledged
        has none yet."""
        given = list(ids)
        unnamed = [id for id in given if id not in self.text_of]
        doubtful = self.may - {self.text_of[id] for id in given if id in self.text_of}
        if len(unnamed) > len(doubtful):
            return f"{self.user} was served a fact that was never told"
        texts = [self.text_of[id] for id in given if id in self.text_of]
        names = {text: text for text in (*self.must, *self.may)}
        return self._wrong(texts, names)

    def _wrong(self, shown: Iterable[str], names: dict[str, str]) -> str | None:
        known = [names.get(one) for one in shown]
        if None in known:
            return f"{self.user} was served a fact that was deleted, or is another user's"
        if lost := self.must.keys() - set(known):
            return f"{self.user} was served without {len(lost)} facts that were acknowledged"
        if len(set(known)) != len(known):
            return f"{self.user} was served a fact twice"
        return None
