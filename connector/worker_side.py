"""The connector's half in each worker process: it captures what a forward pass caches, and writes chunks into a cache.

Both go through one method of the attention backend (`cache_update.py`). We hear of every update, during warm-up and
for every request, and act only on slots that the step's metadata names.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index

from connector.cache_update import CacheUpdate, TakeRows
from connector.chunk import Chunk, ChunkId, KVShape
from connector.compose import Composition, compose
from connector.metadata import Capture, Load, StepMetadata, StepReport
from connector.paged import fastest
from connector.probe import Refused, read_rotations, read_updates
from connector.reason import Reason
from connector.rotation import RotateKeys, Rotation, rotate_keys
from connector.store import ChunkStore
from connector.tier_jobs import TierJobs

logger = init_logger(__name__)


class ChunkMissing(Exception):
    """A load names a chunk that is not here, or not of the length it was said to have."""


class WorkerSide:
    """`layers` maps a layer's name to its `Attention` module; the caches are known once `register` was called."""

    def __init__(self, budget_bytes: int, host_budget_bytes: int = 0) -> None:
        self.budget_bytes = budget_bytes
        self.host_budget_bytes = host_budget_bytes
        self.refusal: str | None = None
        self.store: ChunkStore | None = None  # what is composed from
        self.host: ChunkStore | None = None
        self.tiers: TierJobs | None = None
        self.rotations: list[Rotation] = []  # of each layer, once proved
        self.counters = {"loads": 0, "injected_tokens": 0, "failed_loads": 0, "captured_tokens": 0}
        self._rotate: RotateKeys = rotate_keys
        self._compose: Composition = self._compose_by_update
        self._names: list[str] = []
        self._caches: list[torch.Tensor] = []  # of each layer
        self._updates: list[CacheUpdate] = []  # of each layer
        self._captures: Sequence[Capture] = ()
        self._rows: list[tuple[Capture, torch.Tensor, torch.Tensor, torch.Tensor]] | None = None
        self._layers_seen: set[int] = set()  # in this step
        self._no_room: set[ChunkId] = set()  # captures that are not settled yet
        self._failed_blocks: set[int] = set()
        self._report = StepReport()

    # -- start-up ---------------------------------------------------------------------------------------------------

    def register(
        self, layers: dict[str, Any], caches: dict[str, torch.Tensor], architectures: list[str], rank: int = 0
    ) -> None:
        """Learns the caches and watches their updates. A model that is refused stays servable as text."""
        if self.refusal is not None:
            return
        self._names = sorted(layers, key=extract_layer_index)
        try:
            self._updates = read_updates({name: layers[name] for name in self._names}, caches, architectures)
        except Refused as refused:
            self.refusal = str(refused)
            return
        self._caches = [caches[name] for name in self._names]
        first = self._updates[0]
        layout = (first.kv_heads, first.head_dim, first.dtype, first.parts, first.rotated_from)
        shape, device = KVShape(len(layers), *layout), self._caches[0].device
        self.store = ChunkStore(shape, device, self.budget_bytes)
        self.host = ChunkStore(shape, torch.device("cpu"), self.host_budget_bytes, pinned=device.type == "cuda")
        self.tiers = TierJobs(self.store, self.host, rank)
        for index, update in enumerate(self._updates):
            update.watch(partial(self._seen, index))

    def prove(self, model: torch.nn.Module, rotate: RotateKeys | None = None) -> None:
        """Reads and proves the rotations; `rotate` replaces the plain one, where it gives the same results."""
        if self.refusal is not None:
            return
        try:
            self.rotations = read_rotations(model, self._names, self._updates[0].rotated_from)
        except Refused as refused:
            self.refusal = str(refused)
            return
        store = self.store
        if rotate is not None and store is not None and all(_same(rotate, r, store) for r in set(self.rotations)):
            self._rotate = rotate
        if store is not None:
            self._compose = fastest(self._compose_by_update, store.shape, self._caches, self.rotations)

    # -- loading ----------------------------------------------------------------------------------------------------

    def load(self, loads: Sequence[Load]) -> None:
        """Writes each load's chunks into its slots; what cannot be loaded is reported and prefilled instead."""
        for load in loads:
            if self.store is None or not self.rotations:
                self._fail(load, Reason.MODEL_REFUSED)
                continue
            try:
                tokens = self._load(load, self.store)
            except ChunkMissing as missing:
                logger.info("Memory is prefilled as text: %s", missing)
                self._fail(load, Reason.MISSING_CHUNK)
            except Exception:
                logger.exception("loading chunks failed")
                self._fail(load, Reason.LOAD_FAILED)
            else:
                self.counters["loads"] += 1
                self.counters["injected_tokens"] += tokens

    def _load(self, load: Load, store: ChunkStore) -> int:
        chunks: list[Chunk] = []
        for id_, tokens in load.chunks:
            chunk = store.get(id_)
            if chunk is None or chunk.tokens != tokens:
                raise ChunkMissing(f"chunk {id_} of {tokens} tokens is not on this worker")
            chunks.append(chunk)
        slots = torch.tensor(load.slots, dtype=torch.int64).to(store.device, non_blocking=True)
        self._compose(chunks, slots, load.skip)
        return len(load.slots)

    def _compose_by_update(self, chunks: Sequence[Chunk], slots: torch.Tensor, skip: int) -> None:
        """The composition that any backend can be written by."""

        def write(layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
            self._updates[layer].write(keys, values, slots)

        compose(chunks, self.rotations, write, skip=skip, stop=skip + len(slots), rotate=self._rotate)

    def _fail(self, load: Load, reason: Reason) -> None:
        self.counters["failed_loads"] += 1
        self._failed_blocks.update(load.blocks)
        self._report.failed[load.request_id] = reason
        self._report.blocks.update(load.blocks)

    def take_failed_blocks(self) -> set[int]:
        """Blocks whose content is not what the scheduler believes, since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_report(self) -> StepReport | None:
        """What the scheduler side must hear of this step, or None."""
        report, self._report = self._report, StepReport()
        return report if report.failed else None

    # -- capturing --------------------------------------------------------------------------------------------------

    def begin(self, step: StepMetadata) -> None:
        """Before the forward pass."""
        self._captures, self._rows = step.captures, None
        self._layers_seen.clear()

    def end(self) -> None:
        """After the forward pass: tokens that every layer has written are there.

        Where a layer's update was not heard of (a graph that was replayed as a whole calls no Python), nothing came:
        the chunk stays incomplete, and is encoded once more or not at all.
        """
        if self._rows is not None and self.store is not None and len(self._layers_seen) == len(self._updates):
            for capture, _, came, _ in self._rows:
                self.store.arrived(capture.id, came)
                self.counters["captured_tokens"] += len(came)
        self._captures, self._rows = (), None

    def _seen(self, layer: int, slot_mapping: torch.Tensor, take: TakeRows) -> None:
        """A layer's cache was updated."""
        if not self._captures:
            return
        if self._rows is None:
            self._rows = self._find_rows(slot_mapping)
        self._layers_seen.add(layer)
        for _, kv, at, rows in self._rows:
            kv[layer][:, at] = take(rows)

    def _find_rows(self, slot_mapping: torch.Tensor) -> list[tuple[Capture, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """For each capture: its room, which of the chunk's tokens come now, and in which rows of this batch.

        One search for all layers: full-attention layers of one cache group share their slots.
        """
        assert self.store is not None
        ordered, order = slot_mapping.to(torch.int64).sort()
        found = []
        for capture in self._captures:
            kv = self.store.arriving(capture.id, capture.tokens, capture.position)
            if kv is None:
                self._no_room.add(capture.id)  # or it is complete already
                continue
            slots = torch.tensor(capture.slots, dtype=torch.int64, device=slot_mapping.device)
            place = torch.searchsorted(ordered, slots).clamp(max=len(ordered) - 1)
            here = ordered[place] == slots
            at = torch.arange(len(slots), device=slots.device)[here] + capture.offset
            found.append((capture, kv, at, order[place[here]]))
        return found

    # -- answers to the shard's process (through `worker_extension.py`) ----------------------------------------------

    def settle(self, ids: Sequence[ChunkId]) -> tuple[list[ChunkId], list[ChunkId]]:
        """Which of these captures are complete, and which had no room; all but the first are forgotten."""
        complete = self.store.settle(ids) if self.store is not None else set()
        no_room = self._no_room.intersection(ids) - complete
        self._no_room.difference_update(ids)
        return sorted(complete), sorted(no_room)

    def check_integrity(self) -> None:
        """Between steps. Raises AssertionError where something of a step is left, or the store's books are wrong."""
        assert not self._captures, "captures of a step that ended"
        assert not self._failed_blocks, "a failure that the scheduler was not told"
        assert not self._report.failed, "a failure that nobody was told"
        for store in (self.store, self.host):
            if store is not None:
                store.check_integrity()

    def drop(self, ids: Sequence[ChunkId]) -> None:
        """Forgets chunks in memory, whichever tier of it holds them."""
        for store in (self.store, self.host):
            if store is not None:
                store.drop(ids)


def _same(rotate: RotateKeys, rotation: Rotation, store: ChunkStore) -> bool:
    """Whether a faster rotation gives what the plain one does where the chunks are, but for one rounding."""
    shape = store.shape
    width = shape.head_dim - rotation.first
    if rotation.rotary_dim > width:
        return False
    keys = torch.randn(33, shape.kv_heads, width, generator=torch.Generator().manual_seed(0))
    fast = keys.to(store.device, shape.dtype)
    plain = fast.clone()
    table = rotation.table(torch.arange(33) * 57 - 900).to(store.device)
    try:
        rotate(fast, table, rotation.neox)
    except RuntimeError as unfit:
        logger.info("Keys are rotated in plain torch: %s", unfit)
        return False
    rotate_keys(plain, table, rotation.neox)
    return bool(torch.allclose(fast.float(), plain.float(), rtol=float(torch.finfo(shape.dtype).eps), atol=1e-5))
