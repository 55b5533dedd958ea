"""The worker's chunk store: bytes counted exactly, a budget never exceeded, no chunk seen before it is whole."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from connector.chunk import ChunkId, KVShape
from connector.store import ChunkStore

SHAPE = KVShape(layers=2, kv_heads=1, head_dim=2, dtype=torch.bfloat16)
BUDGET = 10 * SHAPE.token_bytes
IDS = [ChunkId(name) for name in "abcde"]
LENGTHS = dict(zip(IDS, (1, 2, 3, 4, 5), strict=True))  # an id stands for its tokens, and so for their number

ids = st.sampled_from(IDS)


def a_store() -> ChunkStore:
    return ChunkStore(SHAPE, torch.device("cpu"), BUDGET)


class StoreMachine(RuleBasedStateMachine):
    """Beside the store, a model of it: which tokens of which chunk came."""

    def __init__(self) -> None:
        super().__init__()
        self.store = a_store()
        self.came: dict[ChunkId, set[int]] = {}

    def _whole(self, id_: ChunkId) -> bool:
        return len(self.came.get(id_, ())) == LENGTHS[id_]

    def _bytes(self) -> int:
        return sum(LENGTHS[id_] for id_ in self.came) * SHAPE.token_bytes

    @rule(id_=ids, position=st.integers(0, 99), data=st.data())
    def capture(self, id_: ChunkId, position: int, data: st.DataObject) -> None:
        room = self.store.arriving(id_, LENGTHS[id_], position)
        fits = self._bytes() + LENGTHS[id_] * SHAPE.token_bytes <= BUDGET
        assert (room is not None) == (not self._whole(id_) and (id_ in self.came or fits))
        if room is None:
            return
        assert room.shape == (2, 2, LENGTHS[id_], 1, 2)
        assert room.is_contiguous()
        rows = data.draw(st.sets(st.integers(0, LENGTHS[id_] - 1)))
        at = torch.tensor(sorted(rows), dtype=torch.int64)
        room[:, :, at] = at.to(torch.bfloat16)[:, None, None]
        self.store.arrived(id_, at)
        self.came.setdefault(id_, set()).update(rows)

    @rule(some=st.lists(ids, max_size=3))
    def settle(self, some: list[ChunkId]) -> None:
        assert self.store.settle(some) == {id_ for id_ in some if self._whole(id_)}
        for id_ in some:
            if not self._whole(id_):
                self.came.pop(id_, None)

    @rule(some=st.lists(ids, max_size=3))
    def drop(self, some: list[ChunkId]) -> None:
        self.store.drop(some)
        for id_ in some:
            self.came.pop(id_, None)

    @invariant()
    def bytes_add_up_and_stay_within_the_budget(self) -> None:
        self.store.check_integrity()
        assert self.store.bytes == self._bytes() <= BUDGET

    @invariant()
    def only_whole_chunks_are_seen(self) -> None:
        whole = [id_ for id_ in IDS if self._whole(id_)]
        assert [id_ for id_ in IDS if self.store.get(id_) is not None] == whole
        assert len(self.store) == len(whole)
        for id_ in whole:
            chunk = self.store.get(id_)
            assert chunk is not None
            assert chunk.kv[0, 0, :, 0, 0].tolist() == list(range(LENGTHS[id_]))


StoreMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=25)
TestStoreMachine = StoreMachine.TestCase


def test_a_chunk_keeps_the_position_that_its_capture_began_with() -> None:
    store = a_store()
    store.arriving(IDS[1], 2, 40)
    store.arrived(IDS[1], torch.tensor([1]))
    store.arriving(IDS[1], 2, 40)
    store.arrived(IDS[1], torch.tensor([0]))
    chunk = store.get(IDS[1])
    assert chunk is not None
    assert chunk.position == 40


def test_a_budget_of_exactly_the_chunk_is_enough_and_one_byte_less_is_not() -> None:
    for spare, fits in ((0, True), (-1, False)):
        store = ChunkStore(SHAPE, torch.device("cpu"), 3 * SHAPE.token_bytes + spare)
        assert (store.arriving(IDS[2], 3, 0) is not None) == fits
        store.check_integrity()


def test_tokens_that_arrive_for_a_chunk_that_is_whole_or_was_dropped_change_nothing() -> None:
    """Two requests of one step may capture the same chunk; raising in the forward pass would end the engine."""
    store = a_store()
    for _ in range(2):
        store.arriving(IDS[0], 1, 0)
    store.arrived(IDS[0], torch.tensor([0]))
    store.arrived(IDS[0], torch.tensor([0]))
    store.arriving(IDS[1], 2, 0)
    store.drop([IDS[1]])
    store.arrived(IDS[1], torch.tensor([0]))
    assert len(store) == 1
    store.check_integrity()
