"""The worker's half: captures found by slot whatever else is in the batch, loads that fail alone and say why."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy_model import ARCHITECTURES, HEAD_DIM, HEADS, LAYERS, SLOTS, ToyModel, model_around

from connector.chunk import ChunkId, chunk_id
from connector.metadata import Capture, Load, StepMetadata, transfer_params
from connector.metadata import CaptureRange as Range
from connector.moves import DEVICE, HOST, Move, Outcome
from connector.reason import Reason
from connector.rotation import rotate_keys
from connector.scheduler_side import Scheduled, SchedulerSide
from connector.worker_side import WorkerSide

A, B, C = (chunk_id("model", "alice", (), (n,)) for n in range(3))
TOKEN_BYTES = LAYERS * 2 * HEADS * HEAD_DIM * 4


def some_kv(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, LAYERS, 2, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(seed))


def one_step(model: ToyModel, captures: list[Capture], kv: torch.Tensor, slots: list[int]) -> None:
    model.worker.begin(StepMetadata(captures=captures))
    model.forward(kv, slots)
    model.worker.end()


def captured(model: ToyModel, id_: ChunkId, kv: torch.Tensor, position: int = 0) -> None:
    """Makes `kv` a chunk of this worker."""
    slots = list(range(len(kv)))
    one_step(model, [Capture(id_, position, len(kv), 0, tuple(slots))], kv, slots)
    assert model.worker.settle([id_])[0] == [id_]


def held(model: ToyModel, id_: ChunkId) -> torch.Tensor:
    assert model.worker.store is not None
    chunk = model.worker.store.get(id_)
    assert chunk is not None
    return chunk.kv.permute(2, 0, 1, 3, 4)  # tokens first, as `some_kv` makes them


@pytest.fixture
def model() -> Iterator[ToyModel]:
    model = ToyModel()
    yield model
    model.worker.take_failed_blocks()
    model.worker.take_report()
    model.worker.check_integrity()


# -- capturing --------------------------------------------------------------------------------------------------------


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Range], list[tuple[int, int]], list[int], int]:
    """A prompt's captures, its split into steps, its blocks of four slots, and a seed for what else is computed."""
    prompt = draw(st.integers(1, 20))
    starts = draw(st.lists(st.integers(0, prompt - 1), min_size=1, max_size=3))
    ranges = [Range(id_, s, draw(st.integers(1, prompt - s))) for id_, s in zip((A, B, C), starts, strict=False)]
    cuts = sorted(draw(st.sets(st.integers(1, prompt), max_size=4)) - {prompt})
    blocks = draw(st.permutations(range(8)))[: -(-prompt // 4)]
    return ranges, list(pairwise([0, *cuts, prompt])), list(blocks), draw(st.integers(0, 2**31))


@given(batches())
def test_a_chunk_is_what_was_cached_for_its_tokens_over_all_steps_amid_other_requests_and_padding(
    batch: tuple[list[Range], list[tuple[int, int]], list[int], int],
) -> None:
    ranges, steps, blocks, seed = batch
    prompt = steps[-1][1]
    model = ToyModel()
    scheduler = SchedulerSide(4)
    scheduler.arrived("r", transfer_params(capture=ranges), prompt)
    kv = some_kv(prompt, seed)
    generator = torch.Generator().manual_seed(seed)
    for start, end in steps:
        ours = [blocks[position // 4] * 4 + position % 4 for position in range(start, end)]
        slots = torch.tensor([*ours, *range(40, 46), -1, -1, -1])  # others' slots, and padding
        rows = torch.cat([kv[start:end], some_kv(9, seed + end)])
        order = torch.randperm(len(slots), generator=generator)
        meta = scheduler.step([Scheduled("r", start, end - start, blocks)])
        one_step(model, meta.captures, rows[order], slots[order].tolist())
    assert model.worker.settle([A, B, C])[0] == sorted(range_.id for range_ in ranges)
    for range_ in ranges:
        assert torch.equal(held(model, range_.id), kv[range_.start : range_.start + range_.tokens])


def test_a_wrapped_update_still_writes_the_cache(model: ToyModel) -> None:
    kv = some_kv(3)
    one_step(model, [Capture(A, 0, 3, 0, (9, 5, 7))], kv, [9, 5, 7])
    assert torch.equal(model.read([9, 5, 7]), kv)


def test_a_forward_pass_that_nobody_wants_captured_leaves_nothing_behind(model: ToyModel) -> None:
    model.forward(some_kv(4), [0, 1, 2, 3])  # warm-up, before any metadata
    one_step(model, [], some_kv(4), [0, 1, 2, 3])
    model.forward(some_kv(4), [0, 1, 2, 3])  # after the step
    assert model.worker.settle([A])[0] == []
    assert model.worker.counters["captured_tokens"] == 0


def test_a_step_in_which_none_of_a_captures_slots_come_captures_nothing(model: ToyModel) -> None:
    one_step(model, [Capture(A, 0, 2, 0, (5, 6))], some_kv(3), [-1, -1, 40])
    assert model.worker.settle([A])[0] == []


def test_several_requests_of_one_step_are_captured_apart(model: ToyModel) -> None:
    kv = some_kv(5)
    captures = [Capture(A, 0, 2, 0, (20, 21)), Capture(B, 7, 3, 0, (3, 4, 5))]
    one_step(model, captures, kv, [4, 20, 3, 21, 5])
    assert torch.equal(held(model, A), kv[[1, 3]])
    assert torch.equal(held(model, B), kv[[2, 0, 4]])


def test_two_requests_of_one_step_that_capture_the_same_chunk_do_no_harm(model: ToyModel) -> None:
    kv = some_kv(2)
    one_step(model, [Capture(A, 0, 2, 0, (0, 1)), Capture(A, 0, 2, 0, (8, 9))], torch.cat([kv, kv]), [0, 1, 8, 9])
    assert torch.equal(held(model, A), kv)


def test_a_capture_that_stays_incomplete_is_forgotten_when_it_is_settled(model: ToyModel) -> None:
    one_step(model, [Capture(A, 0, 4, 0, (0, 1))], some_kv(2), [0, 1])
    assert model.worker.store is not None
    assert model.worker.store.bytes == 4 * TOKEN_BYTES
    assert model.worker.settle([A])[0] == []
    assert model.worker.store.bytes == 0


def test_a_chunk_dropped_between_two_steps_of_its_capture_does_not_come_to_be(model: ToyModel) -> None:
    one_step(model, [Capture(A, 0, 3, 0, (0, 1))], some_kv(2), [0, 1])
    model.worker.drop([A])
    one_step(model, [Capture(A, 0, 3, 2, (2,))], some_kv(1), [2])
    assert model.worker.settle([A])[0] == []


def test_what_the_budget_has_no_room_for_is_not_captured_and_the_step_goes_on() -> None:
    model = ToyModel(budget_bytes=3 * TOKEN_BYTES)
    kv = some_kv(5)
    one_step(model, [Capture(A, 0, 3, 0, (0, 1, 2)), Capture(B, 3, 2, 0, (3, 4))], kv, [0, 1, 2, 3, 4])
    assert model.worker.settle([A, B]) == ([A], [B])
    assert model.worker.settle([A, B]) == ([A], []), "told once"
    assert torch.equal(model.read(range(5)), kv)


def test_a_step_in_which_a_layers_update_was_not_heard_of_captures_nothing(model: ToyModel) -> None:
    """As where a graph is replayed as a whole: no Python runs then."""
    kv, layers = some_kv(2), dict(model.layers)
    model.worker.begin(StepMetadata(captures=[Capture(A, 0, 2, 0, (0, 1))]))
    name = next(iter(layers))
    del model.layers[name]
    model.forward(kv[:, :-1], [0, 1])
    model.worker.end()
    model.layers = layers
    assert model.worker.settle([A]) == ([], []), "it had room, and may be tried again"
    one_step(model, [Capture(A, 0, 2, 0, (0, 1))], kv, [0, 1])
    assert torch.equal(held(model, A), kv)


def test_a_chunk_that_is_here_already_is_not_captured_again(model: ToyModel) -> None:
    captured(model, A, first := some_kv(2, seed=1))
    captured(model, A, some_kv(2, seed=2))
    assert torch.equal(held(model, A), first)


# -- loading ----------------------------------------------------------------------------------------------------------


def test_chunks_are_written_into_their_slots_and_nowhere_else(model: ToyModel) -> None:
    captured(model, A, a := some_kv(2, seed=1), position=0)
    captured(model, B, b := some_kv(3, seed=2), position=2)  # where they are served: nothing is rotated
    for cache in model.caches.values():
        cache.zero_()
    slots = (33, 12, 13, 40, 7)
    model.worker.load([Load("r", ((A, 2), (B, 3)), 0, slots, (8, 3, 10, 1))])
    assert torch.equal(model.read(slots), torch.cat([a, b]))
    others = [slot for slot in range(SLOTS) if slot not in slots]
    assert not model.read(others).any()
    assert model.worker.take_failed_blocks() == set()
    assert model.worker.take_report() is None
    assert model.worker.counters["injected_tokens"] == 5


@pytest.mark.parametrize("places", [("host",), ("file",), ("host", "file")])
def test_a_chunk_that_went_through_other_tiers_is_written_as_if_it_never_left(
    model: ToyModel, tmp_path: Path, places: tuple[str, ...]
) -> None:
    kv = some_kv(5)
    captured(model, A, kv, 7)
    model.worker.load([Load("before", ((A, 5),), 0, (20, 21, 22, 23, 24), (5, 6))])
    here = DEVICE
    for place in [HOST if place == "host" else str(tmp_path) for place in places]:
        moved(model, here, place)
        if here in (DEVICE, HOST) and place not in (DEVICE, HOST):
            model.worker.drop([A])
        here = place
    assert model.worker.store is not None
    assert model.worker.store.get(A) is None
    moved(model, here, DEVICE)
    model.worker.load([Load("after", ((A, 5),), 0, (40, 41, 42, 43, 44), (10, 11))])
    assert torch.equal(model.read(range(40, 45)), model.read(range(20, 25)))
    assert model.worker.take_report() is None
    model.worker.check_integrity()


def moved(model: ToyModel, source: str, target: str) -> None:
    tiers = model.worker.tiers
    assert tiers is not None
    tiers.begin(f"{source}-{target}", Move(source, target, "model", "alice", ((A, 5),)))
    assert tiers.poll(f"{source}-{target}", 10.0) == {A: Outcome.DONE}


def test_a_load_behind_a_prefix_hit_writes_only_what_follows_it(model: ToyModel) -> None:
    captured(model, A, a := some_kv(4, seed=1))
    captured(model, B, b := some_kv(3, seed=2), position=4)
    model.worker.load([Load("r", ((A, 4), (B, 3)), 3, (50, 51, 52), (12, 13))])
    assert torch.equal(model.read((50, 51, 52)), torch.cat([a[3:], b[:2]]))


def test_a_chunk_served_elsewhere_has_the_keys_that_the_model_would_have_cached_there(model: ToyModel) -> None:
    """The module forms its angles in float32, and the frequencies are read from such a table: at 216 both together are
    off by at most 216 * 2 * 2^-23 = 5e-5 radians, which moves a pair of keys of length 4 by 2e-4."""
    raw = some_kv(6)

    def cached_at(start: int) -> torch.Tensor:
        kv = raw.clone()
        positions = torch.arange(start, start + 6)
        for layer in range(LAYERS):
            keys = raw[:, layer, 0].reshape(6, -1).contiguous()
            kv[:, layer, 0] = model.rotary.forward_native(positions, keys, keys.clone())[1].view(6, HEADS, HEAD_DIM)
        return kv

    captured(model, A, head := some_kv(3, seed=5))
    captured(model, B, cached_at(211), position=211)
    model.worker.load([Load("r", ((A, 3), (B, 6)), 0, tuple(range(20, 29)), (5, 6, 7))])
    assert torch.equal(model.read(range(20, 23)), head)
    torch.testing.assert_close(model.read(range(23, 29)), cached_at(3), rtol=0, atol=2e-4)


def test_a_load_of_a_chunk_that_is_not_here_writes_nothing_and_names_its_blocks_and_the_reason(model: ToyModel) -> None:
    captured(model, A, some_kv(2))
    for cache in model.caches.values():
        cache.zero_()
    model.worker.load([Load("r", ((A, 2), (B, 3)), 0, tuple(range(20, 25)), (5, 6))])
    assert model.worker.take_failed_blocks() == {5, 6}
    report = model.worker.take_report()
    assert report is not None
    assert report.failed == {"r": Reason.MISSING_CHUNK}
    assert not model.read(range(SLOTS)).any()


def test_a_chunk_of_another_length_than_it_was_said_to_have_is_missing(model: ToyModel) -> None:
    captured(model, A, some_kv(2))
    model.worker.load([Load("r", ((A, 3),), 0, (0, 1, 2), (0,))])
    assert model.worker.take_failed_blocks() == {0}


def test_an_exception_in_one_load_harms_neither_the_one_before_nor_the_next(model: ToyModel) -> None:
    captured(model, A, kv := some_kv(2))
    next(iter(model.layers.values())).impl.broken_slot = 30
    loads = [Load(f"r{slot}", ((A, 2),), 0, (slot, slot + 1), (slot // 10,)) for slot in (20, 30, 40)]
    model.worker.load(loads)
    assert torch.equal(model.read((20, 21, 40, 41)), torch.cat([kv, kv]))
    assert model.worker.take_failed_blocks() == {3}
    report = model.worker.take_report()
    assert report is not None
    assert report.failed == {"r30": Reason.LOAD_FAILED}


def test_failures_are_told_once(model: ToyModel) -> None:
    model.worker.load([Load("r", ((A, 1),), 0, (0,), (0,))])
    assert model.worker.take_failed_blocks() == {0}
    assert model.worker.take_failed_blocks() == set()
    assert model.worker.take_report() is not None
    assert model.worker.take_report() is None
    assert model.worker.counters == {"loads": 0, "injected_tokens": 0, "failed_loads": 1, "captured_tokens": 0}


# -- start-up ---------------------------------------------------------------------------------------------------------


def test_a_refused_model_is_served_as_text_and_every_load_says_so() -> None:
    model = ToyModel()
    worker = WorkerSide(1 << 20)
    worker.register(model.layers, model.caches, ["MambaForCausalLM"])
    worker.prove(model_around(model.layers, model.rotary))
    one_step(model, [Capture(A, 0, 1, 0, (0,))], some_kv(1), [0])
    worker.load([Load("r", ((A, 1),), 0, (0,), (0,))])
    report = worker.take_report()
    assert report is not None
    assert report.failed["r"] == Reason.MODEL_REFUSED
    assert worker.refusal is not None
    assert "MambaForCausalLM" in worker.refusal
    assert worker.take_failed_blocks() == {0}
    assert worker.settle([A])[0] == []
    worker.drop([A])


def test_a_model_whose_positions_cannot_be_moved_is_refused() -> None:
    model = ToyModel()
    worker = WorkerSide(1 << 20)
    worker.register(model.layers, model.caches, ARCHITECTURES)
    worker.prove(model_around(model.layers, torch.nn.Linear(2, 2)))
    assert worker.refusal is not None
    assert "not plainly rotary (Linear)" in worker.refusal


@pytest.mark.parametrize("right", [True, False])
def test_a_faster_rotation_is_used_only_where_its_results_are_the_plain_ones(right: bool) -> None:
    model = ToyModel()
    calls = []

    def faster(keys: torch.Tensor, table: torch.Tensor, neox: bool) -> None:
        calls.append(len(keys))
        rotate_keys(keys, table, neox if right else not neox)

    model.worker.prove(model_around(model.layers, model.rotary), faster)
    captured(model, A, some_kv(2), position=100)
    calls.clear()
    model.worker.load([Load("r", ((A, 2),), 0, (0, 1), (0,))])
    assert calls == ([2] * LAYERS if right else [])
    assert model.worker.take_report() is None


def test_where_a_faster_rotation_has_no_kernel_keys_are_rotated_by_the_plain_one() -> None:
    model = ToyModel()

    def missing(keys: torch.Tensor, table: torch.Tensor, neox: bool) -> None:
        raise NotImplementedError("Could not run '_C::rotary_embedding' with arguments from this backend")

    model.worker.prove(model_around(model.layers, model.rotary), missing)
    captured(model, A, some_kv(2), position=100)
    model.worker.load([Load("r", ((A, 2),), 0, (0, 1), (0,))])
    assert model.worker.refusal is None
    assert model.worker.take_report() is None
