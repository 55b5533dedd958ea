"""Above its threshold an index asks a graph, and nobody can tell but by the time it takes."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharding.fact_index import FactIndex
from sharding.graphs import HnswGraph, has_cuvs, open_graph, questions_about
from sharding.ids import FactId
from sharding.index import ExactIndex

DIM = 64
FACTS = 6_000


def ids(count: int, first: int = 0) -> list[FactId]:
    return [FactId(f"f{first + i}") for i in range(count)]


def clustered(count: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    centres = random.normal(size=(max(1, count // 50), DIM))
    return (centres[random.integers(0, len(centres), count)] + 0.4 * random.normal(size=(count, DIM))).astype(
        np.float32
    )


def uniform(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, DIM)).astype(np.float32)


def recall(index: FactIndex, exact: ExactIndex, vectors: np.ndarray, k: int = 10) -> float:
    """Of questions near to facts, in parts of what exact search finds."""
    random = np.random.default_rng(7)
    asked = questions_about(vectors[random.integers(0, len(vectors), 100)], random)
    found = [{id for id, _ in index.search(query, k)} for query in asked]
    expected = [{id for id, _ in exact.search(query, k)} for query in asked]
    return sum(len(a & b) for a, b in zip(found, expected, strict=True)) / (k * len(asked))


@pytest.fixture(scope="module", params=[clustered, uniform])
def built(request: pytest.FixtureRequest) -> tuple[FactIndex, ExactIndex, np.ndarray]:
    vectors = request.param(FACTS)
    index, exact = FactIndex(DIM, exact_up_to=1_000, open_graph=HnswGraph), ExactIndex(DIM)
    for one in (index, exact):
        one.add(ids(FACTS), vectors)
    index.settled()
    assert index.uses_graph() == (request.param is clustered)
    return index, exact, vectors


def test_the_ten_nearest_of_many_are_found(built: tuple[FactIndex, ExactIndex, np.ndarray]) -> None:
    assert recall(*built) >= 0.99


def test_scores_are_exact_and_in_order(built: tuple[FactIndex, ExactIndex, np.ndarray]) -> None:
    index, exact, vectors = built
    found = index.search(vectors[3], 5)
    assert found[0] == (FactId("f3"), pytest.approx(1.0))
    assert set(found) <= set(exact.search(vectors[3], 50))
    assert [score for _, score in found] == sorted((score for _, score in found), reverse=True)


@pytest.mark.parametrize("k", [0, 1, 10, 101, FACTS, FACTS + 5])
def test_any_k_is_answered_also_beyond_the_count(built: tuple[FactIndex, ExactIndex, np.ndarray], k: int) -> None:
    index, _, vectors = built
    found = index.search(vectors[0], k)
    assert len({id for id, _ in found}) == len(found) == min(k, FACTS)


@pytest.mark.parametrize("count", [0, 1, 2, 101])
@pytest.mark.parametrize("exact_up_to", [0, 20_000])
def test_few_facts_are_found_whatever_the_threshold(count: int, exact_up_to: int) -> None:
    index, exact = FactIndex(DIM, exact_up_to, HnswGraph), ExactIndex(DIM)
    if count:
        for one in (index, exact):
            one.add(ids(count), uniform(count))
    index.settled()
    for k in (0, 1, 10, 200):
        assert index.search(np.ones(DIM), k) == exact.search(np.ones(DIM), k)


def test_what_is_added_later_is_found_at_once_and_what_is_deleted_is_not() -> None:
    vectors = clustered(4_000)
    index, exact = FactIndex(DIM, 1_000, HnswGraph), ExactIndex(DIM)
    for one in (index, exact):
        one.add(ids(3_000), vectors[:3_000])
    index.settled()
    assert index.uses_graph()
    for at in range(3_000, 4_000, 50):
        for one in (index, exact):
            one.add(ids(50, at), vectors[at : at + 50])
            assert one.remove(FactId(f"f{at - 2_900}"))
        assert index.search(vectors[at], 1)[0][0] == f"f{at}"
        assert f"f{at - 2_900}" not in {id for id, _ in index.search(vectors[at - 2_900], 10)}
    index.settled()
    assert index.uses_graph()
    assert len(index) == len(exact)
    assert recall(index, exact, vectors) >= 0.99


def test_a_fact_with_a_new_vector_is_found_there_and_no_longer_where_it_was() -> None:
    vectors = clustered(3_000)
    index = FactIndex(DIM, 1_000, HnswGraph)
    index.add(ids(3_000), vectors)
    index.settled()
    index.add([FactId("f0")], -vectors[:1])
    for _ in range(2):
        assert index.search(-vectors[0], 1)[0] == (FactId("f0"), pytest.approx(1.0))
        assert "f0" not in {id for id, _ in index.search(vectors[0], 10)}
        index.settled()


def test_most_facts_deleted_the_graph_goes_and_the_rest_is_found() -> None:
    vectors = clustered(3_000)
    index = FactIndex(DIM, 1_000, HnswGraph)
    index.add(ids(3_000), vectors)
    index.settled()
    for id in ids(2_900):
        assert index.remove(id)
    index.settled()
    assert not index.uses_graph()
    assert index.search(vectors[2_950], 1)[0][0] == "f2950"


async def test_building_does_not_hold_the_event_loop_up() -> None:
    started, go_on = threading.Event(), threading.Event()

    class Slow(HnswGraph):
        def add(self, keys, vectors) -> None:
            started.set()
            assert go_on.wait(30)
            super().add(keys, vectors)

    index = FactIndex(DIM, 100, Slow)
    index.add(ids(200), uniform(200))
    assert await asyncio.to_thread(started.wait, 30)
    began = time.monotonic()
    assert len(index.search(np.ones(DIM), 10)) == 10
    index.add(ids(1, 500), np.ones((1, DIM)))
    assert index.search(np.ones(DIM), 1)[0][0] == "f500"
    assert time.monotonic() - began < 10, "it waited for the graph, which waits for us"
    go_on.set()
    index.settled()
    assert index.search(np.ones(DIM), 1)[0][0] == "f500"


steps = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.none() | st.integers(0, 3), st.booleans()), max_size=40)


@given(steps)
@settings(max_examples=30)
def test_after_any_adds_and_removals_it_holds_what_the_exact_one_holds(steps) -> None:
    directions = np.random.default_rng(2).normal(size=(4, 8))
    index, exact = FactIndex(8, 3, HnswGraph), ExactIndex(8)
    for id, direction, settle in steps:
        for one in (index, exact):
            if direction is None:
                one.remove(FactId(id))
            else:
                one.add([FactId(id)], [directions[direction]])
        if settle:
            index.settled()
        assert index.search(directions[0], 8) == exact.search(directions[0], 8)


@pytest.mark.gpu
@pytest.mark.skipif(not has_cuvs(), reason="needs cuVS and a CUDA device")
@pytest.mark.parametrize("count", [1, 2, 101, 5_000, 100_000])
def test_on_a_gpu_the_ten_nearest_are_found(count: int) -> None:
    vectors = clustered(count)
    index, exact = FactIndex(DIM, 0, open_graph), ExactIndex(DIM)
    for one in (index, exact):
        one.add(ids(count), vectors)
    index.settled()
    assert recall(index, exact, vectors, min(10, count)) >= 0.99
