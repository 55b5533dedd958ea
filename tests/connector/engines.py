"""Real engines for tests: tiny random models of a given architecture, and what to ask of an engine.

An oracle that shares no code with us computes the expected answers: the same weights in transformers.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # lets tests run functions of theirs in the worker
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", str(max(os.sched_getaffinity(0))))
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PretrainedConfig
from vllm import SamplingParams

from connector.chunk import ChunkId, chunk_id
from connector.engine import MemoryEngine
from connector.metadata import CaptureRange
from connector.plan import PromptPlan

_request = itertools.count()


def save_tiny_model(config: PretrainedConfig, tokenizer: Path, target: Path, dtype: torch.dtype) -> Path:
    """A random model with weights large enough for attention to matter, and a tokenizer beside it."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and "embed" not in name:
            torch.nn.init.normal_(weight, std=1.5 / weight.shape[1] ** 0.5)
        elif name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(target)
    return target


def tokens_of(seed: int, count: int) -> tuple[int, ...]:
    """`count` ordinary token ids."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(100, 40_000, (count,), generator=generator).tolist())


@dataclass(frozen=True)
class Answer:
    """Greedy tokens with their log-probabilities, and what the engine said of the prompt."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    injected_tokens: int
    cached_tokens: int
    fallback: str | None

    def differs_from(self, other: Answer) -> float:
        """The largest difference of log-probabilities; infinite where the tokens differ."""
        if self.token_ids != other.token_ids:
            return float("inf")
        return max(abs(a - b) for a, b in zip(self.logprobs, other.logprobs, strict=True))


async def answer(engine: MemoryEngine, plan: PromptPlan, max_tokens: int = 8, **sampling: object) -> Answer:
    """Greedy decoding behind a plan."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=1, ignore_eos=True, **sampling)
    ids: list[int] = []
    logprobs: list[float] = []
    last = None
    async for delta in engine.generate(f"test-{next(_request)}", plan, params):
        ids += delta.token_ids
        logprobs += [entry[id_].logprob for entry, id_ in zip(delta.logprobs, delta.token_ids, strict=True)]
        last = delta
    assert last is not None
    return Answer(tuple(ids), tuple(logprobs), last.injected_tokens, last.cached_tokens, last.fallback)


async def text(engine: MemoryEngine, token_ids: Sequence[int], salt: str | None, max_tokens: int = 8) -> Answer:
    """Greedy decoding behind plain tokens."""
    return await answer(engine, PromptPlan(tuple(token_ids), (), salt), max_tokens)


@dataclass(frozen=True)
class Encoded:
    """Pieces that were encoded in one prompt, and that prompt."""

    ranges: tuple[CaptureRange, ...]
    prompt: tuple[int, ...]

    def tokens(self, index: int) -> tuple[int, ...]:
        range_ = self.ranges[index]
        return self.prompt[range_.start : range_.start + range_.tokens]


async def encode(
    engine: MemoryEngine, pieces: Sequence[Sequence[int]], owner: str, *, kept: Sequence[int] | None = None
) -> Encoded:
    """Encodes pieces one behind another; keeps those of `kept` (all by default) and checks that they came."""
    prompt: list[int] = []
    ranges: list[CaptureRange] = []
    for index, piece in enumerate(pieces):
        id_ = chunk_id(engine.model_digest, owner, prompt, piece)
        if kept is None or index in kept:
            ranges.append(CaptureRange(id_, len(prompt), len(piece)))
        prompt += piece
    done = await engine.encode(f"test-{next(_request)}", prompt, ranges, f"salt-{owner}")
    assert done == {range_.id for range_ in ranges}
    return Encoded(tuple(ranges), tuple(prompt))


@contextmanager
def bind_cores(workers: int) -> Iterator[None]:
    """Engines started meanwhile have this many workers."""
    if workers == 1:
        yield
        return
    cores = sorted(os.sched_getaffinity(0))
    before = os.environ["VLLM_CPU_OMP_THREADS_BIND"]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[n % len(cores)]) for n in range(workers))
    try:
        yield
    finally:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = before


def read_chunk(worker: object, id_: ChunkId) -> torch.Tensor:
    """Runs in the worker: a chunk's `[layers, 2, tokens, kv_heads, head_dim]`, as float32."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    chunk = get_kv_transfer_group().worker.store.get(id_)
    return chunk.kv.float().cpu()


def read_rotation(worker: object) -> tuple[list[float], bool]:
    """Runs in the worker: the first layer's frequencies and pairing."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    rotation = get_kv_transfer_group().worker.rotations[0]
    return rotation.frequencies.tolist(), rotation.neox


def read_composition(worker: object) -> str:
    """Runs in the worker: by which class it composes."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return type(get_kv_transfer_group().worker._compose).__name__


