"""vLLM's `AsyncLLM` with our connector in it: generate from chunks, encode chunks, answer for them.

One engine a shard. Everything here runs in the shard's process; the tensors stay in the engine's workers.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm import SamplingParams, TokensPrompt
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from connector.chunk import CaptureRange, ChunkId
from connector.metadata import transfer_params
from connector.moves import Move, Outcome
from connector.plan import PromptPlan
from connector.port import CHAT_PRIORITY, ENCODE_PRIORITY, EngineDelta
from connector.reason import Reason
from sharding.errors import EngineFailed, StartupError

RPC_TIMEOUT_S = 30.0

MOVE_DEADLINE_S = 60.0
MOVE_POLL_S, MOST_POLL_S = 0.003, 0.05
"""Between two questions whether a move is done, growing: each question waits for an engine step."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """`kv_cache_bytes` is vLLM's paged cache (None: vLLM's own default); `chunk_budget_bytes` what each worker may hold
    in chunks on its device, `host_budget_bytes` beside it. `max_model_len` None means the model's own. `file_key`: what
    chunks' files are sealed with, 32 bytes; it is no part of what vLLM is configured with, which vLLM logs."""

    model: Path
    chunk_budget_bytes: int
    host_budget_bytes: int = 0
    max_model_len: int | None = None
    kv_cache_bytes: int | None = None
    block_tokens: int | None = None
    tensor_parallel: int = 1
    eager: bool = True
    max_batched_tokens: int | None = None
    max_seqs: int | None = None
    dtype: str = "auto"
    prefix_caching: bool = True
    kv_cache_dtype: str = "auto"
    file_key: bytes | None = field(default=None, repr=False)
    metrics: bool = False  # vLLM's own, in this process' Prometheus registry; one engine a process then


