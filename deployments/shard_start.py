"""A shard is put together here: what may be refused quickly first, the engine last, and nothing is left of a start that
failed."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from transformers import AutoTokenizer

from connector.engine import EngineSettings, MemoryEngine
from connector.ledger import ChunkLedger
from connector.template import PromptTemplate
from deployments.embedder import Embedder
from deployments.encoder import Encoder
from deployments.heads import Heads
from deployments.resident import Residents
from deployments.settings import ShardSettings
from deployments.shard import Shard
from sharding.directory import Directory
from sharding.facts import FactStore
from sharding.ids import ShardId
from sharding.lease import Lease
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
                max_model_len=settings.max_model_len,
                kv_cache_bytes=settings.kv_cache_bytes,
                eager=not torch.cuda.is_available(),
            )
        )
        undo.callback(engine.shutdown)
        ledger = ChunkLedger(settings.chunk_device_bytes, engine.token_bytes)
        encoder = Encoder(engine, ledger)
        undo.callback(encoder.close)
        residents = Residents(
            store,
            embedder,
            encoder,
            ledger,
            template,
            model_digest=engine.model_digest,
            window_facts=settings.window_facts,
            room_tokens=engine.max_model_len - 1,
        )
        shard = Shard(
            engine,
            ledger,
            encoder,
            Heads(engine.model_digest, encoder, ledger, template.default_head()),
            residents,
            embedder,
            template,
            UserTable(me, directory, store, lease, dim=embedder.dim, capacity=settings.resident_users),
            store,
            max_requests_in_flight=settings.max_requests_in_flight,
            max_fact_tokens=settings.max_fact_tokens,
        )
        await shard.warm_up()
        undo.pop_all()
        return shard
