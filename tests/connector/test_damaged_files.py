"""A chunk's file that is not, byte for byte, what was written for this chunk is no chunk; a file system that fails
loses nothing but itself."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tier_home import DIGEST, TierHome, an_id

from connector.chunk_file import HEADER_BYTES, Damaged, Label, header_of, position_of
from connector.file_tier import ILL_S
from connector.files import Entry, LocalFiles, RemoteFiles, name_of, open_files, owner_key
from sharding.errors import Unavailable

ALICE = an_id("alice", 0)
LABEL = Label(DIGEST, 1, "alice", ALICE, 3)
PAYLOAD = bytes(range(48))
HEADER = header_of(LABEL, 17, memoryview(PAYLOAD))


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[TierHome]:
    """Alice's and Bob's first chunks are on disk only."""
    home = TierHome(tmp_path, device=1, host=0, disk=9, ranks=2)
    for owner in ("alice", "bob", "carol"):
        await home.encode(owner, 0)
        await home.tiers.writer.written()
    try:
        yield home
        await home.check()
    finally:
        home.close()


# -- the format -------------------------------------------------------------------------------------------------------


def test_a_file_tells_the_position_to_who_looks_for_its_chunk() -> None:
    assert len(HEADER) == HEADER_BYTES
    assert position_of(HEADER, memoryview(PAYLOAD), LABEL) == 17


@given(st.integers(0, 8 * (HEADER_BYTES + len(PAYLOAD)) - 1))
def test_one_bit_flipped_anywhere_is_noticed(bit: int) -> None:
    data = bytearray(HEADER + PAYLOAD)
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Damaged):
        position_of(data[:HEADER_BYTES], memoryview(data)[HEADER_BYTES:], LABEL)


@pytest.mark.parametrize(
    "label",
    [
        Label("0" * 32, 1, "alice", ALICE, 3),
        Label(DIGEST, 0, "alice", ALICE, 3),
        Label(DIGEST, 1, "bob", ALICE, 3),
        Label(DIGEST, 1, "alice", an_id("alice", 1), 3),
        Label(DIGEST, 1, "alice", ALICE, 4),
    ],
    ids=["model", "rank", "user", "chunk", "length"],
)
def test_a_whole_file_of_something_else_is_not_taken(label: Label) -> None:
    with pytest.raises(Damaged, match="another chunk's"):
        position_of(HEADER, memoryview(PAYLOAD), label)


@pytest.mark.parametrize("owner", ["", "\ud800", "{}", "a" * 256, "\U0001f600" * 256])
def test_any_user_id_has_a_file(owner: str) -> None:
    label = Label(DIGEST, 0, owner, ALICE, 3)
    assert position_of(header_of(label, 2, memoryview(PAYLOAD)), memoryview(PAYLOAD), label) == 2


# -- what a reader makes of it ----------------------------------------------------------------------------------------


def _truncate(path: Path, home: TierHome) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _empty(path: Path, home: TierHome) -> None:
    os.truncate(path, 0)


def _lengthen(path: Path, home: TierHome) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _flip_in_label(path: Path, home: TierHome) -> None:
    _flip(path, 40)


def _flip_in_payload(path: Path, home: TierHome) -> None:
    _flip(path, HEADER_BYTES + 5)


def _leave_half_written(path: Path, home: TierHome) -> None:
    path.write_bytes(path.read_bytes()[:HEADER_BYTES] + bytes(path.stat().st_size - HEADER_BYTES))


def _put_bobs_there(path: Path, home: TierHome) -> None:
    shutil.copy(home.files_of("bob", an_id("bob", 0))[0], path)


def _put_the_other_ranks_there(path: Path, home: TierHome) -> None:
    shutil.copy(home.files_of("alice", ALICE)[1], path)


def _lose(path: Path, home: TierHome) -> None:
    path.unlink()


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        _truncate,
        _empty,
        _lengthen,
        _flip_in_label,
        _flip_in_payload,
        _leave_half_written,
        _put_bobs_there,
        _put_the_other_ranks_there,
        _lose,
    ],
)
async def test_a_damaged_file_is_a_missing_chunk_whose_files_go(
    home: TierHome, damage: Callable[[Path, TierHome], None]
) -> None:
    damage(home.files_of("alice", ALICE)[0], home)
    assert await home.promote("alice", [ALICE]) == 0
    assert not home.on_device(ALICE)
    assert not home.tiers.peek_held(ALICE), "it is to be encoded again"
    assert home.tiers.counters["bad_files"] == 1
    assert not any(path.exists() for path in home.files_of("alice", ALICE))
    assert await home.promote("bob", [an_id("bob", 0)]) == 0
    assert home.on_device(an_id("bob", 0))
    await home.encode("alice", 0)
    assert home.on_device(ALICE)


# -- file systems that fail -------------------------------------------------------------------------------------------


async def test_a_full_disk_loses_the_tier_and_nothing_else(home: TierHome, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", full)
        await home.encode("dave", 0)
        await home.tiers.writer.written()
    dave = an_id("dave", 0)
    assert home.on_device(dave), "what is in memory stays there"
    assert home.tiers.files[0].ill
    assert not any(path.exists() for path in home.files_of("dave", dave))
    assert not list(Path(home.tiers.files[0].url).rglob(".tmp-*"))  # noqa: ASYNC240
    home.now += ILL_S
    assert await home.promote("alice", [ALICE]) == 0
    assert home.on_device(ALICE)


async def test_a_deletion_is_not_confirmed_while_its_file_cannot_be_removed_and_is_when_it_can(
    home: TierHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as broken:
        broken.setattr(Path, "unlink", read_only)
        with pytest.raises(Unavailable):
            await home.forget([ALICE])
        with pytest.raises(Unavailable):
            await home.tiers.remove(())
    assert not home.tiers.peek_held(ALICE), "it is served no more all the same"
    await home.tiers.remove(())
    assert not any(path.exists() for path in home.files_of("alice", ALICE))


# -- file systems -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_a_file_system_keeps_lists_and_removes(kind: str, tmp_path: Path) -> None:
    url = str(tmp_path) if kind == "local" else f"memory://test-{tmp_path.name}"
    files = open_files(url)
    assert isinstance(files, LocalFiles if kind == "local" else RemoteFiles)
    alice, bob = owner_key("alice"), owner_key("bob")
    names = [name_of(DIGEST, key, ALICE, rank) for key, rank in ((alice, 0), (alice, 1), (bob, 0))]
    assert list(files.entries(DIGEST, alice)) == []
    for name in names:
        files.write(name, [HEADER, memoryview(PAYLOAD)])
    header, payload = bytearray(HEADER_BYTES), bytearray(len(PAYLOAD))
    files.read(names[1], header, memoryview(payload))
    assert (bytes(header), bytes(payload)) == (HEADER, PAYLOAD)
    assert files.peek_header(names[1]) == HEADER
    with pytest.raises(Damaged):
        files.read(names[1], header, memoryview(bytearray(len(PAYLOAD) + 1)))
    with pytest.raises(FileNotFoundError):
        files.read(name_of(DIGEST, bob, ALICE, 7), header, memoryview(payload))
    found = {entry._replace(used_at=0.0) for entry in files.entries(DIGEST, alice)}
    assert found == {Entry(alice, ALICE, rank, HEADER_BYTES + len(PAYLOAD), 0.0) for rank in (0, 1)}
    assert len(list(files.entries(DIGEST))) == 3
    files.touch(DIGEST, alice)
    files.remove([*names[:2], "not/there"])
    assert list(files.entries(DIGEST, alice)) == []
    assert len(list(files.entries(DIGEST))) == 1


async def test_users_find_their_chunks_in_a_remote_store_too(tmp_path: Path) -> None:
    url = f"memory://shared-{tmp_path.name}"
    home = TierHome(device=2, shared=9, shared_url=url, ranks=2)
    ids = await home.encode("alice", 1, 2)
    await home.tiers.writer.written()
    other = TierHome(device=2, shared=9, shared_url=url, ranks=2)
    await other.tiers.adopt("alice")
    assert await other.promote("alice", ids) == 0
    assert all(map(other.on_device, ids))
    await other.forget(ids)
    third = TierHome(device=2, shared=9, shared_url=url, ranks=2)
    await third.tiers.adopt("alice")
    assert third.tiers.ids_of("alice") == set()
    for each in (home, other, third):
        each.close()
