"""Lines between engines without a model: sockets of this machine, with the frames of `connector/chunk_file.py`.

As `connector/line.py` without torch: a hello that both ends must agree upon, a chunk after the other, a deadline for
every wait, and a line that failed is broken.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress

from connector.moves import PEER

STALL_S = 2.0
HOST = "127.0.0.1"

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class LineFailed(Exception):
    """The other end is gone, silent, or not who it should be."""


class SocketLines:
    """Those of one engine, by name."""

    def __init__(self) -> None:
        self._lines: dict[str, SocketLine] = {}

    def listen(self, name: str) -> tuple[str, int]:
        self.hang_up(name)
        self._lines[name] = SocketLine()
        return self._lines[name].listen(name)

    async def dial(self, name: str, door: tuple[str, int]) -> None:
        """Where nobody listens, what is sent fails."""
        self.hang_up(name)
        self._lines[name] = SocketLine()
        with suppress(LineFailed):
            await self._lines[name].dial(name, door)

    def named(self, place: str) -> SocketLine:
        """The line that a move names. Raises `LineFailed` where there is none."""
        try:
            return self._lines[place.removeprefix(PEER)]
        except KeyError:
            raise LineFailed("there is no such line") from None

    def hang_up(self, name: str) -> None:
        if (line := self._lines.pop(name, None)) is not None:
            line.close()

    def close(self) -> None:
        for name in list(self._lines):
            self.hang_up(name)


class SocketLine:
    """One end; one transfer at a time."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._ends: asyncio.Future[Ends] = asyncio.get_running_loop().create_future()
        self._meeting: asyncio.Task[None] | None = None

    def listen(self, name: str) -> tuple[str, int]:
        """Where the other end finds this one."""
        door = socket.create_server((HOST, 0))
        door.setblocking(False)
        self._meeting = asyncio.create_task(self._meet(door, name))
        self._meeting.add_done_callback(lambda _: door.close())
        return HOST, door.getsockname()[1]

    async def _meet(self, door: socket.socket, name: str) -> None:
        while not self._ends.done():
            came, _ = await asyncio.get_running_loop().sock_accept(door)
            reader, writer = await asyncio.open_connection(sock=came)
            try:
                async with asyncio.timeout(STALL_S):
                    if (await reader.readexactly(len(name))).decode(errors="replace") == name:
                        self._ends.set_result((reader, writer))
            except (OSError, EOFError):
                continue
            finally:
                if not self._ends.done() or self._ends.cancelled():
                    writer.close()

    async def dial(self, name: str, door: tuple[str, int]) -> None:
        """Raises `LineFailed` where nobody listens."""
        try:
            async with asyncio.timeout(STALL_S):
                reader, writer = await asyncio.open_connection(*door)
        except OSError as error:
            raise LineFailed(str(error)) from error
        writer.write(name.encode())
        self._ends.set_result((reader, writer))

    def close(self) -> None:
        """What is on the way fails."""
        if self._meeting is not None:
            self._meeting.cancel()
        if self._ends.done() and not self._ends.cancelled():
            self._ends.result()[1].close()
        self._ends.cancel()

    async def send(self, hello: bytes, frames: Sequence[bytes | None], sizes: Sequence[int]) -> None:
        """Frames of these sizes, None for one that is not here. Raises `LineFailed`."""
        async with self._turn:
            try:
                _, writer = await self._met()
                writer.write(hello)
                for frame, size in zip(frames, sizes, strict=True):
                    writer.write(frame if frame is not None else bytes(size))
                    async with asyncio.timeout(STALL_S):
                        await writer.drain()
            except (OSError, asyncio.CancelledError) as error:
                self._broken(error)

    async def receive(self, hello: bytes, sizes: Sequence[int]) -> list[bytes]:
        """Frames of these sizes, zeros for one that is not there. Raises `LineFailed`."""
        async with self._turn:
            try:
                reader, _ = await self._met()
                async with asyncio.timeout(STALL_S):
                    told = await reader.readexactly(len(hello))
                if told != hello:
                    raise LineFailed("the other end sends something else")
                frames = []
                for size in sizes:
                    async with asyncio.timeout(STALL_S):
                        frames.append(await reader.readexactly(size))
                return frames
            except (OSError, EOFError, LineFailed, asyncio.CancelledError) as error:
                self._broken(error)
        raise AssertionError("unreachable")

    async def _met(self) -> Ends:
        async with asyncio.timeout(STALL_S):
            return await asyncio.shield(self._ends)

    def _broken(self, error: BaseException) -> None:
        self.close()
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise error
        raise LineFailed(str(error) or type(error).__name__) from error