class MemoryEngine:
    """Use `await MemoryEngine.start(settings)`."""

    def __init__(
        self,
        llm: AsyncLLM,
        model_digest: str,
        token_bytes: int,
        refusal: str | None,
        ranks: int = 1,
        devices: tuple[str, ...] = (),
    ) -> None:
        self.llm = llm
        self.devices = devices  # of the ranks; "cpu", or "cuda:" and what no other GPU is called
        self.model_digest = model_digest
        self.token_bytes = token_bytes  # of chunks, over all ranks
        self.ranks = ranks
        self.refusal = refusal  # why this model's memory can only be served as text, or None
        self.max_model_len: int = llm.model_config.max_model_len
        self.block_tokens: int = llm.vllm_config.cache_config.block_size  # of the paged cache
        self.counters = {"encode_prefilled_tokens": 0, "encode_cached_tokens": 0}

    @classmethod
    async def start(cls, settings: EngineSettings, *, serve_refused: bool = False) -> MemoryEngine:
        """Starts the engine's processes and proves the model.

        Raises `StartupError` where the engine does not start, and where the model's chunks cannot be served exactly
        (unless `serve_refused`: then `refusal` says why and only text is served).
        """
        options = {
            "max_model_len": settings.max_model_len,
            "kv_cache_memory_bytes": settings.kv_cache_bytes,
            "block_size": settings.block_tokens,
            "max_num_batched_tokens": settings.max_batched_tokens,
            "max_num_seqs": settings.max_seqs,
        }
        args = AsyncEngineArgs(
            model=str(settings.model),
            tensor_parallel_size=settings.tensor_parallel,
            dtype=settings.dtype,
            enforce_eager=settings.eager,
            enable_prefix_caching=settings.prefix_caching,
            kv_cache_dtype=settings.kv_cache_dtype,
            scheduling_policy="priority",
            # With it, vLLM schedules a step before it hears of the last one's failed loads and takes the token computed
            # behind them for an answer (its default on GPUs; the CPU platform has it off).
            async_scheduling=False,
            disable_log_stats=not settings.metrics,
            worker_extension_cls="connector.worker_extension.MemoryWorkerExtension",
            kv_transfer_config=KVTransferConfig(
                kv_connector="MemoryConnector",
                kv_connector_module_path="connector.memory_connector",
                kv_role="kv_consumer",  # kv_both would recompute what a preempted request had in flight
                kv_load_failure_policy="recompute",
                kv_connector_extra_config={
                    "chunk_budget_bytes": settings.chunk_budget_bytes,
                    "host_budget_bytes": settings.host_budget_bytes,
                },
            ),
            **{name: value for name, value in options.items() if value is not None},
        )
        try:
            llm = await asyncio.to_thread(AsyncLLM.from_engine_args, args)  # half a minute: let the loop go on
        except Exception as error:
            raise StartupError(f"vLLM did not start with the model {settings.model}: {error}") from error
        try:
            ranks: list[dict[str, Any]] = await llm.collective_rpc(
                "memshard_prepare", timeout=RPC_TIMEOUT_S, args=(settings.file_key,)
            )
        except Exception as error:  # vLLM reports a worker's exception as one of its own, with the reason in its text
            llm.shutdown()
            raise StartupError(f"The model {settings.model} could not be examined: {error}") from error
        refusal = next((rank["refusal"] for rank in ranks if rank["refusal"]), None)
        if refusal is not None:
            if not serve_refused:
                llm.shutdown()
                raise StartupError(f"The model {settings.model} cannot be served from memory: {refusal}.")
            return cls(llm, "", 0, refusal)
        # With the key in it, what another one sealed (or none) is another model's to whoever looks for files.
        state = hashlib.blake2b(
            "".join(rank["digest"] for rank in ranks).encode(), digest_size=16, key=settings.file_key or b""
        )
        devices = tuple(rank["device"] for rank in ranks)
        token_bytes = sum(rank["token_bytes"] for rank in ranks)
        return cls(llm, state.hexdigest(), token_bytes, None, len(ranks), devices)

    @staticmethod
    def sampling(
        max_tokens: int, stop: Sequence[str] = (), *, schema: Mapping[str, Any] | None = None, **given: Any
    ) -> SamplingParams:
        """How to sample, as `generate` takes it; `given` by the names of vLLM's `SamplingParams`. With a JSON `schema`
        the answer is JSON that it describes, unless `max_tokens` cut it off."""
        constrained = (
            None if schema is None else StructuredOutputsParams(json=dict(schema), disable_any_whitespace=True)
        )
        return SamplingParams(max_tokens=max_tokens, stop=list(stop), structured_outputs=constrained, **given)

    async def generate(
        self, request_id: str, plan: PromptPlan, sampling: SamplingParams, *, priority: int = CHAT_PRIORITY
    ) -> AsyncGenerator[EngineDelta, None]:
        """Generates behind the planned prompt. Closing the generator aborts the request.

        Raises `EngineFailed` where the engine died or ended the request with an error.
        """
        sampling = replace_params(sampling, load=plan.load)
        prompt = TokensPrompt(prompt_token_ids=list(plan.token_ids))
        if plan.salt is not None:
            prompt["cache_salt"] = plan.salt
        planned = plan.load_tokens
        try:
            async with aclosing(self.llm.generate(prompt, sampling, request_id, priority=priority)) as outputs:
                async for output in outputs:
                    completion = output.outputs[0]
                    if completion.finish_reason == "error":
                        raise EngineFailed("The engine ended this request with an error.")
                    told = output.kv_transfer_params or {"injected_tokens": planned, "hit_tokens": 0, "fallback": None}
                    injected, hit = told["injected_tokens"], told["hit_tokens"]
                    fallback = told["fallback"]
                    # vLLM counts the tokens of a failed load among the cached ones.
                    cached = hit if fallback else max(0, (output.num_cached_tokens or 0) - injected)
                    yield EngineDelta(
                        token_ids=tuple(completion.token_ids),
                        text=completion.text,
                        finish_reason=completion.finish_reason,
                        injected_tokens=injected,
                        cached_tokens=cached,
                        fallback=Reason(fallback) if fallback else None,
                        hit_tokens=hit,
                        logprobs=completion.logprobs,
                    )
        except EngineDeadError as error:
            raise EngineFailed("The engine of this shard has died.") from error

    async def encode(
        self, request_id: str, token_ids: Sequence[int], captures: Sequence[CaptureRange], salt: str
    ) -> set[ChunkId]:
        """Prefills `token_ids` and keeps the ranges as chunks. Returns the ids that are complete on every rank.

        Tokens found in the prefix cache are never computed and so cannot be captured, and a step may have run as one
        graph, unheard of: what is missing is prefilled once more, without reading the cache, but for what had no room
        on a worker and would have none then. Raises `EngineFailed`: the workers may hold any of the chunks.
        """
        wanted = {range_.id for range_ in captures}
        done, no_room = await self._encode(request_id, token_ids, captures, salt, skip_cache=False)
        missed = [range_ for range_ in captures if range_.id not in done | no_room]
        if missed:
            again, _ = await self._encode(f"{request_id}-again", token_ids, missed, salt, skip_cache=True)
            done |= again
        return done & wanted

    async def _encode(
        self, request_id: str, token_ids: Sequence[int], captures: Sequence[CaptureRange], salt: str, skip_cache: bool
    ) -> tuple[set[ChunkId], set[ChunkId]]:
        """The ids that are complete on every rank, and those that some rank had no room for."""
        sampling = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            detokenize=False,
            skip_reading_prefix_cache=skip_cache,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={"kv_transfer_params": transfer_params(capture=captures)},
        )
        prompt = TokensPrompt(prompt_token_ids=list(token_ids), cache_salt=salt)
        ranks: list[tuple[list[ChunkId], list[ChunkId]]] = [([], [])]
        cached = 0
        try:
            async with aclosing(self.llm.generate(prompt, sampling, request_id, priority=ENCODE_PRIORITY)) as outputs:
                async for output in outputs:
                    cached = output.num_cached_tokens or 0
            self.counters["encode_prefilled_tokens"] += len(token_ids) - cached
            self.counters["encode_cached_tokens"] += cached
        except EngineDeadError as error:
            raise EngineFailed("The engine of this shard has died.") from error
        finally:
            # Also after an abort: half a chunk must not stay in the worker's budget.
            if captures:
                settled = asyncio.ensure_future(self._rpc("memshard_settle", [range_.id for range_ in captures]))
                ranks = await asyncio.shield(settled)
        done, no_room = zip(*ranks, strict=True)
        return set.intersection(*map(set, done)), set.union(*map(set, no_room))

    async def drop(self, ids: Sequence[ChunkId]) -> None:
        """Forgets chunks on every rank. Raises `EngineFailed`: then they may still be there."""
        if ids:
            await self._rpc("memshard_drop", list(ids))

    async def move(self, move: Move) -> dict[ChunkId, Outcome]:
        """Moves chunks between the workers' tiers; for each the worst outcome over all ranks. Engine steps go on
        meanwhile. Raises `EngineFailed`: then it is not known where they are."""
        job = uuid.uuid4().hex
        told: list[dict[str, str] | None] = await self._rpc("memshard_move", job, move.plain())
        ends_at = asyncio.get_running_loop().time() + MOVE_DEADLINE_S
        pause_s = MOVE_POLL_S
        while any(rank is None for rank in told):
            if asyncio.get_running_loop().time() > ends_at:
                raise EngineFailed("The engine of this shard did not move its chunks in time.")
            await asyncio.sleep(pause_s)
            if not move.over_line:  # who waits there are two shards, and often somebody's writes
                pause_s = min(2 * pause_s, MOST_POLL_S)
            again = await self._rpc("memshard_moved", job)
            told = [new if old is None else old for old, new in zip(told, again, strict=True)]
        worst = list(Outcome).index
        ranks = [rank or {} for rank in told]
        return {
            id_: max((Outcome(rank.get(id_, Outcome.FAILED)) for rank in ranks), key=worst) for id_, _ in move.chunks
        }

    async def listen(self, line: str, nccl: bool) -> list[tuple[str, int]]:
        """Opens a line of this name; where each rank's other end finds it. Raises `EngineFailed`."""
        doors: list[tuple[str, int]] = await self._rpc("memshard_listen", line, nccl)
        return doors

    async def dial(self, line: str, doors: Sequence[tuple[str, int]], nccl: bool) -> None:
        """Opens the other end. Raises `EngineFailed`."""
        await self._rpc("memshard_dial", line, list(doors), nccl)

    async def hang_up(self, line: str) -> None:
        """Ends a line, and with it what is on its way over it. Raises `EngineFailed`."""
        await self._rpc("memshard_hang_up", line)

    async def stats(self) -> list[dict[str, int]]:
        """Each rank's chunks, bytes and counters."""
        return await self._rpc("memshard_stats")

    @property
    def dead(self) -> bool:
        """Whether the engine's processes have ended: it will never answer again."""
        return bool(self.llm.errored)

    async def check_health(self) -> None:
        """Raises `EngineFailed` where the engine is dead."""
        try:
            await self.llm.check_health()
        except EngineDeadError as error:
            raise EngineFailed("The engine of this shard has died.") from error

    def shutdown(self) -> None:
        """Ends the engine's processes."""
        self.llm.shutdown()

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        """Each rank's answer. Raises `EngineFailed` also where a worker failed, or did not answer in time."""
        try:
            # vLLM's own timeout begins when the engine turns to the call, between two steps.
            async with asyncio.timeout(RPC_TIMEOUT_S):
                answers: list[Any] = await self.llm.collective_rpc(method, timeout=RPC_TIMEOUT_S, args=args)
        except EngineDeadError as error:
            raise EngineFailed("The engine of this shard has died.") from error
        except Exception as error:  # vLLM reports a worker's exception as a bare one, with the reason in its text
            log.error("The workers did not do %s: %s", method, error or type(error).__name__)
            raise EngineFailed("The engine of this shard did not do what it was asked.") from error
        return answers


def replace_params(sampling: SamplingParams, load: Sequence[tuple[ChunkId, int]]) -> SamplingParams:
    """`sampling` with a wish to load chunks, streaming only what is new."""
    sampling = sampling.clone()
    sampling.output_kind = RequestOutputKind.DELTA
    if load:
        sampling.extra_args = {**(sampling.extra_args or {}), "kv_transfer_params": transfer_params(load)}
    return sampling
