"""One tier of files as the shard's process sees it: a ledger of what is there, and what still has to be removed.

Files are counted before they are written and removed before others take their place, so the bytes of this shard's users
never exceed the budget. What could not be removed is kept in mind and tried again with every later removal.

A tier that fails (a full disk, a lost mount) is left alone for a while: its chunks are missing then, nothing else is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TextIO

from connector.chunk import ChunkId
from connector.chunk_file import HEADER_BYTES, ChunkFormat, Damaged
from connector.eviction import Evicted
from connector.files import Entry, LocalFiles, name_of, open_files, owner_key
from connector.ledger import ChunkLedger
from sharding.errors import Unavailable

ILL_S = 30.0
"""How long a tier that failed is left alone."""

log = logging.getLogger(__name__)


class FileTier:
    """`token_bytes` is what a token takes over all `ranks`. A tier with a `lock` is this shard's alone (`exclusive`):
    what it holds is known from `open` on. In any other, files of a user are looked for when the user comes (`adopt`).
    """

    def __init__(
        self,
        name: str,
        url: str,
        budget_bytes: int,
        *,
        token_bytes: int,
        ranks: int,
        digest: str,
        lock: TextIO | None = None,
        key: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.url = url
        self.exclusive = lock is not None
        self._lock = lock
        self.ledger = ChunkLedger(budget_bytes, token_bytes, clock, chunk_bytes=ranks * HEADER_BYTES)
        self.files = open_files(url)
        self._format = ChunkFormat(key)
        self._ranks = ranks
        self._digest = digest
        self._clock = clock
        self._ill_until = 0.0
        self._doomed: set[tuple[str, ChunkId]] = set()  # struck out, and perhaps still there
        self._removing = asyncio.Lock()

    @property
    def ill(self) -> bool:
        """Whether it failed a moment ago."""
        return self._clock() < self._ill_until

    def failed(self, why: object) -> None:
        """Leave the tier alone for a while."""
        if not self.ill:
            log.error("The %s tier at %s fails and is left alone for %.0f s: %s", self.name, self.url, ILL_S, why)
        self._ill_until = self._clock() + ILL_S

    async def open(self) -> None:
        """Counts what an exclusive tier holds, the users of long ago first; removes what cannot be used."""
        if not self.exclusive:
            return
        try:
            if isinstance(self.files, LocalFiles):
                await asyncio.to_thread(self.files.sweep, self._digest)
            found = await asyncio.to_thread(lambda: list(self.files.entries(self._digest)))
        except OSError as error:
            self.failed(error)
            return
        by_user: defaultdict[str, list[Entry]] = defaultdict(list)
        for entry in found:
            by_user[entry.owner_key].append(entry)
        latest_first = sorted(by_user, key=lambda key: by_user[key][0].used_at, reverse=True)
        for key in latest_first:  # while there is room
            whole = self._whole(key, by_user[key])
            self._doomed.update((key, id_) for id_ in self.ledger.adopt(key, whole))
        for key in reversed(latest_first):
            self.ledger.touch(key)
        await self.remove()

    def close(self) -> None:
        """Another shard may have the directory now."""
        if self._lock is not None:
            self._lock.close()

    async def adopt(self, owner: str) -> None:
        """The user came: what an earlier owner left in a tier that is not this shard's alone is counted here now."""
        if self.ill:
            return
        key = owner_key(owner)
        if self.exclusive:
            await asyncio.to_thread(self.files.touch, self._digest, key)
            return
        try:
            found = await asyncio.to_thread(lambda: list(self.files.entries(self._digest, key)))
        except OSError as error:
            self.failed(error)
            return
        whole = self._whole(key, [entry for entry in found if (key, entry.id) not in self._doomed])
        refs = [(id_, (size - self.ledger.chunk_bytes) // self.ledger.token_bytes) for id_, size in whole.items()]
        new = [id_ for id_ in whole if id_ not in self.ledger]
        leaving = self.ledger.reserve(key, refs)
        if leaving is None:  # more than the whole budget
            self._doomed.update((key, id_) for id_ in new)
        else:
            self.ledger.commit(new)
            self.doom(leaving)
        with suppress(Unavailable):  # tried again later
            await self.remove()

    def strike(self, ids: Iterable[ChunkId]) -> list[ChunkId]:
        """Not there any more as far as anybody asks; `remove` makes it true. Returns those that were."""
        keys = {id_: self.ledger.owner(id_) for id_ in ids if id_ in self.ledger}
        self._doomed.update((key, id_) for id_, key in keys.items())
        return self.ledger.forget(keys)

    def doom(self, leaving: Mapping[ChunkId, Evicted]) -> None:
        """What the ledger evicted has to go."""
        self._doomed.update((gone.owner, id_) for id_, gone in leaving.items())

    async def copy_from(self, other: FileTier, key: str, id_: ChunkId) -> bool:
        """A chunk's files of another tier, whose room here is reserved; whether they are here."""

        def copy() -> None:
            size = (other.ledger.size_of(other.ledger.tokens(id_)) - other.ledger.chunk_bytes) // self._ranks
            for rank in range(self._ranks):
                name = name_of(self._digest, key, id_, rank)
                header, payload = bytearray(HEADER_BYTES), memoryview(bytearray(size))
                other.files.read(name, header, payload)
                self.files.write(name, [payload], lambda: bytes(header))  # noqa: B023  # called here

        try:
            await asyncio.to_thread(copy)
        except (OSError, Damaged) as error:
            log.warning("A chunk could not be copied from %s to %s: %s", other.name, self.name, error)
            return False
        return True

    def written(self, key: str, ids: Iterable[ChunkId], done: set[ChunkId]) -> None:
        """Of the chunks that were reserved, `done` are there; of the others, and of those forgotten meanwhile, there
        may be files that have to go."""
        self._doomed.update((key, id_) for id_ in [*self.ledger.commit(done), *(id_ for id_ in ids if id_ not in done)])
        self.ledger.abort(ids)

    async def remove(self) -> None:
        """Removes everything that was struck out. Raises `Unavailable` where that failed: the files may be there."""
        async with self._removing:
            due = [doomed for doomed in self._doomed if doomed[1] not in self.ledger]
            self._doomed.clear()
            if not due:
                return
            names = [name_of(self._digest, key, id_, rank) for key, id_ in due for rank in range(self._ranks)]
            try:
                await asyncio.to_thread(self.files.remove, names)
            except BaseException as error:
                self._doomed.update(due)
                if isinstance(error, OSError):
                    raise self._not_removed(error) from error
                raise

    async def purge(self, owner: str) -> None:
        """Removes every file of a user but the chunks that the ledger has: those of other models and keys, what a shard
        that had lost the user wrote after all, and beside an exclusive tier what lies in directories that no shard
        holds. Raises `Unavailable` where that failed: they may be there."""
        key = owner_key(owner)
        keep = self.ledger.__contains__ if self.ledger.ids_of(key) else None  # asked as each file is looked at
        try:
            await asyncio.to_thread(self.files.purge, self._digest, key, keep)
            if self.exclusive and isinstance(self.files, LocalFiles):
                await asyncio.to_thread(_purge_abandoned, self.files, key)
        except OSError as error:
            raise self._not_removed(error) from error

    def _not_removed(self, error: OSError) -> Unavailable:
        self.failed(error)
        return Unavailable(f"The files of the {self.name} tier could not be removed; try again when it is back.")

    async def owners(self) -> dict[str, str]:
        """Whose files are here, as far as they are counted: user ids by owner key, read from the files themselves."""
        return await asyncio.to_thread(
            self._owners, {key: self.ledger.ids_of(key) for key in self.ledger.owner_names()}
        )

    async def everybody(self) -> dict[str, str]:
        """The same, of whatever files of this model there are. Raises OSError."""

        def look() -> dict[str, str]:
            found: defaultdict[str, list[ChunkId]] = defaultdict(list)
            for entry in self.files.entries(self._digest):
                found[entry.owner_key].append(entry.id)
            return self._owners(found)

        return await asyncio.to_thread(look)

    def _owners(self, ids: Mapping[str, list[ChunkId]]) -> dict[str, str]:
        found: dict[str, str] = {}
        for key, some in ids.items():
            for id_ in some:
                try:
                    owner = self._format.owner_of(self.files.peek_header(name_of(self._digest, key, id_, 0)))
                except (Damaged, OSError):
                    continue
                if owner_key(owner) == key:
                    found[key] = owner
                    break
        return found

    def _whole(self, key: str, entries: Iterable[Entry]) -> dict[ChunkId, int]:
        """The chunks of a user that every rank has a file of, with their bytes; the others have to go."""
        parts: defaultdict[ChunkId, dict[int, int]] = defaultdict(dict)
        for entry in entries:
            parts[entry.id][entry.rank] = entry.size
        whole = {id_: sum(ranks.values()) for id_, ranks in parts.items() if self._is_whole(ranks)}
        self._doomed.update((key, id_) for id_ in parts.keys() - whole.keys() if id_ not in self.ledger)
        return whole

    def _is_whole(self, sizes: dict[int, int]) -> bool:
        tokens, over = divmod(sum(sizes.values()) - self.ledger.chunk_bytes, self.ledger.token_bytes)
        return sizes.keys() == set(range(self._ranks)) and tokens > 0 and over == 0


def _purge_abandoned(files: LocalFiles, key: str) -> None:
    for abandoned in files.abandoned():
        abandoned.purge("", key, None)
