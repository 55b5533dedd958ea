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
