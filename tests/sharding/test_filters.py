from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding.errors import InvalidRequest
from sharding.facts import Fact
from sharding.filters import MAX_DEPTH, MAX_NODES, OPERATORS, anchors, matches, parse_filters
from sharding.ids import FactId, UserId
from sharding.scopes import Entity

FACT = Fact(
    FactId("f1"),
    UserId("ada"),
    "I like Tea",
    "hash",
    "t",
    1,
    1,
    "2026-01-02T03:04:05.678+00:00",
    "2026-01-03T03:04:05.678+00:00",
    scopes={"user_id": "ada", "agent_id": "cook"},
    metadata={"n": 2, "flag": True, "tags": ["a", "b"], "nested": {"x": 1}, "none": None},
)

USER = Entity("user", "ada")


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"user_id": "ada", "agent_id": "cook"}, True),
        ({"user_id": "ada", "run_id": "*"}, False),
        ({"run_id": None}, True),
        ({"AND": [{"user_id": "ada"}, {"agent_id": {"ne": "cook"}}]}, False),
        ({"AND": []}, True),
        ({"OR": []}, False),
        ({"NOT": []}, True),
        ({"NOT": {"user_id": "bob"}}, True),
        ({"NOT": [{"user_id": "bob"}, {"agent_id": "cook"}]}, False),
        ({"n": {"gt": 1, "lt": 3}}, True),
        ({"n": {"gt": "1"}}, False),
        ({"n": True}, False),
        ({"flag": True}, True),
        ({"flag": 1}, False),
        ({"flag": {"gt": 0}}, False),
        ({"tags": "a"}, True),
        ({"tags": ["a", "z"]}, True),
        ({"tags": ["y", "z"]}, False),
        ({"tags": {"contains": "b"}}, True),
        ({"tags": {"contains": "bc"}}, False),
        ({"nested": {"eq": {"x": 1}}}, True),
        ({"metadata": {"n": {"gte": 2}, "flag": True}}, True),
        ({"none": "*"}, False),
        ({"absent": {"nin": ["x"]}}, True),
        ({"memory_ids": ["f1", "f2"]}, True),
        ({"keywords": {"contains": "tea"}}, False),
        ({"keywords": {"icontains": "tea"}}, True),
        ({"created_at": {"gte": "2026-01-02", "lt": "2026-01-03T00:00:00+01:00"}}, True),
        ({"created_at": {"lt": 1}}, False),
        ({"created_at": {"gt": "not a time"}}, False),
        ({"created_at": "2026-01-02T03:04:05.678Z"}, True),
        ({"timestamp": {"gt": 1_700_000_000}}, True),
    ],
)
def test_a_filter_matches_what_it_says(filters: dict[str, Any], expected: bool) -> None:
    assert matches(parse_filters(filters), FACT) is expected


@pytest.mark.parametrize(
    ("filters", "concerned"),
    [
        ({"user_id": "ada"}, {USER}),
        ({"agent_id": "cook", "user_id": "ada"}, {USER}),
        ({"user_id": ["ada", "bob"]}, {USER, Entity("user", "bob")}),
        ({"user_id": "*", "agent_id": "cook"}, {Entity("agent", "cook")}),
        ({"OR": [{"user_id": "ada"}, {"AND": [{"run_id": "r"}, {"n": 1}]}]}, {USER, Entity("run", "r")}),
        ({"session_id": "r"}, {Entity("run", "r")}),
        ({"user_id": "*"}, {Entity("user", "*")}),
        ({}, None),
        ({"n": 1}, None),
        ({"user_id": None}, None),
        ({"user_id": 5}, None),
        ({"user_id": {"ne": "ada"}}, None),
        ({"user_id": {"contains": "a"}}, None),
        ({"NOT": [{"user_id": "ada"}]}, None),
        ({"OR": [{"user_id": "ada"}, {"n": 1}]}, None),
        ({"OR": []}, None),
    ],
)
def test_a_filter_says_whose_memories_it_concerns(filters: dict[str, Any], concerned: set[Entity] | None) -> None:
    found = anchors(parse_filters(filters))
    assert found == (None if concerned is None else frozenset(concerned))


@pytest.mark.parametrize(
    "filters",
    [
        [],
        "user_id",
        None,
        {"AND": ["x"]},
        {"user_id": {"like": "a%"}},
        {"user_id": {"in": "ada"}},
        {"user_id": {"contains": 1}},
        {"user_id": {}},
        {"OR": [{"n": i} for i in range(MAX_NODES)]},
    ],
)
def test_what_is_no_filter_is_refused_in_a_sentence(filters: object) -> None:
    with pytest.raises(InvalidRequest, match=r"^'filters' .*\.$"):
        parse_filters(filters)


def test_a_filter_that_is_too_deep_is_refused() -> None:
    deep: dict[str, Any] = {"user_id": "ada"}
    for _ in range(MAX_DEPTH):
        deep = {"NOT": [deep]}
    with pytest.raises(InvalidRequest, match="too deep"):
        parse_filters(deep)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
fields = st.sampled_from(["user_id", "created_at", "n", "tags", "memory_ids", "keywords", "metadata"]) | st.text(
    max_size=3
)
leaves = st.dictionaries(fields, values | st.dictionaries(st.sampled_from(OPERATORS), values, max_size=2), max_size=3)
trees = st.recursive(
    leaves,
    lambda inner: st.dictionaries(st.sampled_from(["AND", "OR", "NOT"]), st.lists(inner, max_size=3), max_size=2),
)


@given(trees)
def test_any_filter_is_refused_or_answers_and_everything_it_matches_belongs_to_whom_it_names(raw: Any) -> None:
    try:
        filter = parse_filters(raw)
    except InvalidRequest:
        return
    if matches(filter, FACT) and (concerned := anchors(filter)) is not None:
        mine = {Entity(kind, name) for kind, name in (("user", "ada"), ("agent", "cook"))}
        assert any(entity in mine or entity.name == "*" for entity in concerned)
