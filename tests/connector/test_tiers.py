"""Chunks move between device, host and files: what can be kept is, no budget is exceeded, no byte changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tier_home import TierHome, an_id

from connector.chunk import ChunkId
from connector.files import TEMPORARY
from sharding.errors import EngineFailed

Make = Callable[..., TierHome]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    homes: list[TierHome] = []

    def make(**sizes: int) -> TierHome:
        homes.append(TierHome(tmp_path, **sizes))
        return homes[-1]

    yield make
    await homes[-1].check()
    for home in homes:
        home.close()


async def test_what_leaves_the_device_waits_on_the_host_and_comes_back_unchanged(make: Make) -> None:
    home = make(device=2, host=4, ranks=2)
    alice = await home.encode("alice", 1, 2)
    await home.encode("bob", 1, 2)
    assert [home.in_host(id_) for id_ in alice] == [True, True]
    assert await home.promote("alice", alice) == 0
    assert all(map(home.on_device, alice))
    assert not any(map(home.in_host, alice))
    assert all(home.in_host(an_id("bob", n)) for n in (1, 2))


async def test_what_leaves_a_full_host_is_in_a_file_first_and_comes_back_unchanged(make: Make) -> None:
    home = make(device=1, host=1, disk=9, ranks=2)
    ids = [(await home.encode("alice", n))[0] for n in range(4)]
    await home.tiers.writer.written()
    for id_ in ids:
        assert await home.promote("alice", [id_]) == 0
        assert home.on_device(id_)


async def test_without_a_host_what_leaves_the_device_is_written_before_it_is_dropped(make: Make) -> None:
    home = make(device=2, host=0, disk=9)
    home.tiers.writer.encoded = _ignore  # type: ignore[method-assign]  # the background has not come to it yet
    ids = await home.encode("alice", 1, 2)
    await home.encode("bob", 1, 2)
    assert all(path.exists() for id_ in ids for path in home.files_of("alice", id_))
    assert await home.promote("alice", ids) == 0
    assert all(map(home.on_device, ids))


async def test_a_user_larger_than_the_device_is_served_from_below(make: Make) -> None:
    home = make(device=3, host=2, disk=20)
    ids = [id_ for n in range(0, 9, 3) for id_ in await home.encode("alice", n, n + 1, n + 2)]
    await home.tiers.writer.written()
    for wanted in (ids[:3], ids[3:6], [ids[8], ids[0], ids[4]]):
        assert await home.promote("alice", wanted) == 0
        assert all(map(home.on_device, wanted))


async def test_a_chat_that_needs_more_than_the_device_gets_the_front_of_its_prompt(make: Make) -> None:
    home = make(device=2, host=9)
    ids = [(await home.encode("alice", n))[0] for n in range(4)]
    assert await home.promote("alice", ids) == 2
    assert sum(map(home.on_device, ids)) == 2


async def test_what_is_in_use_stays_on_the_device(make: Make) -> None:
    home = make(device=2, host=4)
    alice, bob = await home.encode("alice", 1, 2), await home.encode("bob", 1)
    await home.promote("alice", alice)
    with home.tiers.device.pinned("alice", alice):
        assert await home.promote("bob", bob) == 1
        assert all(map(home.on_device, alice))
    assert await home.promote("bob", bob) == 0


async def test_a_session_that_opens_brings_its_chunks_but_takes_no_room_from_who_is_active(make: Make) -> None:
    home = make(device=2, host=4)
    alice = await home.encode("alice", 1, 2)
    home.now = 100.0
    await home.encode("bob", 1, 2)
    home.tiers.prefetch("alice", alice, spare_s=60.0, lost=_never)
    await _background(home)
    assert not any(map(home.on_device, alice))
    home.now = 200.0
    home.tiers.prefetch("alice", alice, spare_s=60.0, lost=_never)
    await _background(home)
    assert all(map(home.on_device, alice))


async def test_what_does_not_come_in_time_is_said_to_be_late_and_comes_all_the_same(make: Make) -> None:
    home = make(device=2, host=4)
    alice = await home.encode("alice", 1, 2)
    await home.encode("bob", 1, 2)
    home.workers.gate.clear()
    assert await home.tiers.promote("alice", alice, deadline_s=0.05) == 2
    assert home.tiers.counters["late_chunks"] == 2
    home.workers.gate.set()
    assert await home.promote("alice", alice) == 0
    assert all(map(home.on_device, alice))


async def test_workers_that_fail_lose_a_move_and_no_book_keeping(make: Make) -> None:
    home = make(device=2, host=2)
    alice = await home.encode("alice", 1, 2)
    await home.encode("bob", 1, 2)
    home.workers.breaks = EngineFailed("no answer")
    await home.promote("alice", alice)
    home.workers.breaks = None
    await home.encode("carol", 1)
    home.tiers.check_integrity()
    assert all(store.bytes <= store.budget_bytes for stores in home.workers.stores for store in stores)
    await home.forget([*alice, an_id("bob", 1), an_id("bob", 2)])


# -- forgetting -------------------------------------------------------------------------------------------------------


async def test_a_forgotten_chunk_is_in_no_tier(make: Make) -> None:
    home = make(device=1, host=1, disk=9, shared=9)
    ids = []
    for n in range(3):
        ids += await home.encode("alice", n)
        await home.tiers.writer.written()
    assert all(path.exists() for id_ in ids for tier in (0, 1) for path in home.files_of("alice", id_, tier))
    await home.forget(ids)
    assert not any(home.tiers.peek_held(id_) for id_ in ids)
    assert not any(path.exists() for id_ in ids for tier in (0, 1) for path in home.files_of("alice", id_, tier))
    assert {stores[0].bytes + stores[1].bytes for stores in home.workers.stores} == {0}


@pytest.mark.parametrize("where", ["to a file", "to the host", "to the device"])
async def test_a_chunk_forgotten_on_its_way_is_nowhere_when_that_is_confirmed(make: Make, where: str) -> None:
    home = make(device=1, host=1, disk=9 if where == "to a file" else 0)
    if where != "to a file":
        await home.encode("alice", 0)
    home.workers.gate.clear()
    (id_,) = (an_id("alice", 0),)
    if where == "to a file":
        await home.encode("alice", 0)
        moving = None
    elif where == "to the host":
        moving = asyncio.create_task(home.encode("bob", 0))
    else:
        home.workers.gate.set()
        await home.encode("bob", 0)
        home.workers.gate.clear()
        moving = asyncio.create_task(home.promote("alice", [id_]))
    await asyncio.sleep(0.02)
    forgetting = asyncio.create_task(home.forget([id_]))
    await asyncio.sleep(0.02)
    assert not forgetting.done(), "it is still being copied"
    assert not home.tiers.peek_held(id_), "and served no more"
    home.workers.gate.set()
    await forgetting
    if moving is not None:
        await moving
    assert not home.on_device(id_)
    assert not home.in_host(id_)
    if where == "to a file":
        assert not any(path.exists() for path in home.files_of("alice", id_))


async def test_a_user_who_left_leaves_files_only_where_the_next_owner_finds_them(make: Make) -> None:
    home = make(device=2, disk=9, shared=9)
    ids = await home.encode("alice", 1, 2)
    await home.tiers.writer.written()
    home.tiers.release("alice")
    await home.forget(home.tiers.ids_of("alice"))
    assert not any(path.exists() for id_ in ids for path in home.files_of("alice", id_, 0))
    assert all(path.exists() for id_ in ids for path in home.files_of("alice", id_, 1))
    other = make(device=2, disk=9, shared=9)
    await other.tiers.adopt("alice")
    assert await other.promote("alice", ids) == 0
    assert all(map(other.on_device, ids))


# -- everything, in whatever order ------------------------------------------------------------------------------------

OWNERS = ("alice", "bob", "carol")
owners = st.sampled_from(OWNERS)
numbers = st.integers(0, 3)


class TiersMachine(RuleBasedStateMachine):
    """Beside the tiers, the set of chunks that were encoded and not forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.home = self.loop.run_until_complete(self._home())
        self.known: set[tuple[str, ChunkId]] = set()

    async def _home(self) -> TierHome:
        import tempfile

        self.folder = tempfile.TemporaryDirectory(prefix="memshard-test-")
        return TierHome(Path(self.folder.name), device=4, host=2, disk=5, shared=7, ranks=2)

    @rule(owner=owners, some=st.sets(numbers, min_size=1, max_size=3))
    def encode(self, owner: str, some: set[int]) -> None:
        new = [n for n in some if not self.home.tiers.peek_held(an_id(owner, n))]
        self.known.update((owner, id_) for id_ in self.loop.run_until_complete(self.home.encode(owner, *new)))

    @rule(owner=owners, some=st.sets(numbers, min_size=1, max_size=3))
    def promote(self, owner: str, some: set[int]) -> None:
        ids = [an_id(owner, n) for n in some]
        held = [id_ for id_ in ids if self.home.tiers.peek_held(id_)]
        assert self.loop.run_until_complete(self.home.promote(owner, ids)) == 0
        assert all(map(self.home.on_device, held))

    @rule(owner=owners, some=st.sets(numbers, min_size=1, max_size=3))
    def forget(self, owner: str, some: set[int]) -> None:
        ids = {an_id(owner, n) for n in some}
        self.loop.run_until_complete(self.home.forget(ids))
        self.known -= {(owner, id_) for id_ in ids}
        assert not any(self.home.tiers.peek_held(id_) for id_ in ids)

    @rule()
    def everything_is_written(self) -> None:
        self.loop.run_until_complete(self.home.tiers.writer.written())

    @invariant()
    def what_is_held_was_encoded_and_budgets_hold(self) -> None:
        held = {(owner, id_) for owner in OWNERS for id_ in self.home.tiers.ids_of(owner)}
        assert held <= self.known
        self.home.tiers.check_integrity()

    def teardown(self) -> None:
        self.loop.run_until_complete(self.home.check())
        self.home.close()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()
        self.folder.cleanup()


TiersMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=25)
TestTiersMachine = TiersMachine.TestCase


# -- after a restart --------------------------------------------------------------------------------------------------


async def test_a_shard_that_starts_anew_finds_its_files(make: Make) -> None:
    home = make(device=2, disk=9, ranks=2)
    ids = await home.encode("alice", 1, 2)
    await home.tiers.writer.written()
    home.close()
    again = make(device=2, disk=9, ranks=2)
    await again.tiers.open()
    assert again.tiers.ids_of("alice") == set(ids)
    assert await again.promote("alice", ids) == 0
    assert all(map(again.on_device, ids))


async def test_two_shards_of_a_machine_have_a_directory_each(make: Make) -> None:
    assert make(disk=9).tiers.files[0].url != make(disk=9).tiers.files[0].url


async def test_a_start_removes_what_is_half_written_of_another_model_of_one_rank_only_or_beyond_the_budget(
    make: Make,
) -> None:
    home = make(device=4, disk=9, ranks=2)
    old = await home.encode("alice", 1, 2)
    await home.tiers.writer.written()
    await home.encode("bob", 1, 2)
    await home.tiers.writer.written()
    (part, _) = home.files_of("bob", an_id("bob", 1))
    part.unlink()
    half = home.files_of("bob", an_id("bob", 2))[0].with_name(f"{TEMPORARY}1")
    half.write_bytes(b"half")
    foreign = Path(home.tiers.files[0].url) / ("0" * 32) / "ab" / "cd" / part.name
    foreign.parent.mkdir(parents=True)
    foreign.write_bytes(b"another model's")
    home.close()
    again = make(device=4, disk=2, ranks=2)
    await again.tiers.open()
    assert not half.exists()
    assert not foreign.exists()
    assert again.tiers.ids_of("bob") == {an_id("bob", 2)}, "the latest stay"
    assert len(again.tiers.ids_of("alice") & set(old)) == 1


async def _never() -> None:
    pytest.fail("nothing was lost")


async def _ignore(owner: str, ids: object) -> None: ...


async def _background(home: TierHome) -> None:
    async with asyncio.timeout(10):
        while home.tiers._prefetching:  # noqa: ASYNC110  # nobody waits for it, so it tells nobody
            await asyncio.sleep(0.002)
