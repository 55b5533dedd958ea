"""A shard is put together here: what may be refused quickly first, the engine last, and nothing is left of a start that
failed."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from transformers import AutoTokenizer

from connector.engine import EngineSettings, MemoryEngine
from connector.template import PromptTemplate
from deployments.embedder import Embedder
from deployments.encode_pace import CPU_STEP_TOKENS, GPU_STEP_TOKENS, EncodePace
from deployments.settings import ShardSettings
from deployments.shard import Shard
from deployments.shard_parts import put_together
from sharding.directory import Directory
from sharding.facts import FactStore
from sharding.ids import ShardId
from sharding.lease import Lease
from sharding.sealing import Seal
from sharding.user_memory import UserTable


async def open_shard(
    settings: ShardSettings, me: ShardId, directory: Directory, store: FactStore, lease: Lease
) -> Shard:
    """Starts the engine and puts a shard together around it, warm: the first chat pays for nothing. Raises
    `StartupError`."""
    torch.set_num_threads(1)
    with ExitStack() as undo:
        template = PromptTemplate(AutoTokenizer.from_pretrained(settings.model_path))
        embedder = Embedder(settings.embedding_path)
        undo.callback(embedder.close)
        engine = await MemoryEngine.start(
            EngineSettings(
                settings.model_path,
                chunk_budget_bytes=settings.chunk_device_bytes,
                host_budget_bytes=settings.chunk_host_bytes,
                max_model_len=settings.max_model_len,
                kv_cache_bytes=settings.kv_cache_bytes,
                tensor_parallel=max(1, settings.gpus),
                file_key=Seal(settings.encryption_key).file_key,
                metrics=True,
                eager=not torch.cuda.is_available(),  # compiled on a GPU, where it has never run
            )
        )
        undo.callback(engine.shutdown)
        table = UserTable(
            me,
            directory,
            store,
            lease,
            dim=embedder.dim,
            capacity=settings.resident_users,
            embedding_model=embedder.model,
        )
        pace = EncodePace(GPU_STEP_TOKENS if torch.cuda.is_available() else CPU_STEP_TOKENS)
        shard = put_together(settings, engine, embedder, template, table, store, directory, pace)
        undo.callback(shard.encoder.close)
        undo.callback(shard.tiers.close)
        await shard.warm_up()
        shard.canary.begin()
        shard.rebuilds.begin()
        undo.pop_all()
        return shard
