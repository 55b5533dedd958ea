"""A correction leaves stale what was encoded behind the old text; a deletion leaves nothing of what depended on it."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from connector.chunk import ChunkId
from connector.windows import FactChunks, Line
from sharding.ids import FactId

HEAD, OWNER, DIGEST = (1, 2, 3), "alice", "model"
WINDOW = 3


def line(seq: int, version: int = 0) -> Line:
    return Line(FactId(f"f{seq}"), seq, (100 + seq, 200 + version))


class Store:
    """The chunks that were encoded, each with the lines in front of it; and one user's facts."""

    def __init__(self, lines: Sequence[Line], window: int = WINDOW) -> None:
        self.lines = list(lines)
        self.window = window
        self.chunks = FactChunks(OWNER, DIGEST, HEAD, window_facts=window, room_tokens=10_000, keep_stale=True)
        self.prompts: dict[ChunkId, tuple[int, ...]] = {}
        self.change(lines)
        self.encode()

    def resident(self, id_: ChunkId) -> bool:
        return id_ in self.prompts

    def change(self, lines: Sequence[Line]) -> None:
        """As `Residents.changed`: what stands for no fact is gone."""
        self.lines = list(lines)
        self.chunks.update(lines)
        self.chunks.settle(self.resident)
        self.prompts = {id_: prompt for id_, prompt in self.prompts.items() if id_ in self.chunks.standing()}

    def encode(self) -> None:
        for job in self.chunks.jobs(self.resident):
            for range_ in job.captures:
                self.prompts[range_.id] = job.token_ids[: range_.start + range_.tokens]

    def rebuild(self) -> None:
        self.chunks.renew()
        self.encode()
        self.change(self.lines)

    def correct(self, seq: int, version: int = 1) -> None:
        self.change([line(one.seq, version) if one.seq == seq else one for one in self.lines])

    def served(self) -> dict[int, tuple[int, ...] | None]:
        """What was read when the chunk was made that stands for each fact; None: it is text."""
        ids = {one.seq: self.chunks.served(one.fact, self.resident) for one in self.lines}
        return {seq: self.prompts.get(id_) for seq, id_ in ids.items() if id_ is not None}


def test_a_corrected_fact_is_text_and_what_was_encoded_behind_it_is_served_until_the_rebuild() -> None:
    store = Store([line(seq) for seq in range(9)])
    before = store.served()
    store.correct(4)
    store.encode()
    after = store.served()
    assert after.pop(4) is None
    assert after == {seq: prompt for seq, prompt in before.items() if seq != 4}
    assert (len(store.chunks.stale_ids()), store.chunks.stale_facts) == (4, 5), "5 of its block; 6, 7 and 8 of the next"
    assert store.chunks.corrected(FactId("f4"))
    assert not store.chunks.corrected(FactId("f5"))


def test_a_rebuild_prefills_one_prompt_a_window_and_leaves_what_a_full_build_makes() -> None:
    store = Store([line(seq) for seq in range(18)])
    store.correct(7)
    store.chunks.renew()
    assert [len(job.captures) for job in store.chunks.jobs(store.resident)] == [3, 2], (
        "the next block; itself and the fact behind it"
    )
    store.rebuild()
    assert store.prompts == Store(store.lines).prompts
    assert (store.chunks.stale_facts, store.chunks.corrected(FactId("f7"))) == (0, False)


def test_deleting_a_corrected_fact_takes_along_what_was_encoded_behind_its_old_text() -> None:
    store = Store([line(seq) for seq in range(9)])
    store.correct(4)
    store.change([one for one in store.lines if one.seq != 4])
    assert not [prompt for prompt in store.prompts.values() if 104 in prompt]
    assert store.chunks.stale_facts == 0


def test_a_correction_of_the_fact_told_last_is_encoded_at_once() -> None:
    store = Store([line(seq) for seq in range(5)])
    store.correct(4)
    assert store.chunks.stale_facts == 0
    store.encode()
    assert store.served() == Store(store.lines).served()


def test_what_is_prefilled_for_a_new_fact_anyway_is_captured_with_it() -> None:
    store = Store([line(seq) for seq in range(5)])
    store.correct(3)
    assert store.chunks.stale_facts == 2
    store.change([*store.lines, line(5)])
    store.encode()
    store.change(store.lines)
    assert store.chunks.stale_facts == 0
    assert store.prompts == Store(store.lines).prompts


def test_a_stale_chunk_that_every_tier_lost_is_not_waited_for() -> None:
    store = Store([line(seq) for seq in range(6)])
    store.correct(0)
    assert not store.chunks.lacks(store.resident)
    lost = store.chunks.served(FactId("f5"), store.resident)
    assert lost is not None
    del store.prompts[lost]
    assert store.chunks.lacks(store.resident)
    store.encode()
    assert store.served()[5] == Store(store.lines).served()[5]


def test_a_text_that_is_taken_back_leaves_nothing_stale() -> None:
    store = Store([line(seq) for seq in range(6)])
    store.correct(1, 1)
    assert store.chunks.stale_ids()
    store.correct(1, 0)
    assert not store.chunks.stale_ids()
    store.encode()
    assert store.prompts == Store(store.lines).prompts


changes = st.lists(
    st.one_of(
        st.tuples(st.just("correct"), st.integers(0, 11), st.integers(0, 3)),
        st.tuples(st.just("delete"), st.integers(0, 11), st.just(0)),
        st.tuples(st.just("tell"), st.just(0), st.just(0)),
        st.tuples(st.just("encode"), st.just(0), st.just(0)),
        st.tuples(st.just("lose"), st.integers(0, 11), st.just(0)),
        st.tuples(st.just("rebuild"), st.just(0), st.just(0)),
    ),
    max_size=12,
)


@given(st.integers(0, 12), st.integers(0, 4), changes)
def test_whatever_happens_no_deleted_fact_is_in_a_chunk_and_no_old_text_in_its_own(
    told: int, window: int, happening: list[tuple[str, int, int]]
) -> None:
    store = Store([line(seq) for seq in range(told)], window)
    for what, seq, version in happening:
        if what == "correct":
            store.correct(seq, version)
        elif what == "delete":
            store.change([one for one in store.lines if one.seq != seq])
        elif what == "tell":
            told += 1
            store.change([*store.lines, line(told)])
        elif what == "lose":
            store.prompts = dict(list(store.prompts.items())[:seq])
        elif what == "encode":
            store.encode()
        else:
            store.rebuild()
        here = {one.token_ids[0] for one in store.lines}
        assert all(token in here for prompt in store.prompts.values() for token in prompt[3::2])
        for seq_, prompt in store.served().items():
            text = next(one.token_ids for one in store.lines if one.seq == seq_)
            assert prompt is None or prompt[-2:] == text
        assert store.chunks.stale_tokens <= store.chunks.tokens
    store.rebuild()
    assert store.prompts == Store(store.lines, window).prompts, "not what a full build makes"
    assert store.chunks.stale_facts == 0
    assert not store.chunks.lacks(store.resident)
    nothing = store.chunks.jobs(lambda _: False)
    assert store.chunks.full_tokens == sum(len(job.token_ids) for job in nothing)


@given(st.integers(0, 99), st.sampled_from([20, 10, 5]))
def test_one_correction_in_a_hundred_makes_less_than_two_windows_stale(seq: int, window: int) -> None:
    store = Store([line(n) for n in range(100)], window)
    store.correct(seq)
    assert store.chunks.stale_facts <= 2 * window
    assert len(store.chunks.stale_ids()) <= 2 * window - 1
