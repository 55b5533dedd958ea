"""Right is what says the answer as whole words, whatever stands around it."""

from __future__ import annotations

import pytest

from deployments.scoring import is_right, token_f1, words


def test_case_punctuation_and_articles_do_not_count() -> None:
    assert words("The  dog's name -- is: a 'Biscuit'!") == ["dog", "s", "name", "is", "biscuit"]


@pytest.mark.parametrize(
    ("told", "right"),
    [
        ("He works as a baker.", True),
        ("BAKER", True),
        ("He works in a bakery.", False),
        ("", False),
        ("He lives in New York City.", False),
    ],
)
def test_an_answer_is_right_that_says_it_as_a_whole_word(told: str, right: bool) -> None:
    assert is_right(told, ("baker", "York New")) is right


def test_an_answer_of_several_words_is_said_in_their_order() -> None:
    assert is_right("On 7 May, 2023 she went.", ("7 May 2023",))
    assert not is_right("In May she went 7 times in 2023.", ("7 May 2023",))


def test_f1_is_of_the_words_that_both_have_and_the_best_answer_counts() -> None:
    assert token_f1("a red dog", ("red dog",)) == 1.0
    assert token_f1("red dog barks loudly", ("red dog",)) == pytest.approx(2 * 0.5 * 1.0 / 1.5)
    assert token_f1("cat", ("dog", "the cat")) == 1.0
    assert token_f1("dog dog", ("dog",)) == pytest.approx(2 / 3), "a word counts as often as both have it"
    assert token_f1("", ("dog",)) == token_f1("dog", ()) == 0.0
