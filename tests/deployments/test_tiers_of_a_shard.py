"""What a user notices of tiers: nothing but time. Answers come from the facts as they are, wherever the chunks are."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from tiered_shard import TieredShard, chunk_files, tiered_shard

from connector.chunk_file import CLEAR, HEADER_BYTES, ChunkFormat
from connector.files import LocalFiles
from connector.plan import PromptPlan
from connector.reason import Reason
from deployments.deterministic import DeterministicEngine, mark
from deployments.memory_calls import AddCall, FactPage, ForgetCall, ListCall, SearchCall
from deployments.messages import ChatCall, ChatDelta, Sampling
from sharding.errors import Unavailable
from sharding.filters import Compare
from sharding.ids import Placement, ShardId, UserId
from sharding.placement import ShardReport
from sharding.scopes import Entity
from sharding.sealing import Unreadable, new_secret

NAMES = ("Anna", "Berta", "Clara", "Dora", "Emma", "Frida", "Greta", "Hanna")
FACTS = [f"boat {n} is called {name}" for n, name in enumerate(NAMES)]
QUESTION = "What is boat called?"


@pytest.fixture
async def redis(own_valkey: tuple[Redis, str]) -> Redis:
    await own_valkey[0].flushall()
    return own_valkey[0]


@pytest.fixture
def url(own_valkey: tuple[Redis, str]) -> str:
    return own_valkey[1]


async def test_a_user_larger_than_the_device_is_answered_from_lower_tiers_without_prefilling_a_fact(
    redis: Redis, url: str, tmp_path: Path
) -> None:
    async with tiered_shard("a", redis, url, tmp_path) as home:
        alice, bob = await home.owns("alice"), await home.owns("bob")
        for placement in (alice, bob):
            await home.told(placement, *(f"{fact} by {placement.user}" for fact in FACTS))
        for _ in range(3):
            for placement in (alice, bob):
                read, finished = await home.asked(placement, QUESTION, top_k=5)
                texts = {mark(f"{fact} by {placement.user}") for fact in FACTS}
                assert len(read) == 5
                assert set(read) <= texts
                assert finished.memory.fallback is None
                assert finished.memory.injected_tokens >= finished.memory.memory_tokens
        assert home.shard.tiers.counters["found_disk"] > 0
        assert home.shard.tiers.counters["found_none"] == 0


async def test_a_deleted_fact_is_in_no_file_when_that_is_confirmed(redis: Redis, url: str, tmp_path: Path) -> None:
    shared = {"chunk_shared_url": str(tmp_path / "shared"), "chunk_shared_bytes": 1 << 30}
    async with tiered_shard("a", redis, url, tmp_path, **shared) as home:
        alice = await home.owns("alice")
        ids = await home.told(alice, *FACTS)
        assert len(chunk_files(tmp_path / "disk")) == len(chunk_files(tmp_path / "shared")) == len(FACTS)
        engine = home.shard.engine
        assert isinstance(engine, DeterministicEngine)
        engine.encode = _nothing  # type: ignore[method-assign]  # what stood behind the fact is not encoded again
        await home.deleted(alice, ids[7])
        for folder in ("disk", "shared"):
            assert len(chunk_files(tmp_path / folder)) == len(FACTS) - 1
            assert not any(b"Hanna" in path.read_bytes() for path in chunk_files(tmp_path / folder))
        for fact in ids[:7]:
            await home.deleted(alice, fact)
        assert chunk_files(tmp_path) == []
        assert (await home.asked(alice, QUESTION))[0] == []


async def test_a_shard_that_starts_again_answers_from_its_files(redis: Redis, url: str, tmp_path: Path) -> None:
    async with tiered_shard("a", redis, url, tmp_path) as home:
        alice = await home.owns("alice")
        await home.told(alice, *FACTS)
    async with tiered_shard("b", redis, url, tmp_path) as home:
        alice = await home.owns("alice", alice)
        encoded = home.shard.engine.counters["encode_prefilled_tokens"]  # the head's
        read, finished = await home.asked(alice, QUESTION)
        assert sorted(read) == sorted(map(mark, FACTS))
        assert finished.memory.injected_tokens >= finished.memory.memory_tokens > 0
        assert home.shard.engine.counters["encode_prefilled_tokens"] == encoded


async def test_what_another_shard_deleted_meanwhile_is_neither_read_nor_kept(
    redis: Redis, url: str, tmp_path: Path
) -> None:
    async with tiered_shard("a", redis, url, tmp_path) as home:
        alice = await home.owns("alice")
        ids = await home.told(alice, *FACTS)
    async with tiered_shard("b", redis, url, tmp_path / "elsewhere") as other:
        alice = await other.owns("alice", alice)
        await other.deleted(alice, ids[-1])
    async with tiered_shard("c", redis, url, tmp_path) as home:
        alice = await home.owns("alice", alice)
        read, _ = await home.asked(alice, QUESTION)
        assert sorted(read) == sorted(map(mark, FACTS[:-1]))
        assert len(chunk_files(tmp_path / "disk")) == len(FACTS) - 1


async def test_with_an_encryption_key_no_file_is_readable_without_it_and_older_ones_are_removed(
    redis: Redis, url: str, tmp_path: Path
) -> None:
    one, another = new_secret(), new_secret()
    shared = {"chunk_shared_url": str(tmp_path / "shared"), "chunk_shared_bytes": 1 << 30}
    before: set[Path] = set()
    encoded: list[int] = []
    for turn, secret in enumerate((None, one, another, None, one)):
        user = UserId(f"alice-{secret}")
        async with tiered_shard(f"shard-{turn}", redis, url, tmp_path, encryption_key=secret, **shared) as home:
            alice = await home.owns(user, await home.directory.lookup(user))
            before_facts = home.shard.engine.counters["encode_prefilled_tokens"]
            await home.told(alice, *FACTS)
            encoded.append(home.shard.engine.counters["encode_prefilled_tokens"] - before_facts)
            read, finished = await home.asked(alice, QUESTION)
            assert sorted(read) == sorted(map(mark, FACTS))
            assert finished.memory.injected_tokens >= finished.memory.memory_tokens > 0
        local = set(chunk_files(tmp_path / "disk"))
        assert len(local) == len(FACTS) or turn > 2, "what is on the shared path need not be here, too"
        assert not local & before, "those of another key are gone"
        before = local
        for data in (path.read_bytes() for path in local):
            assert data.startswith(CLEAR) == (user.encode() in data) == (secret is None)
    assert all(encoded[:3])
    assert encoded[3:] == [0, 0], "the shared path still has what the same key had written"


async def test_a_damaged_file_is_served_as_text_and_encoded_again(redis: Redis, url: str, tmp_path: Path) -> None:
    async with tiered_shard("a", redis, url, tmp_path) as home:
        alice = await home.owns("alice")
        await home.told(alice, *FACTS)
    for path in chunk_files(tmp_path / "disk"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    async with tiered_shard("b", redis, url, tmp_path) as home:
        alice = await home.owns("alice", alice)
        for _ in range(2):
            read, finished = await home.asked(alice, QUESTION)
            assert sorted(read) == sorted(map(mark, FACTS))
            await _background(home)
        assert finished.memory.injected_tokens >= finished.memory.memory_tokens > 0


async def test_chunks_that_are_late_are_served_as_text_which_says_why(redis: Redis, url: str, tmp_path: Path) -> None:
    async with tiered_shard("a", redis, url, tmp_path) as home:
        alice = await home.owns("alice")
        await home.told(alice, *FACTS)
    async with tiered_shard("b", redis, url, tmp_path, chunk_load_deadline_s=0.05) as home:
        alice = await home.owns("alice", alice)
        engine = home.shard.engine
        assert isinstance(engine, DeterministicEngine)
        move, gate = engine.move, asyncio.Event()

        async def slow(asked: object) -> object:
            await gate.wait()
            return await move(asked)  # type: ignore[arg-type]

        engine.move = slow  # type: ignore[method-assign, assignment]
        read, finished = await home.asked(alice, QUESTION)
        assert sorted(read) == sorted(map(mark, FACTS))
        assert finished.memory.fallback is Reason.LATE
        gate.set()
        await home.shard.tiers.promote("alice", sorted(home.shard.tiers.ids_of("alice")), deadline_s=20.0)
        _, finished = await home.asked(alice, QUESTION)
        assert finished.memory.fallback is None


async def test_a_user_who_is_another_shards_now_leaves_no_file_on_the_local_disk(
    redis: Redis, url: str, tmp_path: Path
) -> None:
    async with tiered_shard("a", redis, url, tmp_path) as home:
        alice = await home.owns("alice")
        await home.told(alice, *FACTS)
        moved = await home.directory.switch(alice, ShardId("b"))
        assert moved == Placement(UserId("alice"), ShardId("b"), alice.epoch + 1)
        await home.shard.residents.left(UserId("alice"))
        assert chunk_files(tmp_path / "disk") == []


async def test_files_of_users_whom_another_shard_owns_or_who_have_no_facts_are_swept_away(
    redis: Redis, url: str, tmp_path: Path
) -> None:
    users = ("stays", "moved", "empty", "waits")
    async with tiered_shard("a", redis, url, tmp_path) as home:
        placed = {user: await home.owns(user) for user in users}
        for user, placement in placed.items():
            await home.told(placement, f"I am {user}")
    async with (
        tiered_shard("b", redis, url, tmp_path) as home,
        tiered_shard("c", redis, url, tmp_path / "elsewhere") as other,
    ):
        for shard in ("b", "c"):
            await home.directory.heartbeat(_report(shard), ShardId(shard), 60.0)
        await other.owns("moved", placed["moved"])
        empty = await other.owns("empty", placed["empty"])
        await other.shard.ask(ForgetCall("r", empty))
        await home.directory.release(empty)
        stays = await home.owns("stays", placed["stays"])
        await home.asked(stays, QUESTION)
        await home.shard.janitor(home.me, home.directory).sweep()
        left = {ChunkFormat().owner_of(path.read_bytes()[:HEADER_BYTES]) for path in chunk_files(tmp_path / "disk")}
        assert left == {"stays", "waits"}


async def test_shared_files_of_whom_nothing_is_kept_are_swept_away_by_one_shard(
    redis: Redis, url: str, tmp_path: Path
) -> None:
    """As where a shard died between Redis and the files, and nobody asked for the deletion again."""
    shared = {"chunk_shared_url": str(tmp_path / "shared"), "chunk_shared_bytes": 1 << 30, "chunk_disk_bytes": 0}
    async with tiered_shard("a", redis, url, tmp_path, **shared) as home:
        for user in ("kept", "gone"):
            placement = await home.owns(user)
            await home.told(placement, *FACTS)
        await home.shard.store.delete_all(placement)
    async with (
        tiered_shard("b", redis, url, tmp_path, **shared) as first,
        tiered_shard("c", redis, url, tmp_path, **shared) as second,
    ):
        for home in (first, second):
            await home.directory.heartbeat(_report(home.me), home.me, 60.0)
        await second.shard.janitor(second.me, second.directory).sweep_shared()
        assert len(chunk_files(tmp_path)) == 2 * len(FACTS)
        await first.shard.janitor(first.me, first.directory).sweep_shared()
        left = {ChunkFormat().owner_of(path.read_bytes()[:HEADER_BYTES]) for path in chunk_files(tmp_path)}
        assert (left, len(chunk_files(tmp_path))) == ({"kept"}, len(FACTS))


async def test_a_shard_whose_lease_ran_out_lets_go_of_whom_others_took_meanwhile(
    redis: Redis, url: str, tmp_path: Path
) -> None:
    async with tiered_shard("a", redis, url, tmp_path) as home:
        stays, taken = [await home.owns(user) for user in ("stays", "taken")]
        for placement in (stays, taken):
            await home.told(placement, *FACTS)
        janitor = home.shard.janitor(home.me, home.directory)
        await home.directory.switch(taken, ShardId("b"))
        await janitor.leave_strangers()
        assert home.shard.tiers.ids_of("taken"), "it cannot know"
        home.shard.table.lease.term += 1
        await janitor.leave_strangers()
        assert home.shard.tiers.ids_of("taken") == set()
        assert "taken" not in home.shard.table
        assert len(home.shard.tiers.ids_of("stays")) == len(chunk_files(tmp_path)) == len(FACTS)


async def test_a_shard_that_is_asked_to_let_go_of_its_own_user_does_not(redis: Redis, url: str, tmp_path: Path) -> None:
    async with tiered_shard("a", redis, url, tmp_path) as home:
        alice = await home.owns("alice")
        await home.told(alice, *FACTS)
        await home.shard.users.leave(alice.user)
        assert len(home.shard.tiers.ids_of("alice")) == len(FACTS)
        await home.directory.release(alice)
        await home.shard.users.leave(alice.user)
        assert home.shard.tiers.ids_of("alice") == set()
        assert chunk_files(tmp_path) == []


async def test_a_fact_whose_last_day_has_passed_is_neither_injected_nor_read_nor_found_nor_kept_as_a_chunk(
    redis: Redis, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tiered_shard("a", redis, url, tmp_path) as home:
        alice = await home.owns("alice")
        await home.told(alice, *FACTS[:2])
        await home.shard.ask(AddCall("t", alice, (FACTS[2],), expires_on="2030-06-01"))
        search = SearchCall("s", alice, QUESTION, threshold=-1.0)
        call = ChatCall("r", alice, ({"role": "user", "content": QUESTION},), Sampling(), "prompt", 9)

        async def read() -> list[set[str]]:
            """What an answer is given from, with chunks and without; and what a search finds."""
            await home.shard.encoder.settled("alice")
            await home.shard.tiers.writer.written()
            as_text = [event.text async for event in home.shard.chat(call) if isinstance(event, ChatDelta)]
            found = await home.shard.ask(search)
            marks = {mark(one.fact.text) for one in found}
            return [set((await home.asked(alice, QUESTION))[0]), set("".join(as_text).split(" ")[2:]), marks]

        monkeypatch.setattr("sharding.memory.today", lambda: "2030-06-01")
        assert await read() == [{mark(fact) for fact in FACTS[:3]}] * 3, "its last day has not passed"
        assert len(chunk_files(tmp_path)) == 3
        monkeypatch.setattr("sharding.memory.today", lambda: "2030-06-02")
        assert await read() == [{mark(fact) for fact in FACTS[:2]}] * 3
        assert len(home.shard.tiers.ids_of("alice")) == len(chunk_files(tmp_path)) == 2


async def test_who_was_told_with_a_key_that_is_lost_can_be_forgotten_and_nothing_else(
    redis: Redis, url: str, tmp_path: Path
) -> None:
    shared = {"chunk_shared_url": str(tmp_path / "shared"), "chunk_shared_bytes": 1 << 30, "tenant_bytes": 1 << 20}
    async with tiered_shard("a", redis, url, tmp_path, encryption_key=new_secret(), **shared) as home:
        placed = {user: await home.owns(user) for user in ("alice", "bob")}
        for placement in placed.values():
            await home.told(placement, *FACTS)
    async with tiered_shard("b", redis, url, tmp_path, encryption_key=new_secret(), **shared) as home:
        alice = await home.owns("alice", placed["alice"])
        for call in (
            ListCall("r", alice),
            SearchCall("r", alice, QUESTION),
            ForgetCall("r", alice, Compare("agent_id", "eq", "x")),
        ):
            with pytest.raises(Unreadable, match="encryption key"):
                await home.shard.ask(call)
        assert await home.shard.ask(ForgetCall("r", alice)) == len(FACTS)
        assert len(chunk_files(tmp_path)) == len(FACTS), "bob's, on the shared path"
        assert await home.shard.ask(ListCall("r", alice)) == FactPage(0, ())
        assert await home.shard.store.registry.owners_of("", Entity("user", "alice")) == []
        assert await home.told(alice, *FACTS)
    kinds = {key.rpartition(b"}:")[2] for key in await redis.keys("*{bob}*")}
    assert {b"facts", b"embeddings"} < kinds, "nothing of him was touched"


async def test_what_the_prefix_cache_has_of_a_deleted_fact_is_met_by_no_later_prompt(
    redis: Redis, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even by one that is the same: where the same facts are told once more in the same order."""
    async with tiered_shard("a", redis, url, tmp_path) as home:
        salts: dict[str, list[str | None]] = {"alice": [], "bob": []}
        engine = home.shard.engine
        assert isinstance(engine, DeterministicEngine)
        generate, encode, encoded = engine.generate, engine.encode, set[str]()

        def noted(id: str, plan: PromptPlan, *more: Any, **options: Any) -> Any:
            salts[asking].append(plan.salt)
            return generate(id, plan, *more, **options)

        async def encoding(id: str, tokens: Any, captures: Any, salt: str) -> Any:
            encoded.add(salt)
            return await encode(id, tokens, captures, salt)

        monkeypatch.setattr(engine, "generate", noted)
        monkeypatch.setattr(engine, "encode", encoding)
        placed = {user: await home.owns(user) for user in salts}
        for _ in range(2):
            for user, placement in placed.items():
                asking = user
                await home.told(placement, *FACTS)
                call = ChatCall("r", placement, ({"role": "user", "content": QUESTION},), Sampling(), "prompt", 9)
                for mode in ("inject", "prompt", "off"):
                    [_ async for _ in home.shard.chat(replace(call, mode=mode))]  # type: ignore[arg-type]
            await home.shard.ask(ForgetCall("r", placed["alice"]))
        assert len(set(salts["alice"])) == 2 * len(set(salts["alice"][:3])) == 4, "as text one, injected another"
        assert len(set(salts["bob"])) == 2, "nothing of his was deleted"
        assert len(encoded) == 3, "two of hers, one of his"


