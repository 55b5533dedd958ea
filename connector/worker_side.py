"""The connector's half in each worker process: it captures what a forward pass caches, and writes chunks into a cache.

Both go through one method of the attention backend, `do_kv_cache_update(layer, key, value, kv_cache, slots)`: it knows
the cache's layout, packing and scaling. Wrapped, it shows us the keys (rotated, this rank's heads) and values that an
ordinary prefill computes; called, it writes ours.

The wrapper also runs during warm-up and for every request, so it acts only on slots that the step's metadata names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.models.utils import extract_layer_index

from connector.chunk import Chunk, ChunkId, KVShape
from connector.compose import Composition, compose
from connector.metadata import Capture, Load, StepMetadata, StepReport
from connector.paged import fastest
from connector.probe import Refused, check_attention, read_rotations
from connector.rotation import RotateKeys, Rotation, rotate_keys
from connector.store import ChunkStore

logger = init_logger(__name__)

Update = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


class ChunkMissing(Exception):
    """A load names a chunk that is not here, or not of the length it was said to have."""


class WorkerSide:
    """`layers` maps a layer's name to its `Attention` module; the caches are known once `register` was called."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.refusal: str | None = None
        self.store: ChunkStore | None = None
        self.rotations: list[Rotation] = []  # of each layer, once proved
        self.counters = {"loads": 0, "injected_tokens": 0, "failed_loads": 0, "captured_tokens": 0}
        self._rotate: RotateKeys = rotate_keys
        self._compose: Composition = self._compose_by_update
        self._names: list[str] = []
        self._layers: list[tuple[Any, Update, torch.Tensor]] = []  # module, its unwrapped update, its cache
        self._captures: Sequence[Capture] = ()
        self._rows: list[tuple[Capture, torch.Tensor, torch.Tensor, torch.Tensor]] | None = None
        self._failed_blocks: set[int] = set()
        self._report = StepReport()

    # -- start-up ---------------------------------------------------------------------------------------------------

    def register(self, layers: dict[str, Any], caches: dict[str, torch.Tensor], architectures: list[str]) -> None:
        """Learns the caches and wraps the updates. A model that is refused stays servable as text."""
        if self.refusal is not None:
            return
        try:
            check_attention(layers, architectures)
        except Refused as refused:
            self.refusal = str(refused)
            return
        self._names = names = sorted(layers, key=extract_layer_index)
        first = layers[names[0]]
        device = caches[names[0]].device
        shape = KVShape(len(names), int(first.num_kv_heads), int(first.head_size), first.dtype)
        self.store = ChunkStore(shape, device, self.budget_bytes)
        for index, name in enumerate(names):
            module = layers[name]
            update = module.impl.do_kv_cache_update
            self._layers.append((module, update, caches[name]))
            module.impl.do_kv_cache_update = self._wrapped(index, update)

    def prove(self, model: torch.nn.Module, rotate: RotateKeys | None = None) -> None:
        """Reads and proves the rotations; `rotate` replaces the plain one, where it gives the same float32 results."""
        if self.refusal is not None:
            return
        try:
            self.rotations = read_rotations(model, self._names)
        except Refused as refused:
            self.refusal = str(refused)
            return
        store = self.store
        if rotate is not None and store is not None and all(_same(rotate, r, store) for r in set(self.rotations)):
            self._rotate = rotate
        if store is not None:
            caches = [cache for _, _, cache in self._layers]
            self._compose = fastest(self._compose_by_update, store.shape, caches, self.rotations)

    # -- loading ----------------------------------------------------------------------------------------------------

    def load(self, loads: Sequence[Load]) -> None:
        """Writes each load's chunks into its slots; what cannot be loaded is reported and prefilled instead."""
        for load in loads:
            try:
                tokens = self._load(load)
            except ChunkMissing as missing:
                self._fail(load, str(missing))
            except Exception as error:
                logger.exception("loading chunks failed")
                self._fail(load, type(error).__name__)
            else:
                self.counters["loads"] += 1
                self.counters["injected_tokens"] += tokens

    def _load(self, load: Load) -> int:
        if self.store is None or not self.rotations:
            raise ChunkMissing(self.refusal or "no chunk store yet")
        chunks: list[Chunk] = []
        for id_, tokens in load.chunks:
            chunk = self.store.get(id_)
            if chunk is None or chunk.tokens != tokens:
                raise ChunkMissing("a chunk is not on this worker")
            chunks.append(chunk)
        slots = torch.tensor(load.slots, dtype=torch.int64).to(self.store.device, non_blocking=True)
        self._compose(chunks, slots, load.skip)
        return len(load.slots)

    def _compose_by_update(self, chunks: Sequence[Chunk], slots: torch.Tensor, skip: int) -> None:
        """The composition that any backend can be written by."""

        def write(layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
            module, update, cache = self._layers[layer]
            update(module, keys, values, cache, slots)

        compose(chunks, self.rotations, write, skip=skip, stop=skip + len(slots), rotate=self._rotate)

    def _fail(self, load: Load, reason: str) -> None:
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

    def end(self) -> None:
        """After the forward pass: tokens that every layer has written are there."""
        if self._rows is not None and self.store is not None:
            for capture, _, came, _ in self._rows:
                self.store.arrived(capture.id, came)
                self.counters["captured_tokens"] += len(came)
        self._captures, self._rows = (), None

    def _wrapped(self, index: int, update: Update) -> Update:
        def do_kv_cache_update(
            layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
        ) -> None:
            update(layer, key, value, kv_cache, slot_mapping)
            if self._captures:
                self._capture(index, key, value, slot_mapping)

        return do_kv_cache_update

    def _capture(self, index: int, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        if self._rows is None:
            self._rows = self._find_rows(slot_mapping)
        for _, kv, at, rows in self._rows:
            kv[index, 0, at] = key[rows]
            kv[index, 1, at] = value[rows]

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
                continue
            slots = torch.tensor(capture.slots, dtype=torch.int64, device=slot_mapping.device)
            place = torch.searchsorted(ordered, slots).clamp(max=len(ordered) - 1)
            here = ordered[place] == slots
            at = torch.arange(len(slots), device=slots.device)[here] + capture.offset
            found.append((capture, kv, at, order[place[here]]))
        return found

    # -- answers to the shard's process (through `worker_extension.py`) ----------------------------------------------

    def settle(self, ids: Sequence[ChunkId]) -> list[ChunkId]:
        """Which of these captures are complete; the others are forgotten."""
        return sorted(self.store.settle(ids)) if self.store is not None else []

    def drop(self, ids: Sequence[ChunkId]) -> None:
        if self.store is not None:
            self.store.drop(ids)


def _same(rotate: RotateKeys, rotation: Rotation, store: ChunkStore) -> bool:
    """Whether a faster rotation gives the plain one's float32 results where the chunks are, but for the last bits."""
    shape = store.shape
    if rotation.rotary_dim > shape.head_dim:
        return False
    keys = torch.randn(33, shape.kv_heads, shape.head_dim, generator=torch.Generator().manual_seed(0)).to(store.device)
    table = rotation.table(torch.arange(33) * 57 - 900).to(store.device)
    fast, plain = keys.clone(), keys.clone()
    try:
        rotate(fast, table, rotation.neox)
    except RuntimeError:  # a build of vLLM may have no kernel for this device or dtype
        logger.warning("vLLM's rotary kernel cannot be used; keys are rotated in plain torch", exc_info=True)
        return False
    rotate_keys(plain, table, rotation.neox)
    return bool(torch.allclose(fast, plain, rtol=0, atol=1e-5))
