import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.ids import FactId
from sharding.index import ExactIndex


def ids(count: int, prefix: str = "f") -> list[FactId]:
    return [FactId(f"{prefix}{i}") for i in range(count)]


def filled(count: int, dim: int = 8, seed: int = 0) -> tuple[ExactIndex, np.ndarray]:
    vectors = np.random.default_rng(seed).normal(size=(count, dim)).astype(np.float32)
    index = ExactIndex(dim)
    index.add(ids(count), vectors)
    return index, vectors


@pytest.mark.parametrize("count", [0, 1, 2, 101])
@pytest.mark.parametrize("k", [0, 1, 10, 200])
def test_the_nearest_facts_come_first_for_any_count_and_k(count: int, k: int) -> None:
    index, vectors = filled(count)
    query = np.ones(8, np.float32)
    cosines = vectors @ query / np.linalg.norm(vectors, axis=1) / np.linalg.norm(query)
    expected = np.argsort(-cosines)[:k]
    found = index.search(query, k)
    assert [id for id, _ in found] == [f"f{i}" for i in expected]
    np.testing.assert_allclose([score for _, score in found], cosines[expected], atol=1e-6)
    assert len(index) == count


def test_equal_vectors_come_oldest_first_wherever_their_rows_are() -> None:
    index = ExactIndex(5)
    index.add(ids(3, "gone"), np.eye(5)[:3])
    vector = np.random.default_rng(1).normal(size=5)
    for id in ids(40):
        index.add([id], [vector])
    for id in ids(3, "gone"):
        index.remove(id)
    assert [id for id, _ in index.search(vector, 7)] == ids(7)


def test_vectors_of_any_length_are_compared_by_direction() -> None:
    index = ExactIndex(2)
    index.add(ids(3), [[1e30, 0], [1e-30, 1e-30], [0, 5]])
    assert [id for id, _ in index.search([2e30, 0], 3)] == ids(3)


def test_a_zero_vector_scores_zero() -> None:
    index = ExactIndex(2)
    index.add(ids(1), [[0, 0]])
    assert index.search([1, 0], 1) == [("f0", 0.0)]
    assert index.search([0, 0], 1) == [("f0", 0.0)]


def test_a_new_vector_replaces_the_old_one_of_its_id() -> None:
    index = ExactIndex(2)
    index.add(ids(2), [[1, 0], [0, 1]])
    index.add([FactId("f0")], [[0, -1]])
    assert len(index) == 2
    assert [id for id, _ in index.search([0, 1], 2)] == ["f1", "f0"]


def test_removing_an_unknown_id_says_so() -> None:
    assert not ExactIndex(2).remove(FactId("x"))


@pytest.mark.parametrize("vectors", [[[1.0, 2.0, 3.0]], [[1.0], [2.0]], [[float("nan"), 0.0]], [[float("inf"), 0.0]]])
def test_vectors_it_cannot_hold_are_refused_and_nothing_is_added(vectors: list[list[float]]) -> None:
    index = ExactIndex(2)
    with pytest.raises(ValueError, match=r"expected float32 of shape|not finite"):
        index.add(ids(1), vectors)
    assert len(index) == 0


steps = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.none() | st.integers(0, 3)), max_size=40)


@given(steps, st.integers(0, 10))
@settings(deadline=None)
def test_after_any_adds_and_removals_it_finds_what_a_plain_dictionary_holds(steps, k) -> None:
    directions = np.random.default_rng(2).normal(size=(4, 3))
    index, held = ExactIndex(3), {}  # a dict keeps insertion order, and a replaced value its place
    for id, direction in steps:
        if direction is None:
            assert index.remove(id) == (held.pop(id, None) is not None)
        else:
            index.add([id], [directions[direction]])
            held[id] = direction
    query = directions[0]
    cosine = directions @ query / np.linalg.norm(directions, axis=1)
    expected = sorted(held, key=lambda id: -cosine[held[id]])[:k]
    assert [id for id, _ in index.search(query, k)] == expected
