"""The real engine with room for a few chunks: what comes back from the host or a file answers as if it had never left.

float32: the very same bytes are composed, so answers are equal, not near. Files are sealed here; in the clear they are
with every other engine.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from connector.chunk import ChunkId, memory_salt
from connector.chunk_file import HEADER_BYTES, ChunkFormat, Damaged
from connector.engine import EngineSettings, MemoryEngine
from connector.file_tier import FileTier
from connector.files import LocalFiles
from connector.ledger import ChunkLedger
from connector.moves import DEVICE, Move, Outcome
from connector.plan import PromptPlan
from connector.tiers import Tiers
from tests.connector.engines import Encoded, answer, bind_cores, encode, text, tokens_of

NOISE = 1e-3
FACTS = 6
FACT_TOKENS = 40
FACT_BYTES = FACT_TOKENS * 2048
TAIL = tokens_of(99, 21)
KEY = bytes(range(200, 232))


@pytest.fixture(
    scope="module", params=[1, pytest.param(2, marks=pytest.mark.all_models)], ids=["one rank", "two ranks"]
)
async def engine(tiny_llama: Path, request: pytest.FixtureRequest) -> AsyncIterator[MemoryEngine]:
    with bind_cores(request.param):
        engine = await MemoryEngine.start(
            EngineSettings(
                tiny_llama,
                chunk_budget_bytes=FACTS * FACT_BYTES,
                host_budget_bytes=FACTS * FACT_BYTES,
                kv_cache_bytes=64 << 20,
                max_model_len=512,
                dtype="float32",
                tensor_parallel=request.param,
                file_key=KEY,
            )
        )
    yield engine
    engine.shutdown()


class Home:
    def __init__(self, engine: MemoryEngine, root: Path, host: int) -> None:
        about = {"token_bytes": engine.token_bytes, "ranks": engine.ranks, "digest": engine.model_digest, "key": KEY}
        directory, lock = LocalFiles.take(root)
        self.disk = FileTier("disk", str(directory), 1 << 30, lock=lock, **about)
        self.engine = engine
        device = ChunkLedger(FACTS * FACT_BYTES, engine.token_bytes)
        self.tiers = Tiers(engine, device, ChunkLedger(host * FACT_BYTES, engine.token_bytes), [self.disk])

    async def encode(self, owner: str, seed: int) -> Encoded:
        pieces = [tokens_of(seed + n, FACT_TOKENS) for n in range(FACTS)]
        refs = [(ChunkId(f"{seed + n:032x}"), FACT_TOKENS) for n in range(FACTS)]
        assert await self.tiers.make_room(owner, refs)
        self.tiers.device.abort([id_ for id_, _ in refs])
        encoded = await encode(self.engine, pieces, owner)
        ids = [range_.id for range_ in encoded.ranges]
        self.tiers.device.reserve(owner, [(id_, FACT_TOKENS) for id_ in ids])
        self.tiers.device.commit(ids)
        await self.tiers.writer.encoded(owner, ids)
        return encoded

    def plan(self, owner: str, encoded: Encoded) -> PromptPlan:
        order = range(FACTS)[::-1]
        load = tuple((encoded.ranges[i].id, encoded.ranges[i].tokens) for i in order)
        return PromptPlan(
            tuple(t for i in order for t in encoded.tokens(i)) + TAIL, load, memory_salt(owner + self.disk.url, load)
        )


@pytest.mark.parametrize("host", [FACTS, 0], ids=["from the host", "from files"])
async def test_memory_that_left_the_device_and_came_back_answers_the_same(
    engine: MemoryEngine, tmp_path: Path, host: int
) -> None:
    home = Home(engine, tmp_path, host)
    seed = 1000 + 100 * host
    alice = await home.encode(f"alice-{host}", seed)
    plan = home.plan("before", alice)
    before = await answer(engine, plan)
    assert before.injected_tokens == FACTS * FACT_TOKENS
    await home.tiers.writer.written()
    await home.encode(f"bob-{host}", seed + 50)
    ids = [id_ for id_, _ in plan.load]
    assert not any(map(home.tiers.device.peek_resident, ids))
    (missing, *_) = await asyncio.gather(answer(engine, home.plan("missing", alice)), engine.stats())
    assert missing.fallback is not None
    assert await home.tiers.promote(f"alice-{host}", ids, deadline_s=20.0) == 0
    after = await answer(engine, home.plan("after", alice))
    assert (after.injected_tokens, after.fallback) == (before.injected_tokens, None)
    assert after == before
    for rank in await engine.stats():
        assert rank["bytes"] * engine.ranks == home.tiers.device.bytes
        assert rank["host_bytes"] * engine.ranks == home.tiers.host.bytes
    await home.tiers.remove(home.tiers.strike([*home.tiers.ids_of(f"alice-{host}"), *home.tiers.ids_of(f"bob-{host}")]))
    assert [rank["bytes"] + rank["host_bytes"] for rank in await engine.stats()] == [0] * engine.ranks
    home.tiers.close()


async def test_damaged_files_answer_as_text(engine: MemoryEngine, tmp_path: Path) -> None:
    home = Home(engine, tmp_path, 0)
    carol = await home.encode("carol", 3000)
    await home.tiers.writer.written()
    for path in tmp_path.rglob("*.0"):  # noqa: ASYNC240
        data = bytearray(path.read_bytes())
        data[-7] ^= 4
        path.write_bytes(data)
    await home.encode("dave", 3050)
    plan = home.plan("carol", carol)
    ids = [id_ for id_, _ in plan.load]
    move = Move(home.disk.url, DEVICE, engine.model_digest, "carol", plan.load)
    with home.tiers.device.held(()):
        await home.tiers.remove(home.tiers.strike(home.tiers.ids_of("dave")))
        assert set((await engine.move(move)).values()) == {Outcome.DAMAGED}
    await engine.drop(ids)
    got = await answer(engine, plan)
    assert got.fallback is not None
    assert got.differs_from(await text(engine, plan.token_ids, "as text")) < NOISE
    home.tiers.close()


async def test_the_workers_seal_what_they_write_and_nobody_is_told_the_key(
    engine: MemoryEngine, tmp_path: Path
) -> None:
    home = Home(engine, tmp_path, 0)
    await home.encode("erin", 4000)
    await home.tiers.writer.written()
    files = [path for path in tmp_path.rglob("*") if path.name.endswith((".0", ".1"))]  # noqa: ASYNC240
    assert len(files) == FACTS * engine.ranks
    for path in files:
        data = path.read_bytes()
        assert ChunkFormat(KEY).owner_of(data[:HEADER_BYTES]) == "erin"
        assert b"erin" not in data
        with pytest.raises(Damaged, match="encrypted"):
            ChunkFormat().owner_of(data[:HEADER_BYTES])
    shown = f"{engine.llm.vllm_config} {EngineSettings(tmp_path, 1, file_key=KEY)}"
    for process in psutil.Process().children(recursive=True):
        shown += f"{process.cmdline()} {process.environ()}"
    assert not any(told in shown for told in (KEY.hex(), repr(KEY)[2:-1], base64.b64encode(KEY).decode()))
    await home.tiers.remove(home.tiers.strike(home.tiers.ids_of("erin")))
    assert not any(path.exists() for path in files)
    home.tiers.close()
