from dataclasses import replace

import numpy as np
import pytest
from people import ALICE, HERE

from sharding.facts import Fact, text_hash
from sharding.ids import FactId, Placement
from sharding.user_memory import UserMemory

PLACEMENT = Placement(ALICE, HERE, 1)


def vector(*numbers: float) -> bytes:
    return np.array(numbers, np.float32).tobytes()


def fact(seq: int, embedding: bytes | None = None) -> Fact:
    text = f"fact {seq}"
    return Fact(FactId(f"f{seq}"), ALICE, text, text_hash(text), "t", seq, 1, "now", "now", embedding)


def seqs(facts: list[Fact]) -> list[int]:
    return [fact.seq for fact in facts]


@pytest.fixture
def memory():
    memory = UserMemory(PLACEMENT, 2, [fact(seq) for seq in (1, 2, 5, 6)])
    yield memory
    memory.check_integrity()


def test_facts_are_held_in_the_order_of_their_seq_however_they_arrive(memory: UserMemory) -> None:
    memory.add([fact(4), fact(3)])
    assert seqs(memory.facts) == [1, 2, 3, 4, 5, 6]
    assert memory.get(FactId("f3")) == fact(3)
    assert FactId("f3") in memory


def test_a_fact_that_is_held_already_is_passed_over(memory: UserMemory) -> None:
    memory.add([fact(2), fact(2)])
    assert len(memory) == 4


def test_a_search_finds_what_has_an_embedding_nearest_first(memory: UserMemory) -> None:
    memory.put_embeddings({FactId("f1"): vector(0, 1), FactId("f5"): vector(1, 1)})
    memory.add([fact(7, vector(1, 0))])
    assert seqs(memory.search([1, 0], 2)) == [7, 5]
    assert seqs(memory.search([1, 0], 10)) == [7, 5, 1]
    assert seqs(memory.facts_without_embedding()) == [2, 6]


def test_an_embedding_that_cannot_be_used_leaves_its_fact_in_need_of_one(memory: UserMemory) -> None:
    of_another_model, damaged = vector(1, 2, 3), vector(1, float("nan"))
    memory.put_embeddings({FactId("f1"): of_another_model, FactId("f2"): damaged, FactId("gone"): vector(1, 0)})
    assert seqs(memory.facts_without_embedding()) == [1, 2, 5, 6]


def test_an_embedding_that_another_model_of_the_same_size_made_is_not_used() -> None:
    memory = UserMemory(
        PLACEMENT, 2, [fact(1, b"mine" + vector(0, 1)), fact(2, b"else" + vector(0, 1))], embedding_model=b"mine"
    )
    assert seqs(memory.search([0, 1], 5)) == [1]
    assert seqs(memory.facts_without_embedding()) == [2]


def test_a_removed_fact_is_found_no_more(memory: UserMemory) -> None:
    memory.put_embeddings({FactId("f2"): vector(0, 1), FactId("f5"): vector(1, 1)})
    assert memory.remove(FactId("f2"))
    assert not memory.remove(FactId("f2"))
    assert seqs(memory.search([0, 1], 9)) == [5]


def test_a_cleared_memory_is_empty_and_usable(memory: UserMemory) -> None:
    memory.put_embeddings({FactId("f2"): vector(0, 1)})
    memory.clear()
    assert memory.search([0, 1], 9) == []
    memory.add([fact(9, vector(0, 1))])
    assert seqs(memory.search([0, 1], 9)) == [9]


def test_an_empty_memory_can_be_searched() -> None:
    assert UserMemory(PLACEMENT, 2).search([0, 1], 5) == []


def test_an_updated_fact_is_found_by_its_new_vector_in_its_old_place() -> None:
    memory = UserMemory(PLACEMENT, dim=2, facts=[fact(1, vector(1, 0)), fact(2, vector(1, 1))])
    old = memory.facts[0]
    new = replace(old, text="changed", version=2)
    memory.replace(new, vector(0, 1))
    assert [found.id for found in memory.search((0, 1), 2)] == [new.id, memory.facts[1].id]
    assert memory.facts[0] == memory.get(old.id) == new
    memory.check_integrity()


def test_an_expired_fact_is_held_and_not_found() -> None:
    facts = [replace(fact(n, vector(1, n)), expires_on=day) for n, day in enumerate(["2020-01-01", None, "2999-01-01"])]
    memory = UserMemory(PLACEMENT, dim=2, facts=facts)
    assert memory.expired() == {facts[0].id}
    assert [found.seq for found in memory.current()] == [1, 2]
    assert {found.seq for found in memory.search((1, 0), 3)} == {1, 2}
    assert len(memory.search_scored((1, 0), 3, with_expired=True)) == 3
    memory.replace(replace(facts[0], embedding=None, expires_on=None), None)
    assert memory.expired() == set()


def test_a_search_with_a_condition_looks_as_deep_as_it_must() -> None:
    memory = UserMemory(PLACEMENT, dim=2, facts=[fact(n, vector(1000, n)) for n in range(500)])
    found = memory.search_scored((1, 0), 2, lambda one: one.seq >= 490)
    assert [one.seq for one, _ in found] == [490, 491]
