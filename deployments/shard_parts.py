"""A shard out of its parts, whichever engine and embedder it has."""

from __future__ import annotations

from connector.ledger import ChunkLedger
from connector.port import Engine
from connector.template import PromptTemplate
from deployments.encode_pace import EncodePace
from deployments.encoder import Encoder
from deployments.heads import Heads
from deployments.ports import Embeds
from deployments.resident import Residents
from deployments.settings import ShardSettings
from deployments.shard import Shard
from sharding.facts import FactStore
from sharding.user_memory import UserTable


def put_together(
    settings: ShardSettings,
    engine: Engine,
    embedder: Embeds,
    template: PromptTemplate,
    table: UserTable,
    store: FactStore,
    pace: EncodePace,
) -> Shard:
    """A shard around an engine that runs. Its encoder runs from here on; `Shard.close` ends all of it."""
    ledger = ChunkLedger(settings.chunk_device_bytes, engine.token_bytes)
    encoder = Encoder(engine, ledger, pace)
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
    return Shard(
        engine,
        ledger,
        encoder,
        Heads(engine.model_digest, encoder, ledger, template.default_head()),
        residents,
        embedder,
        template,
        table,
        store,
        max_requests_in_flight=settings.max_requests_in_flight,
        max_fact_tokens=settings.max_fact_tokens,
    )
