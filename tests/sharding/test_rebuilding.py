"""When a memory with something stale is rebuilt."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from sharding.rebuilding import RebuildPolicy

policies = st.builds(RebuildPolicy, st.floats(0.1, 1e6) | st.just(math.inf), st.floats(0, 1))
tokens = st.integers(1, 100_000)
seconds = st.floats(0, 1e9)


@given(policies, tokens, seconds)
def test_what_is_not_stale_is_never_rebuilt(policy: RebuildPolicy, held: int, age_s: float) -> None:
    assert not policy.due(0, held, age_s)


@given(policies, tokens, seconds, st.data())
def test_more_that_is_stale_and_staler_is_never_less_due(
    policy: RebuildPolicy, held: int, age_s: float, data: st.DataObject
) -> None:
    stale = data.draw(st.integers(1, held))
    more, older = data.draw(st.integers(stale, held)), data.draw(st.floats(age_s, 1e9))
    if policy.due(stale, held, age_s):
        assert policy.due(more, held, age_s)
        assert policy.due(stale, held, older)


@given(policies, tokens, st.data())
def test_nothing_is_stale_for_longer_than_the_cadence(policy: RebuildPolicy, held: int, data: st.DataObject) -> None:
    stale = data.draw(st.integers(1, held))
    if policy.after_s < math.inf:
        assert policy.due(stale, held, policy.after_s)


@given(tokens, st.floats(0, 1), st.data())
def test_more_than_the_share_is_due_at_once_and_as_much_is_not(held: int, share: float, data: st.DataObject) -> None:
    stale = data.draw(st.integers(1, held))
    assert RebuildPolicy(stale_share=share).due(stale, held, 0.0) == (stale > share * held)


@given(tokens, seconds)
def test_with_neither_only_demand_rebuilds(held: int, age_s: float) -> None:
    assert not RebuildPolicy().due(held, held, age_s)
