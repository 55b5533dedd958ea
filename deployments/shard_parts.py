"""A shard out of its parts, whichever engine and embedder it has."""

from __future__ import annotations

from functools import partial

from connector.file_tier import FileTier
from connector.files import LocalFiles
from connector.ledger import ChunkLedger
from connector.port import ENCODE_PRIORITY, Engine
from connector.template import PromptTemplate
from connector.tiers import Tiers
from deployments.canary import Canary
from deployments.encode_pace import EncodePace
from deployments.encoder import Encoder
from deployments.heads import Heads
from deployments.ports import Embeds
from deployments.quotas import quotas_of
from deployments.resident import Residents
from deployments.settings import ShardSettings
from deployments.shard import Shard
from deployments.trial import Trial
from sharding.directory import Directory
from sharding.errors import StartupError
from sharding.facts import FactStore
from sharding.rebuilding import RebuildPolicy
from sharding.sealing import Seal
from sharding.user_memory import UserTable


def put_together(
    settings: ShardSettings,
    engine: Engine,
    embedder: Embeds,
    template: PromptTemplate,
    table: UserTable,
    store: FactStore,
    directory: Directory,
    pace: EncodePace,
) -> Shard:
    """A shard around an engine that runs. Its encoder runs from here on; `Shard.close` ends all of it."""
    tiers = _tiers(settings, engine)
    encoder = Encoder(engine, tiers.device, pace, tiers)
    canary = Canary(
        Trial(engine, template, embedder, encoder, tiers, priority=ENCODE_PRIORITY),
        directory,
        window_facts=settings.window_facts,
        fixed=settings.prefill_nearest,
    )
    residents = Residents(
        store,
        embedder,
        encoder,
        tiers,
        template,
        model_digest=engine.model_digest,
        window_facts=settings.window_facts,
        room_tokens=engine.max_model_len - 1,
        load_deadline_s=settings.chunk_load_deadline_s,
        keep_stale=settings.serve_stale and engine.refusal is None,
    )
    return Shard(
        engine,
        tiers,
        encoder,
        Heads(engine.model_digest, encoder, tiers.device, template.default_head()),
        residents,
        embedder,
        template,
        table,
        store,
        canary=canary,
        max_requests_in_flight=settings.max_requests_in_flight,
        max_fact_tokens=settings.max_fact_tokens,
        rebuilding=RebuildPolicy(settings.rebuild_after_s, settings.rebuild_stale_share),
        quotas=quotas_of(settings, store),
        nccl=settings.move_nccl,
    )


def _tiers(settings: ShardSettings, engine: Engine) -> Tiers:
    """Device, host, local disk, shared path, as far as the settings give them bytes. Raises `StartupError`."""
    device = ChunkLedger(settings.chunk_device_bytes, engine.token_bytes)
    if engine.refusal is not None:  # there will be no chunks
        return Tiers(engine, device)
    host = ChunkLedger(settings.chunk_host_bytes, engine.token_bytes)
    key = Seal(settings.encryption_key).file_key
    opened = partial(FileTier, token_bytes=engine.token_bytes, ranks=engine.ranks, digest=engine.model_digest, key=key)
    files: list[FileTier] = []
    try:
        if settings.chunk_disk_dir is not None and settings.chunk_disk_bytes:
            directory, lock = LocalFiles.take(settings.chunk_disk_dir)
            files.append(opened("disk", str(directory), settings.chunk_disk_bytes, lock=lock))
        if settings.chunk_shared_url is not None and settings.chunk_shared_bytes:
            files.append(opened("shared", settings.chunk_shared_url, settings.chunk_shared_bytes))
    except (OSError, ImportError, ValueError) as error:
        raise StartupError(f"The chunks' files cannot be kept: {error}") from error
    return Tiers(engine, device, host, files)
