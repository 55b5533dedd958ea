"""What composing a memory costs, against what a copy of the same bytes costs: 1,250 tokens in 50 chunks.

    copy        the same bytes from one place to another, contiguous on both sides: the floor
    write       the backend's own cache update alone, of keys and values that lie ready
    portable    gather, rotate, write through that update: what every backend is served by
    fused       one kernel for all of it, where the start-up proof of a worker accepts it

Rounds interleave the arms; each round composes other chunks, in another order, into other blocks than the ones before
it, so that little is found in a cache. Where vLLM is installed the CPU's cache is written by vLLM's own update, packed
for its attention kernels; elsewhere by plain indexing. On a CUDA device `time` is what the device took (its clock
starts behind work that hides the launch) and `wall` what a caller waits for. Runs where vLLM is not installed.

The path `--device cuda` has never run: no machine at hand had a GPU.
"""

from __future__ import annotations

import importlib.util
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.table import Table

from benchmarks.results import Row, Spread
from connector.chunk import Chunk, ChunkId, KVShape
from connector.compose import Composition, WriteLayer, compose
from connector.paged import fastest, paged_views
from connector.rotation import RotateKeys, Rotation, rotate_keys
from sharding.errors import MemshardError

CHUNKS, CHUNK_TOKENS = 50, 25
TOKENS = CHUNKS * CHUNK_TOKENS
BLOCK_TOKENS = {"cuda": 16, "cpu": 128}
SETS = 4  # of chunks and blocks, used in turn
POSITIONS = 4_096
SEED = 20260
ROUNDS, QUICK_ROUNDS, WARM_UP_ROUNDS = 40, 5, 2
HIDING_CYCLES = 2_000_000  # of the device's clock, about a millisecond: longer than a launch takes
MS, GB = 1e3, 1e9

Update = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""`(keys, values, cache, slots)` of one layer."""


@dataclass(frozen=True, slots=True)
class Model:
    """The shape whose memory is composed; `theta` is the base of its rotation."""

    name: str
    shape: KVShape
    theta: float


LLAMA_8B = Model("Llama-3.1-8B", KVShape(32, 8, 128, torch.bfloat16), 500_000.0)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds: of the device, and of a caller who waits for it."""

    device_s: float
    wall_s: float


