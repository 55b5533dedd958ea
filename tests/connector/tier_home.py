"""A shard's tiers around workers that have no model: real ledgers, stores, threads and files, one store pair a rank."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from connector.chunk import Chunk, ChunkId, KVShape, chunk_id
from connector.chunk_file import HEADER_BYTES, ChunkFormat
from connector.file_tier import FileTier
from connector.files import LocalFiles, name_of, owner_key
from connector.ledger import ChunkLedger
from connector.moves import Move, Outcome
from connector.store import ChunkStore
from connector.tier_jobs import TierJobs
from connector.tiers import Tiers

SHAPE = KVShape(layers=2, kv_heads=1, head_dim=4, dtype=torch.bfloat16)
DIGEST = "f" * 32


class Workers:
    """`ranks` workers. `gate` closed holds back the answers to moves; `breaks` makes the next calls fail."""

    model_digest = DIGEST

    def __init__(self, device_bytes: int, host_bytes: int, ranks: int, key: bytes | None = None) -> None:
        cpu = torch.device("cpu")
        self.stores = [(ChunkStore(SHAPE, cpu, device_bytes), ChunkStore(SHAPE, cpu, host_bytes)) for _ in range(ranks)]
        self.jobs = [TierJobs(device, host, rank) for rank, (device, host) in enumerate(self.stores)]
        for jobs in self.jobs:
            jobs.format = ChunkFormat(key)
        self.gate = asyncio.Event()
        self.gate.set()
        self.moves: list[Move] = []
        self.breaks: Exception | None = None

    async def move(self, move: Move) -> dict[ChunkId, Outcome]:
        if self.breaks is not None:
            raise self.breaks
        self.moves.append(move)
        move = Move.of(move.plain())
        name = str(len(self.moves))
        for jobs in self.jobs:
            jobs.begin(name, move)
        await self.gate.wait()
        told: list[dict[ChunkId, Outcome]] = []
        for jobs in self.jobs:
            while (outcomes := jobs.poll(name)) is None:  # noqa: ASYNC110  # as the engine does
                await asyncio.sleep(0.001)
            told.append(outcomes)
        return {id_: max((rank[id_] for rank in told), key=list(Outcome).index) for id_, _ in move.chunks}

    async def drop(self, ids: Sequence[ChunkId]) -> None:
        if self.breaks is not None and ids:
            raise self.breaks
        for device, host in self.stores:
            device.drop(ids)
            host.drop(ids)


class TierHome:
    """Budgets are in chunks of `TOKENS` tokens."""

    TOKENS = 3

    def __init__(
        self,
        root: Path | None = None,
        *,
        device: int = 4,
        host: int = 4,
        disk: int = 0,
        shared: int = 0,
        shared_url: str | None = None,
        ranks: int = 1,
        key: bytes | None = None,
    ) -> None:
        self.ranks = ranks
        chunk = self.TOKENS * SHAPE.token_bytes
        self.file_bytes = ranks * (chunk + HEADER_BYTES)
        self.workers = Workers(device * chunk, host * chunk, ranks, key)
        about = {"token_bytes": ranks * SHAPE.token_bytes, "ranks": ranks, "digest": DIGEST, "key": key}
        self.now = 0.0
        files: list[FileTier] = []
        if disk:
            assert root is not None
            directory, lock = LocalFiles.take(root / "disk")
            files.append(FileTier("disk", str(directory), disk * self.file_bytes, lock=lock, clock=self.clock, **about))
        if shared:
            url = shared_url or str(root / "shared")
            files.append(FileTier("shared", url, shared * self.file_bytes, clock=self.clock, **about))
        memory = [ChunkLedger(n * chunk * ranks, ranks * SHAPE.token_bytes, self.clock) for n in (device, host)]
        self.tiers = Tiers(self.workers, *memory, files)

    def clock(self) -> float:
        return self.now

    async def encode(self, owner: str, *numbers: int) -> list[ChunkId]:
        """As the encoder does it; a chunk follows from its owner and number."""
        ids = [an_id(owner, n) for n in numbers]
        assert await self.tiers.make_room(owner, [(id_, self.TOKENS) for id_ in ids], own=True)
        for id_, number in zip(ids, numbers, strict=True):
            for rank, (device, _) in enumerate(self.workers.stores):
                room = device.arriving(id_, self.TOKENS, 10 + number)
                assert room is not None, "the worker has no room for what the ledger has"
                room.copy_(kv_of(id_, rank))
                device.arrived(id_, torch.arange(self.TOKENS))
        self.tiers.device.commit(ids)
        await self.tiers.writer.encoded(owner, ids)
        return ids

    async def promote(self, owner: str, ids: Sequence[ChunkId]) -> int:
        return await self.tiers.promote(owner, ids, deadline_s=20.0)

    async def forget(self, ids: Iterable[ChunkId]) -> None:
        await self.tiers.remove(self.tiers.strike(ids))

    def on_device(self, id_: ChunkId) -> bool:
        """Whether every rank has the chunk there, byte for byte, as the ledger says."""
        here = [device.get(id_) for device, _ in self.workers.stores]
        assert self.tiers.device.peek_resident(id_) == all(chunk is not None for chunk in here)
        for rank, chunk in enumerate(here):
            if chunk is not None:
                _check(chunk, id_, rank)
        return here[0] is not None

    def in_host(self, id_: ChunkId) -> bool:
        here = [host.get(id_) is not None for _, host in self.workers.stores]
        assert self.tiers.host.peek_resident(id_) == all(here)
        return all(here)

    def files_of(self, owner: str, id_: ChunkId, tier: int = 0) -> list[Path]:
        """Where its files are, or would be."""
        root = Path(self.tiers.files[tier].url)
        return [root / name_of(DIGEST, owner_key(owner), id_, rank) for rank in range(self.ranks)]

    async def check(self) -> None:
        """Everything adds up, and nothing is over its budget."""
        await self.tiers.writer.written()
        await self.tiers.remove(())
        self.tiers.check_integrity()
        for stores in self.workers.stores:
            for store, ledger in zip(stores, (self.tiers.device, self.tiers.host), strict=True):
                store.check_integrity()
                assert store.bytes * self.ranks == ledger.bytes
        for tier in self.tiers.files:
            held = _bytes_below(tier.url)
            assert held == tier.ledger.bytes <= tier.ledger.budget_bytes

    def close(self) -> None:
        self.tiers.close()
        for jobs in self.workers.jobs:
            jobs.close()


def an_id(owner: str, number: int) -> ChunkId:
    return chunk_id("model", owner, (), (number,))


def kv_of(id_: ChunkId, rank: int) -> torch.Tensor:
    """What the chunk's bytes are on a rank."""
    generator = torch.Generator().manual_seed(int(id_[:8], 16) + rank)
    return torch.randn((SHAPE.layers, 2, TierHome.TOKENS, SHAPE.kv_heads, SHAPE.head_dim), generator=generator).to(
        SHAPE.dtype
    )


def _check(chunk: Chunk, id_: ChunkId, rank: int) -> None:
    assert torch.equal(chunk.kv, kv_of(id_, rank)), "these are not the bytes that were captured"
    assert chunk.position >= 10


def _bytes_below(root: str) -> int:
    return sum(path.stat().st_size for path in Path(root).rglob("*") if path.is_file())