async def test_a_deletion_is_not_confirmed_while_a_file_system_cannot_be_looked_through(
    redis: Redis, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = {"chunk_shared_url": str(tmp_path / "shared"), "chunk_shared_bytes": 1 << 30}
    async with tiered_shard("a", redis, url, tmp_path, **shared) as home:
        alice = await home.owns("alice")
        await home.told(alice, *FACTS)
    async with tiered_shard("b", redis, url, tmp_path / "elsewhere", **shared) as home:
        alice = await home.owns("alice", alice)

        def lost(*_: object) -> None:
            raise OSError("Stale file handle")

        with monkeypatch.context() as broken:
            broken.setattr(LocalFiles, "entries", lost)
            broken.setattr(LocalFiles, "purge", lost)
            with pytest.raises(Unavailable, match="could not be removed"):
                await home.shard.ask(ForgetCall("r", alice))
            assert len(chunk_files(tmp_path / "shared")) == len(FACTS)
        await home.shard.ask(ForgetCall("r", alice))
        assert chunk_files(tmp_path / "shared") == []


def _report(shard: str) -> str:
    report = ShardReport(shard=ShardId(shard), model="m", ready=True, free_bytes=0, users=0, requests_in_flight=0)
    return report.model_dump_json()


async def _nothing(*_: object) -> set[str]:
    return set()


async def _background(home: TieredShard) -> None:
    async with asyncio.timeout(10):
        while home.shard.tiers._prefetching:  # noqa: ASYNC110  # nobody waits for it, so it tells nobody
            await asyncio.sleep(0.002)
    await home.shard.encoder.settled("alice")