def model_of(directory: Path) -> Model:
    """The shape out of a model's `config.json`. Raises MemshardError."""
    try:
        config = json.loads((directory / "config.json").read_text())
        heads = config["num_attention_heads"]
        dim = config.get("head_dim") or config["hidden_size"] // heads
        dtype = getattr(torch, config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        rope = config.get("rope_parameters") or config
        shape = KVShape(config["num_hidden_layers"], config.get("num_key_value_heads") or heads, dim, dtype)
        return Model(directory.name, shape, float(rope.get("rope_theta", 10_000.0)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as unfit:
        raise MemshardError(f"{directory} has no config.json of a language model: {unfit!r}") from unfit


def measure(model: Model, device: str, rounds: int) -> dict[str, list[Timing]]:
    """Each arm's timings. Raises MemshardError where there is no such device."""
    if device == "cuda" and not torch.cuda.is_available():
        raise MemshardError("There is no CUDA device that this build of torch can use")
    if device == "cpu":
        torch.set_num_threads(1)  # as a worker of one core; what it copies, one thread copies
    bench = _Bench(model, torch.device(device))
    timings: dict[str, list[Timing]] = {arm: [] for arm in bench.arms}
    order = random.Random(SEED)
    for number in range(WARM_UP_ROUNDS + rounds):
        for arm in order.sample(list(bench.arms), len(bench.arms)):
            timing = bench.time(arm)
            if number >= WARM_UP_ROUNDS:
                timings[arm].append(timing)
    return timings


class _Bench:
    """Chunks, caches, and the arms over them."""

    def __init__(self, model: Model, device: torch.device) -> None:
        self._device = device
        self._shape = shape = model.shape
        self._rng = random.Random(SEED)
        self._rotations = [_rotation(model)] * shape.layers
        self._block_tokens = BLOCK_TOKENS[device.type]
        blocks = -(-TOKENS // self._block_tokens)
        size = (SETS * blocks + 1, shape.kv_heads, self._block_tokens, 2 * shape.head_dim)
        self._caches = [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(shape.layers)]
        plane = (SETS * CHUNKS, shape.layers, 2, CHUNK_TOKENS, shape.kv_heads, shape.head_dim)
        self._pool = torch.empty(plane, dtype=shape.dtype, device=device)
        for chunk in self._pool:
            chunk.normal_()
        self._target = torch.zeros_like(self._pool)
        self._update, rotate = _backend(shape, device)
        self._ready = self._pool[0].new_ones(2, TOKENS, shape.kv_heads, shape.head_dim)
        portable = self._portable(rotate)
        fused = fastest(portable, shape, self._caches, self._rotations)
        self.arms: dict[str, Callable[[int], Callable[[], object]]] = {"copy": self._copy, "write": self._write}
        self.arms["portable"] = self._composing(portable)
        if fused is not portable:
            self.arms["fused"] = self._composing(fused)
        self._turn = 0

    def time(self, arm: str) -> Timing:
        """One run of an arm, over the set whose turn it is."""
        self._turn = (self._turn + 1) % SETS
        run = self.arms[arm](self._turn)
        if self._device.type == "cpu":
            start = time.perf_counter()
            run()
            took = time.perf_counter() - start
            return Timing(took, took)
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        wall = time.perf_counter() - start
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(HIDING_CYCLES)
        before.record()
        run()
        after.record()
        torch.cuda.synchronize()
        return Timing(before.elapsed_time(after) / MS, wall)

    def _copy(self, turn: int) -> Callable[[], object]:
        chosen = slice(turn * CHUNKS, (turn + 1) * CHUNKS)
        return lambda: self._target[chosen].copy_(self._pool[chosen])

    def _write(self, turn: int) -> Callable[[], object]:
        slots, (keys, values) = self._slots(turn), self._ready

        def run() -> None:
            for cache in self._caches:
                self._update(keys, values, cache, slots)

        return run

    def _composing(self, composition: Composition) -> Callable[[int], Callable[[], object]]:
        def prepared(turn: int) -> Callable[[], object]:
            rows = self._rng.sample(range(turn * CHUNKS, (turn + 1) * CHUNKS), CHUNKS)
            chunks = [
                Chunk(ChunkId(str(row)), self._rng.randrange(CHUNKS * CHUNK_TOKENS, POSITIONS), self._pool[row])
                for row in rows
            ]
            slots = self._slots(turn)
            return lambda: composition(chunks, slots, 0)

        return prepared

    def _portable(self, rotate: RotateKeys) -> Composition:
        def composition(chunks: Sequence[Chunk], slots: torch.Tensor, skip: int) -> None:
            def write(layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
                self._update(keys, values, self._caches[layer], slots)

            written: WriteLayer = write
            compose(chunks, self._rotations, written, skip=skip, stop=skip + len(slots), rotate=rotate)

        return composition

    def _slots(self, turn: int) -> torch.Tensor:
        """The turn's blocks in a random order; the first block stays free, as vLLM leaves it."""
        blocks = -(-TOKENS // self._block_tokens)
        order = self._rng.sample(range(1 + turn * blocks, 1 + (turn + 1) * blocks), blocks)
        slots = torch.tensor(order)[:, None] * self._block_tokens + torch.arange(self._block_tokens)
        return slots.flatten()[:TOKENS].to(self._device)


def _rotation(model: Model) -> Rotation:
    dim = model.shape.head_dim
    return Rotation((model.theta ** -(torch.arange(0, dim, 2) / dim)).to(torch.float32), neox=True)


def _backend(shape: KVShape, device: torch.device) -> tuple[Update, RotateKeys]:
    """How a layer is written and rotated: by vLLM's CPU backend, or plainly."""
    if device.type == "cpu" and importlib.util.find_spec("vllm") is not None:
        from vllm.v1.attention.backend import AttentionType
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, _get_attn_isa

        from connector.rotation_cpu import rotate_bfloat16

        isa = _get_attn_isa(shape.dtype, BLOCK_TOKENS["cpu"], shape.head_dim, "auto")
        layer: Any = SimpleNamespace(isa=isa, _k_scale_float=1.0, _v_scale_float=1.0)
        impl: Any = SimpleNamespace(attn_type=AttentionType.DECODER, kv_cache_dtype="auto")

        def by_vllm(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
            CPUAttentionBackendImpl.do_kv_cache_update(impl, layer, keys, values, cache, slots)

        return by_vllm, rotate_bfloat16 if shape.dtype == torch.bfloat16 else rotate_keys

    def by_index(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        (key_cache,), (value_cache,) = paged_views(shape, [cache])
        block_tokens = key_cache.shape[1]
        at = (slots // block_tokens, slots % block_tokens)
        key_cache[at], value_cache[at] = keys, values

    return by_index, rotate_keys


def rows(model: Model, device: str, timings: Mapping[str, Sequence[Timing]]) -> Iterator[Row]:
    """One row an arm. `over_copy` is the quotient of the medians of the device's times."""
    floor = Spread.of(timing.device_s for timing in timings["copy"]).median
    for arm, measured in timings.items():
        took = Spread.of(timing.device_s for timing in measured)
        yield {
            "arm": arm,
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "model": model.name,
            "layers": model.shape.layers,
            "kv_heads": model.shape.kv_heads,
            "head_dim": model.shape.head_dim,
            "dtype": str(model.shape.dtype).removeprefix("torch."),
            "tokens": TOKENS,
            "chunks": CHUNKS,
            "block_tokens": BLOCK_TOKENS[device],
            "bytes": TOKENS * model.shape.token_bytes,
            "n": len(measured),
            **took.row("time"),
            **Spread.of(timing.wall_s for timing in measured).row("wall"),
            "over_copy": took.median / floor,
        }


def table(found: Sequence[Row]) -> Table:
    """The rows, in milliseconds; `wall` where it is another clock."""
    first = found[0]
    drawn = Table(
        title=f"Composing {first['tokens']} tokens in {first['chunks']} chunks, {first['model']}, {first['device']}",
        caption=f"{float(first['bytes']) / 1e6:.0f} MB read, as many written; medians (quartiles), {first['n']} rounds",
    )
    clocks = ("time",) if first["device"] == "cpu" else ("time", "wall")
    for heading in ("arm", *(f"{clock}, ms" for clock in clocks), "GB/s", "/ copy"):
        drawn.add_column(heading, justify="left" if heading == "arm" else "right")
    for row in found:
        spreads = (Spread(*(float(row[f"{clock}{part}_s"]) for part in ("_q1", "", "_q3"))) for clock in clocks)
        rate = 2 * float(row["bytes"]) / float(row["time_s"]) / GB
        cells = (*(spread.text(MS) for spread in spreads), f"{rate:.1f}", f"{float(row['over_copy']):.1f}")
        drawn.add_row(str(row["arm"]), *cells)
    return drawn
