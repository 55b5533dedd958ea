"""Where chunk files lie: a directory of this machine, or any other file system that fsspec knows.

    <root>/<digest of the model>/<first two of the owner's key>/<owner's key>/<chunk id>.<rank>

One file a chunk and rank: a fact is deleted by removing its files, and a user is a directory. The owner's key is a
digest of the user's id, which may be anything.

A file appears under its name when all of it is durable (temporary name, fsync, rename), or not at all; an object store
does the same with one put. Errors are OSError.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TextIO

import fsspec

from connector.chunk import ChunkId
from connector.chunk_file import HEADER_BYTES, Damaged, Pieces

TEMPORARY = ".tmp-"
TEMPORARY_S = 60.0
"""How old a temporary file is that nobody writes to any more."""

ID_DIGITS = 32


Keeps = Callable[[ChunkId], bool]


class Entry(NamedTuple):
    """One rank's file of a chunk; `used_at` is when its owner's directory last changed, in seconds of the epoch."""

    owner_key: str
    id: ChunkId
    rank: int
    size: int
    used_at: float


def owner_key(owner: str) -> str:
    """The directory of a user (or of nobody: "")."""
    return hashlib.blake2b(owner.encode(errors="surrogatepass"), digest_size=16, person=b"memshard-owner").hexdigest()


def directory_of(digest: str, key: str) -> str:
    """A user's directory below the root."""
    return f"{digest}/{key[:2]}/{key}"


def name_of(digest: str, key: str, id_: ChunkId, rank: int) -> str:
    """A file's name below the root."""
    return f"{directory_of(digest, key)}/{id_}.{rank}"


class Files(Protocol):
    """What tiers need of a file system. Names are relative to its root."""

    def write(self, name: str, payload: Pieces, header: Callable[[], bytes]) -> None:
        """A file of `HEADER_BYTES` and the payload, durable under its name when this returns. The header is asked for
        when the payload has gone by."""

    def read(self, name: str, header: bytearray, payload: memoryview) -> None:
        """Fills both from the file's start. Raises `Damaged` for one of another length, FileNotFoundError."""

    def peek_header(self, name: str) -> bytes:
        """The first `HEADER_BYTES`, or what there is of them."""

    def remove(self, names: Iterable[str]) -> None:
        """Names that do not exist are passed over."""

    def entries(self, digest: str, key: str | None = None) -> Iterator[Entry]:
        """One user's files, or all of a model's; what is none of ours is not told."""

    def touch(self, digest: str, key: str) -> None:
        """The user's files were used."""

    def purge(self, digest: str, key: str, keep: Keeps | None) -> None:
        """Removes all of a user, also what other models left, but for the chunks under `digest` that are to be kept."""


class LocalFiles:
    """Below a directory of this machine (or one that is mounted like one)."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @staticmethod
    def take(base: Path) -> tuple[Path, TextIO]:
        """The first of the numbered directories below `base` that no living process holds, and what holds it until it
        is closed or this process ends: after a restart, shards find what shards before them left. Raises OSError."""
        for number in itertools.count():
            directory = base / str(number)
            directory.mkdir(parents=True, exist_ok=True)
            lock = (directory / "lock").open("w")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                continue
            return directory, lock
        raise AssertionError("numbers end")

    def write(self, name: str, payload: Pieces, header: Callable[[], bytes]) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
        try:
            with temporary.open("xb", buffering=0) as file:
                file.seek(HEADER_BYTES)
                for part in payload:
                    _write_all(file.fileno(), memoryview(part))
                file.seek(0)
                _write_all(file.fileno(), memoryview(header()))
                os.fsync(file.fileno())
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _fsync_directory(path.parent)

    def read(self, name: str, header: bytearray, payload: memoryview) -> None:
        with (self.root / name).open("rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size != len(header) + len(payload):
                raise Damaged("its length is not a chunk's")
            for part in (memoryview(header), payload):
                done = 0
                while done < len(part):
                    got = file.readinto(part[done:])
                    if not got:
                        raise Damaged("it ends too early")
                    done += got

    def peek_header(self, name: str) -> bytes:
        with (self.root / name).open("rb") as file:
            return file.read(HEADER_BYTES)

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            (self.root / name).unlink(missing_ok=True)

    def entries(self, digest: str, key: str | None = None) -> Iterator[Entry]:
        base = self.root / digest
        users = [self.root / directory_of(digest, key)] if key is not None else base.glob("*/*")
        for user in users:
            try:
                used_at = user.stat().st_mtime
                with os.scandir(user) as found:
                    for file in found:
                        if (part := _part(file.name)) is not None:
                            yield Entry(user.name, *part, file.stat().st_size, used_at)
            except FileNotFoundError:
                continue

    def touch(self, digest: str, key: str) -> None:
        with suppress(FileNotFoundError):
            os.utime(self.root / directory_of(digest, key))

    def purge(self, digest: str, key: str, keep: Keeps | None) -> None:
        for user in self.root.glob(f"*/{key[:2]}/{key}"):
            if keep is None or user.parent.parent.name != digest:
                _remove_tree(user)
                continue
            for file in user.iterdir():
                part = _part(file.name)
                if (part is None and _age_s(file) > TEMPORARY_S) or (part is not None and not keep(part[0])):
                    file.unlink(missing_ok=True)

    def abandoned(self) -> Iterator[LocalFiles]:
        """The directories beside this one that no living process holds (see `take`); each is held while it is out."""
        for directory in self.root.parent.glob("[0-9]*"):
            if directory == self.root or not directory.name.isdecimal():
                continue
            with (directory / "lock").open("w") as lock, suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield LocalFiles(directory)

    def sweep(self, digest: str) -> None:
        """Removes what a process left half-written when it ended, empty directories, and every other model's files: for
        a directory that is one shard's alone, before it is used."""
        for other in [path for path in self.root.glob("*") if path.is_dir() and path.name != digest]:
            shutil.rmtree(other)
        for temporary in (self.root / digest).glob(f"*/*/{TEMPORARY}*"):
            temporary.unlink(missing_ok=True)
        for user in (self.root / digest).glob("*/*"):
            if not any(user.iterdir()):
                user.rmdir()


