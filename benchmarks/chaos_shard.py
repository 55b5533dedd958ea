"""What is different about a shard of a chaos run: it can be found, its moves stop where the run wants to strike, and
where it has no model, its engine has a process all the same.

    folder/shards/<shard>    its process id
    folder/hold              "<step> <before or after>", put there by the run: a move that comes there …
    folder/held              … says where it is ("<source> <target>"), and waits a moment to be struck

Runs in the shards' own processes.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

from deployments import deterministic, mover
from deployments.settings import ShardSettings
from deployments.shard import Shard
from sharding.directory import Directory
from sharding.facts import FactStore
from sharding.ids import ShardId
from sharding.lease import Lease
from sharding.move import Do, Outcome

HELD_S = 1.5
ENGINE = "memshard-chaos-engine"
_ENGINE_PROGRAM = "import sys; sys.stdin.read()"  # ends with the process that started it

OpenShard = Callable[[ShardSettings, ShardId, Directory, FactStore, Lease], Awaitable[Shard]]


async def open_deterministic(
    folder: Path, settings: ShardSettings, me: ShardId, directory: Directory, store: FactStore, lease: Lease
) -> Shard:
    """A shard without a model, whose engine is dead once its process is."""
    shard = await _open(deterministic.open_shard, folder, settings, me, directory, store, lease)
    threading.Thread(target=_be_engine_of, args=[shard], daemon=True).start()
    return shard


def _be_engine_of(shard: Shard) -> None:
    command = [sys.executable, "-S", "-c", _ENGINE_PROGRAM, ENGINE]
    subprocess.Popen(command, stdin=subprocess.PIPE).wait()
    shard.engine.shutdown()


async def open_real(
    folder: Path, settings: ShardSettings, me: ShardId, directory: Directory, store: FactStore, lease: Lease
) -> Shard:
    """The product's own shard."""
    from deployments.shard_start import open_shard

    return await _open(open_shard, folder, settings, me, directory, store, lease)


async def _open(
    open_shard: OpenShard,
    folder: Path,
    settings: ShardSettings,
    me: ShardId,
    directory: Directory,
    store: FactStore,
    lease: Lease,
) -> Shard:
    shard = await open_shard(settings, me, directory, store, lease)
    (folder / "shards").mkdir(exist_ok=True)
    (folder / "shards" / me).write_text(str(os.getpid()))
    _stop_moves(folder, me)
    return shard


def _stop_moves(folder: Path, me: ShardId) -> None:
    """Moves of this process stop where `folder/hold` says."""
    outcome = mover._Move._outcome

    async def stopped(move: mover._Move, do: Do) -> Outcome:
        await _pass(folder, f"{do} before", move, me)
        came = await outcome(move, do)
        await _pass(folder, f"{do} after", move, me)
        return came

    mover._Move._outcome = stopped  # type: ignore[method-assign, assignment]


async def _pass(folder: Path, here: str, move: mover._Move, me: ShardId) -> None:
    hold = folder / "hold"
    if not hold.exists() or hold.read_text() != here:
        return
    hold.unlink()
    written = folder / "held.part"
    written.write_text(f"{me} {move._target}")
    written.rename(folder / "held")
    await asyncio.sleep(HELD_S)
