"""A TCP proxy in front of Redis, that cuts chosen processes off: a partition, as the processes see it.

A process is cut off in both directions, its running connections included: what it sends is not passed on, and it gets
no answer. Only its own timeouts tell it. Others go on.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import psutil

CHUNK_BYTES = 1 << 16


class RedisProxy:
    """`port` is where clients connect to."""

    def __init__(self, redis_port: int) -> None:
        self.port = 0
        self._redis_port = redis_port
        self._cut: set[int] = set()  # process ids
        self._pid_of: dict[int, int | None] = {}  # of each client port that is connected
        self._healed = asyncio.Event()
        self._healed.set()
        self._server: asyncio.Server | None = None
        self._running: set[asyncio.Task[None]] = set()
        self._pumps: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        self.heal()
        for pump in list(self._pumps):
            pump.cancel()
        await asyncio.gather(*self._running)

    def cut(self, pid: int) -> None:
        """Cut a process off."""
        self._cut.add(pid)
        self._healed.clear()

    def heal(self) -> None:
        self._cut.clear()
        self._healed.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        port = writer.get_extra_info("peername")[1]
        others: asyncio.StreamWriter | None = None
        try:
            await self._pass(port)
            back, others = await asyncio.open_connection("127.0.0.1", self._redis_port)
            pumps = [asyncio.create_task(self._pump(port, *ends)) for ends in ((reader, others), (back, writer))]
            self._pumps.update(pumps)
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._pumps.difference_update(pumps)
        except (OSError, asyncio.CancelledError):  # Redis is away; or all ends: asyncio would print that, for each
            pass
        finally:
            self._running.discard(task)
            self._pid_of.pop(port, None)
            for end in (writer, others):
                if end is not None:
                    end.close()

    async def _pump(self, port: int, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(CHUNK_BYTES):
                await self._pass(port)
                sink.write(data)
                await sink.drain()

    async def _pass(self, port: int) -> None:
        """Returns once the process at this port is not cut off."""
        while self._cut and self._owner(port) in self._cut:
            await self._healed.wait()

    def _owner(self, port: int) -> int | None:
        if self._pid_of.get(port) is None:
            self._pid_of[port] = next((pid for pid in self._cut if port in _ports(pid)), None)
        return self._pid_of[port]


def _ports(pid: int) -> set[int]:
    try:
        return {connection.laddr.port for connection in psutil.Process(pid).net_connections("tcp")}
    except psutil.Error:
        return set()
