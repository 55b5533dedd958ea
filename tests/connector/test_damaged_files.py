"""A chunk's file that is not, byte for byte, what was written for this chunk is no chunk; a file system that fails
loses nothing but itself."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tier_home import DIGEST, TierHome, an_id

from connector.chunk_file import HEADER_BYTES, PIECE_BYTES, ChunkFormat, Damaged, Label
from connector.file_tier import ILL_S
from connector.files import (
    TEMPORARY_S,
    Entry,
    LocalFiles,
    RemoteFiles,
    directory_of,
    name_of,
    open_files,
    owner_key,
)
from sharding.errors import Unavailable

ALICE = an_id("alice", 0)
LABEL = Label(DIGEST, 1, "alice", ALICE, 3)
PAYLOAD = bytes(range(48))
KEY, ANOTHER = bytes(range(32)), bytes(32)
FORMATS = {"clear": ChunkFormat(), "sealed": ChunkFormat(KEY)}


def written(format: ChunkFormat, label: Label = LABEL, payload: bytes = PAYLOAD) -> bytes:
    pieces, header = format.writing(label, 17, memoryview(payload))
    data = b"".join(pieces)
    return header() + data


FILES = {name: written(format) for name, format in FORMATS.items()}


def read(format: ChunkFormat, data: bytes | bytearray, label: Label = LABEL) -> tuple[int, bytes]:
    payload = bytearray(data[HEADER_BYTES:])
    position = format.position_of(data[:HEADER_BYTES], memoryview(payload), label)
    return position, bytes(payload)


@pytest.fixture(params=[None, KEY], ids=FORMATS)
async def home(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[TierHome]:
    """Alice's and Bob's first chunks are on disk only."""
    home = TierHome(tmp_path, device=1, host=0, disk=9, ranks=2, key=request.param)
    for owner in ("alice", "bob", "carol"):
        await home.encode(owner, 0)
        await home.tiers.writer.written()
    try:
        yield home
        await home.check()
    finally:
        home.close()


# -- the format -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("payload", [PAYLOAD, bytes(2 * PIECE_BYTES), bytes(PIECE_BYTES + 1)], ids=len)
@pytest.mark.parametrize("form", FORMATS)
def test_a_file_tells_position_and_payload_to_who_looks_for_its_chunk(form: str, payload: bytes) -> None:
    data = written(FORMATS[form], payload=payload)
    assert len(data) == HEADER_BYTES + len(payload)
    assert read(FORMATS[form], data) == (17, payload)
    assert FORMATS[form].owner_of(data[:HEADER_BYTES]) == "alice"


@pytest.mark.parametrize("form", FORMATS)
@given(bit=st.integers(0, 8 * (HEADER_BYTES + len(PAYLOAD)) - 1))
def test_one_bit_flipped_anywhere_is_noticed(form: str, bit: int) -> None:
    data = bytearray(FILES[form])
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Damaged):
        read(FORMATS[form], data)


@pytest.mark.parametrize(
    ("form", "reader"),
    [("clear", ChunkFormat(KEY)), ("sealed", ChunkFormat()), ("sealed", ChunkFormat(ANOTHER))],
    ids=["in the clear while there is a key", "sealed while there is none", "sealed with another"],
)
def test_a_file_that_was_not_written_with_the_readers_key_is_not_taken(form: str, reader: ChunkFormat) -> None:
    with pytest.raises(Damaged, match="encrypted"):
        read(reader, FILES[form])
    with pytest.raises(Damaged, match="encrypted"):
        reader.owner_of(FILES[form][:HEADER_BYTES])


def test_a_sealed_file_tells_nothing_and_no_two_are_alike() -> None:
    secret = Label(DIGEST, 0, "alice in wonderland", ALICE, 3)
    one, two = (written(ChunkFormat(KEY), secret, b"A" * 4096) for _ in range(2))
    assert not any(word in one for word in (b"alice", b"wonderland", ALICE.encode(), DIGEST.encode(), b"AAAA"))
    assert one[8:] != two[8:]
    assert not set(blocks(one[HEADER_BYTES:])) & set(blocks(two[HEADER_BYTES:]))
    parts = one[:HEADER_BYTES] + two[HEADER_BYTES:]
    with pytest.raises(Damaged, match="sealed"):
        read(ChunkFormat(KEY), parts, secret)


def blocks(data: bytes) -> list[bytes]:
    return [data[at : at + 16] for at in range(0, len(data), 16)]


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
@pytest.mark.parametrize("form", FORMATS)
def test_a_whole_file_of_something_else_is_not_taken(form: str, label: Label) -> None:
    with pytest.raises(Damaged, match="another chunk's"):
        read(FORMATS[form], FILES[form], label)


@pytest.mark.parametrize("owner", ["", "\ud800", "{}", "a" * 256, "\U0001f600" * 256])
@pytest.mark.parametrize("form", FORMATS)
def test_any_user_id_has_a_file(form: str, owner: str) -> None:
    label = Label(DIGEST, 0, owner, ALICE, 3)
    assert read(FORMATS[form], written(FORMATS[form], label), label) == (17, PAYLOAD)


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


def _seal_it_or_write_it_in_the_clear(path: Path, home: TierHome) -> None:
    is_clear = path.read_bytes()[:8] == FILES["clear"][:8]
    _write_as(FORMATS["sealed" if is_clear else "clear"], path)


def _write_it_with_another_key(path: Path, home: TierHome) -> None:
    _write_as(ChunkFormat(ANOTHER), path)


def _write_as(format: ChunkFormat, path: Path) -> None:
    path.write_bytes(written(format, Label(DIGEST, 0, "alice", ALICE, 3), bytes(path.stat().st_size - HEADER_BYTES)))


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
        _seal_it_or_write_it_in_the_clear,
        _write_it_with_another_key,
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


HEADER = FILES["clear"][:HEADER_BYTES]


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_a_file_system_keeps_lists_and_removes(kind: str, tmp_path: Path) -> None:
    url = str(tmp_path) if kind == "local" else f"memory://test-{tmp_path.name}"
    files = open_files(url)
    assert isinstance(files, LocalFiles if kind == "local" else RemoteFiles)
    alice, bob = owner_key("alice"), owner_key("bob")
    names = [name_of(DIGEST, key, ALICE, rank) for key, rank in ((alice, 0), (alice, 1), (bob, 0))]
    assert list(files.entries(DIGEST, alice)) == []
    for name in names:
        files.write(name, [memoryview(PAYLOAD)], lambda: HEADER)
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


@pytest.mark.parametrize("kind", ["local", "remote"])
def test_all_of_a_user_goes_but_what_is_to_be_kept_and_nothing_of_anybody_else(kind: str, tmp_path: Path) -> None:
    files = open_files(str(tmp_path) if kind == "local" else f"memory://purge-{tmp_path.name}")
    alice, bob, other = owner_key("alice"), owner_key("bob"), "0" * 32
    kept, gone = an_id("alice", 0), an_id("alice", 1)
    names = [name_of(digest, key, id_, 0) for digest in (DIGEST, other) for key in (alice, bob) for id_ in (kept, gone)]
    files.purge(DIGEST, alice, None)  # there is nothing at all yet
    for name in names:
        files.write(name, [memoryview(PAYLOAD)], lambda: HEADER)
    if kind == "local":
        for name, age_s in ((".tmp-old", 2 * TEMPORARY_S), (".tmp-new", 0.0)):
            half = tmp_path / directory_of(DIGEST, alice) / name
            half.write_bytes(b"half a chunk")
            os.utime(half, (time.time() - age_s,) * 2)
    files.purge(DIGEST, alice, lambda id_: id_ == kept)
    assert {(digest, entry.id) for digest in (DIGEST, other) for entry in files.entries(digest, alice)} == {
        (DIGEST, kept)
    }
    if kind == "local":
        left = sorted(path.name for path in (tmp_path / directory_of(DIGEST, alice)).iterdir())
        assert left == sorted([f"{kept}.0", ".tmp-new"]), "what is being written is left alone"
    files.purge(DIGEST, alice, None)
    assert not [entry for digest in (DIGEST, other) for entry in files.entries(digest, alice)]
    assert not (tmp_path / directory_of(DIGEST, alice)).exists()
    assert len([entry for digest in (DIGEST, other) for entry in files.entries(digest, bob)]) == 4


def test_a_file_that_is_written_while_all_of_a_user_goes_goes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, alice = open_files(str(tmp_path)), owner_key("alice")
    first, *late = [name_of(DIGEST, alice, an_id("alice", n), 0) for n in range(2)]
    files.write(first, [memoryview(PAYLOAD)], lambda: HEADER)
    rmdir = os.rmdir

    def beaten(path: str, **options: int) -> None:
        if late:
            files.write(late.pop(), [memoryview(PAYLOAD)], lambda: HEADER)
        rmdir(path, **options)

    monkeypatch.setattr(os, "rmdir", beaten)
    files.purge(DIGEST, alice, None)
    assert not late
    assert not (tmp_path / directory_of(DIGEST, alice)).exists()


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
