"""vLLM's KV connector interface, translated: a thin adapter over `scheduler_side.py` and `worker_side.py`.

vLLM makes one instance a role: SCHEDULER in the engine core, WORKER in each worker process. They share nothing but
the metadata that vLLM carries from one to the other.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, KVCacheConfig, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from connector.metadata import StepMetadata, StepReport
from connector.scheduler_side import Scheduled, SchedulerSide
from connector.worker_side import WorkerSide


class MemoryConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Loads chunks that a request names in its `kv_transfer_params`, and captures the ranges it names there.

    `kv_connector_extra_config`: `chunk_budget_bytes` and `host_budget_bytes`, what each worker may hold in chunks on
    its device and beside it.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = vllm_config
        if role == KVConnectorRole.SCHEDULER:
            self.scheduler = SchedulerSide(vllm_config.cache_config.block_size)
        else:
            extra = vllm_config.kv_transfer_config.kv_connector_extra_config
            self.worker = WorkerSide(int(extra["chunk_budget_bytes"]), int(extra.get("host_budget_bytes", 0)))
            self.worker.refusal = _refusal(kv_cache_config)

    # -- scheduler side ---------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self.scheduler.arrived(
            request.request_id,
            request.kv_transfer_params,
            request.num_prompt_tokens,
            salt=request.cache_salt,
            reads_cache=not request.skip_reading_prefix_cache,
        )

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler.matched_tokens(request.request_id, num_computed_tokens), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self.scheduler.allocated(request.request_id, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        cached = scheduler_output.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return self.scheduler.step(
            Scheduled(
                id_, start, scheduler_output.num_scheduled_tokens[id_], self._kv_cache_manager.get_block_ids(id_)[0]
            )
            for id_, start in starts.items()
            if self.scheduler.captures_anything(id_)
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, StepReport):
            self.scheduler.reported(report)
            # vLLM has these blocks prefilled again for a request that goes on; for one that was aborted meanwhile, or
            # is preempted before it gets there, they would stay in the prefix cache as they are.
            self._kv_cache_manager.evict_blocks(report.blocks)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, self.scheduler.finished(request.request_id)

    # -- worker side ------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        context = self._config.compilation_config.static_forward_context
        layers = {name: context[name] for name in kv_caches}
        architectures = list(self._config.model_config.architectures)
        self.worker.register(layers, kv_caches, architectures, get_tensor_model_parallel_rank())

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        # Here, not in start_load_kv: without synchronous loads that one runs after the forward pass.
        self.worker.begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        meta = self._get_connector_metadata()
        assert isinstance(meta, StepMetadata)
        self.worker.load(meta.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are ordered before the forward pass by the current stream."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Captures happen in the cache update, not here."""

    def wait_for_save(self) -> None:
        self.worker.end()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> StepReport | None:
        return self.worker.take_report()


def _refusal(config: KVCacheConfig) -> str | None:
    """Why the engine's caches cannot take injected memory, if they cannot.

    vLLM gives sliding layers beside global ones full-size caches in one group for us. Where every layer slides, it
    hands out no blocks for tokens that the window has left behind; should a load fail, these are computed again into no
    block of their own, and the answer is wrong.
    """
    if len(config.kv_cache_groups) != 1:
        return "its layers' caches do not form one group, so that slots would differ"
    if isinstance(config.kv_cache_groups[0].kv_cache_spec, SlidingWindowSpec | ChunkedLocalAttentionSpec):
        return "every layer has a sliding window, and a failed load could not be computed again"
    return None
