"""The invented facts: the same every time, never the same fact or question twice."""

from benchmarks.facts import FACTS_PER_PERSON, person_facts


def test_a_seed_always_gives_the_same_person() -> None:
    assert person_facts(3) == person_facts(3)


def test_no_fact_and_no_question_comes_twice() -> None:
    facts = person_facts(0)
    assert len(facts) == FACTS_PER_PERSON
    assert len({fact.text for fact in facts}) == len({fact.question for fact in facts}) == len(facts)


def test_two_people_share_no_fact() -> None:
    assert not {fact.text for fact in person_facts(0)} & {fact.text for fact in person_facts(1)}


def test_facts_are_of_about_the_stated_length() -> None:
    words = [len(fact.text.split()) for fact in person_facts(0)]
    assert 14 <= min(words) <= max(words) <= 22  # 22 to 28 tokens with the packaged model