def empty(worker: object) -> int:
    """Runs in the worker between steps: checks that none left anything, drops all chunks, returns the bytes held."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    side = get_kv_transfer_group().worker
    side.check_integrity()
    assert not side.store._arriving, "half a chunk whose request has ended"
    side.drop(list(side.store._chunks))
    return int(side.store.bytes)


async def check_integrity(engine: MemoryEngine) -> None:
    """Once all requests have ended: workers hold nothing of them, and every block of the paged cache is free again."""
    async with asyncio.timeout(20):
        while engine.llm.get_num_unfinished_requests():  # noqa: ASYNC110 - vLLM has no event for it
            await asyncio.sleep(0.01)
        assert set(await engine.llm.collective_rpc(empty)) == {0}
        # Refused while a block is in use; an abort reaches the engine core a little later than its caller hears of it.
        while not await engine.llm.reset_prefix_cache():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def set_budget(worker: object, budget_bytes: int) -> None:
    """Runs in the worker."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    get_kv_transfer_group().worker.store.budget_bytes = budget_bytes


class Oracle:
    """The same weights in transformers, in float32."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()

    @torch.inference_mode()
    def cache(self, token_ids: Sequence[int], first_position: int = 0) -> DynamicCache:
        """Keys and values of a prompt whose first token stands at `first_position`."""
        ids = torch.tensor([list(token_ids)])
        positions = torch.arange(len(token_ids))[None] + first_position
        cache = DynamicCache()  # of full length in every layer, also where a sliding window would do with less
        self.model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)
        return cache

    @torch.inference_mode()
    def composed(self, encoded: Encoded, order: Sequence[int], first_position: int = 0) -> DynamicCache:
        """The cache that pieces of an encoding make where they are served one behind another, in `order`.

        Each comes out of the whole prompt, computed that many positions further on: attention sees differences of
        positions only, so the piece's hidden states stay.
        """
        parts: list[tuple[DynamicCache, slice]] = []
        place = first_position
        for range_ in (encoded.ranges[index] for index in order):
            cache = self.cache(encoded.prompt, first_position=place - range_.start)
            parts.append((cache, slice(range_.start, range_.start + range_.tokens)))
            place += range_.tokens
        whole = DynamicCache()
        for layer in range(len(parts[0][0].layers)):
            keys = torch.cat([cache.layers[layer].keys[:, :, tokens] for cache, tokens in parts], dim=2)
            values = torch.cat([cache.layers[layer].values[:, :, tokens] for cache, tokens in parts], dim=2)
            whole.update(keys, values, layer)
        return whole

    @torch.inference_mode()
    def continue_from(self, cache: DynamicCache, tail: Sequence[int], tokens: int) -> tuple[list[int], list[float]]:
        """Greedy tokens and log-probabilities of `tail` and what follows, behind a cache of any origin."""
        length = cache.get_seq_length()
        ids, found, logprobs = torch.tensor([list(tail)]), [], []
        for _ in range(tokens):
            positions = torch.arange(ids.shape[1])[None] + length
            logits = self.model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True).logits
            distribution = logits[0, -1].float().log_softmax(-1)
            best = int(distribution.argmax())
            found.append(best)
            logprobs.append(float(distribution[best]))
            length += ids.shape[1]
            ids = torch.tensor([[best]])
        return found, logprobs

    def shortfall(self, cache: DynamicCache, tail: Sequence[int], answer: Answer, first_position: int = 0) -> float:
        """How far an answer is from greedy decoding behind a cache: the most that one of its log-probabilities is off
        by, or that one of its tokens is less likely than the likeliest."""
        ids = torch.tensor([[*tail, *answer.token_ids[:-1]]])
        positions = torch.arange(ids.shape[1])[None] + cache.get_seq_length() + first_position
        with torch.inference_mode():
            logits = self.model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True).logits
        rows = logits[0, len(tail) - 1 :].float().log_softmax(-1)
        chosen = rows.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        off = (chosen - torch.tensor(answer.logprobs)).abs().max()
        return float(torch.maximum(off, (rows.max(-1).values - chosen).max()))


def keys_and_values(cache: DynamicCache) -> torch.Tensor:
    """A transformers cache as `[layers, 2, tokens, kv_heads, head_dim]`."""
    layers = [torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers]  # [2, heads, tokens, dim]
    return torch.stack(layers).transpose(2, 3)