class RemoteFiles:
    """Below a URL that fsspec opens. Durability and atomicity are those of the store behind it; what it does not keep
    whole, the checksum finds."""

    def __init__(self, url: str) -> None:
        self._fs: Any
        self._fs, root = fsspec.core.url_to_fs(url)
        self._root = str(root).rstrip("/")

    def write(self, name: str, payload: Pieces, header: Callable[[], bytes]) -> None:
        path = f"{self._root}/{name}"
        parts = [b"", *payload]
        parts[0] = header()
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._fs.pipe_file(path, b"".join(parts))

    def read(self, name: str, header: bytearray, payload: memoryview) -> None:
        data = memoryview(self._fs.cat_file(f"{self._root}/{name}"))
        if len(data) != len(header) + len(payload):
            raise Damaged("its length is not a chunk's")
        header[:] = data[: len(header)]
        payload[:] = data[len(header) :]

    def peek_header(self, name: str) -> bytes:
        return bytes(self._fs.cat_file(f"{self._root}/{name}", start=0, end=HEADER_BYTES))

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            try:
                self._fs.rm_file(f"{self._root}/{name}")
            except FileNotFoundError:
                continue

    def entries(self, digest: str, key: str | None = None) -> Iterator[Entry]:
        below = directory_of(digest, key) if key is not None else digest
        self._fs.invalidate_cache()  # others write here, too
        try:
            found = self._fs.find(f"{self._root}/{below}", detail=True)
        except FileNotFoundError:
            return
        for path, about in found.items():
            directory, _, name = str(path).rpartition("/")
            if (part := _part(name)) is not None:
                yield Entry(directory.rpartition("/")[2], *part, int(about["size"] or 0), 0.0)

    def touch(self, digest: str, key: str) -> None:
        """Object stores know no directories: after a restart their users count as equally old."""

    def purge(self, digest: str, key: str, keep: Keeps | None) -> None:
        self._fs.invalidate_cache()
        try:
            models = [str(path).rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._root, detail=False)]
        except FileNotFoundError:
            return
        for model in models:
            try:
                found = self._fs.find(f"{self._root}/{directory_of(model, key)}")
            except FileNotFoundError:
                continue
            for path in map(str, found):
                part = _part(path.rpartition("/")[2])
                if model != digest or part is None or keep is None or not keep(part[0]):
                    self._fs.rm_file(path)


def open_files(url: str) -> Files:
    """The file system behind a path or URL. Raises ValueError or ImportError for one that fsspec cannot open."""
    local = url.removeprefix("file://")
    return RemoteFiles(url) if "://" in local else LocalFiles(Path(local))


def _part(name: str) -> tuple[ChunkId, int] | None:
    id_, _, rank = name.partition(".")
    if len(id_) == ID_DIGITS and rank.isdecimal() and set(id_) <= set("0123456789abcdef"):
        return ChunkId(id_), int(rank)
    return None


def _remove_tree(directory: Path) -> None:
    for _ in range(3):  # others may remove it, too, or write to it for a last time
        try:
            shutil.rmtree(directory)
        except OSError as error:
            if error.errno not in {errno.ENOENT, errno.ENOTEMPTY}:
                raise
        if not directory.exists():
            return
    raise OSError(f"{directory} could not be removed")


def _age_s(file: Path) -> float:
    try:
        return time.time() - file.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _write_all(descriptor: int, part: memoryview) -> None:
    part = part.cast("B")
    while part:
        part = part[os.write(descriptor, part) :]


def _fsync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
