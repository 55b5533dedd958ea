import asyncio
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from people import ALICE, HERE
from real_valkey import running_valkey

from sharding.append_log import AppendLog
from sharding.client import connect
from sharding.directory import Directory
from sharding.facts import FactStore
from sharding.keys import KeySpace


def files_with(folder: Path, word: bytes) -> list[Path]:
    found = []
    for path in (folder / "appendonlydir").iterdir():
        with suppress(FileNotFoundError):  # the server has just put another in its place
            found += [path] if word in path.read_bytes() else []
    return found


async def test_deleted_facts_leave_the_append_only_file_also_those_deleted_while_it_was_rewritten(
    tmp_path: Path, keys: KeySpace
) -> None:
    with running_valkey(tmp_path, "--appendonly", "yes") as valkey:
        async with connect(valkey.url) as client:
            placement = await Directory(client, keys).claim(ALICE, HERE, None)
            store = FactStore(client, keys)
            store.log = AppendLog(client, every_s=0.2)
            for text in ("a xylophone", "a second xylophone"):
                [(fact, _)] = await store.append(placement, [text], text, datetime.now(UTC))
                assert files_with(tmp_path, b"xylophone")
                await store.delete(placement, [fact.id])
            async with asyncio.timeout(20):
                while files_with(tmp_path, b"xylophone"):  # noqa: ASYNC110  # the server tells nobody
                    await asyncio.sleep(0.1)
            await store.log.settled()


async def test_a_redis_without_such_a_file_is_left_alone(store: FactStore) -> None:
    store.log.deleted()
    await store.log.settled()
