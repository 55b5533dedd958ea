"""Whether an answer is right, without asking a model: the same text always gets the same score.

Both sides are normalised first as in SQuAD's evaluation (Rajpurkar et al. 2016): lower case, no punctuation, no
articles, single spaces.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

_PUNCTUATION = re.compile(r"[^\w\s]|_")
_ARTICLES = frozenset(("a", "an", "the"))


def words(text: str) -> list[str]:
    """The normalised text's words."""
    return [word for word in _PUNCTUATION.sub(" ", text.lower()).split() if word not in _ARTICLES]


def is_right(told: str, answers: Iterable[str]) -> bool:
    """Whether one of `answers` stands in what was `told`, as whole words in a row."""
    padded = f" {' '.join(words(told))} "
    return any(f" {' '.join(words(answer))} " in padded for answer in answers)


def token_f1(told: str, answers: Iterable[str]) -> float:
    """The largest F1, over `answers`, of the words that both sides have, each as often as the side that has it less."""
    return max((_f1(words(told), words(answer)) for answer in answers), default=0.0)


def _f1(told: list[str], answer: list[str]) -> float:
    common = sum((Counter(told) & Counter(answer)).values())
    return 2 * common / (len(told) + len(answer)) if common else 0.0
