"""A line between this worker and one of another shard's: chunks go over it as they lie in memory.

    Door ─► an address ─(the shards' processes carry it)─► dial     both: a process group of two, and of nobody else
    send ─► hello | each chunk's bytes in pieces | a table: position and checksum of each chunk
    receive: refuses another hello; what the table does not confirm did not come

The two ends are a process group (`groups.py`). Between GPUs with NCCL the bytes go from device to device, otherwise
over gloo, from and into pinned memory where the chunks are on a GPU.

Every wait has a deadline. After a failure the line is broken: what follows on it fails at once, and nothing of a
transfer that did not end well is used. Imports no vLLM.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, NamedTuple, TypeVar

import torch
import xxhash

from connector.groups import Group, LineFailed

T = TypeVar("T")

PIECE_BYTES = 4 << 20
PAGE_BYTES = 4096
WINDOW = 16
"""Pieces that are on their way at once."""

HELLO_BYTES: Final = 32
_ROW = struct.Struct("<q16s")  # of the table: the position, or -1 for a chunk that is not here; its checksum


class Sent(NamedTuple):
    """A chunk to send: where it was encoded, and its bytes as a tensor of any kind."""

    position: int
    kv: torch.Tensor


Connect = Callable[[], Group]


class Line:
    """One end, with a thread of its own on which everything happens in the order in which it was asked for."""

    def __init__(self, connect: Connect) -> None:
        self._thread = ThreadPoolExecutor(1, "memshard-line")
        self._group: Group | None = None
        self._connecting = self._thread.submit(self._connect, connect)

    def run(self, work: Callable[[Line], T]) -> Future[T]:
        """Calls `work` on the line's thread."""
        return self._thread.submit(work, self)

    def close(self) -> None:
        """Takes nothing more; what is on the way fails by its deadline at the latest."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        group, self._group = self._group, None
        if group is not None:
            group.close()

    # -- on the line's thread ---------------------------------------------------------------------------------------

    def _connect(self, connect: Connect) -> None:
        self._group = connect()

    def send(self, hello: bytes, chunks: Sequence[Callable[[], Sent | None]], sizes: Sequence[int]) -> list[bool]:
        """Sends chunks of these `sizes` in bytes, at least one; which of them were here. Raises `LineFailed`."""
        with _Transfer(self) as group:
            on_way = _Window()
            on_way.add(group.send(_tensor(hello).to(group.device)))
            rows: list[tuple[int, bytes]] = []
            for chunk, size in zip(chunks, sizes, strict=True):
                found = chunk()
                if found is None or (kv := _flat(found.kv)).numel() != size:
                    found, kv = Sent(-1, empty := torch.zeros(size, dtype=torch.uint8)), empty
                host = _on_host(kv)
                wire = kv if kv.device == group.device else host.to(group.device)
                state = xxhash.xxh3_128()
                for piece, own in zip(_pieces(wire), _pieces(host), strict=True):
                    state.update(own.numpy())  # just before it is sent: it is in the cache then
                    on_way.add(group.send(piece), piece)
                state.update(struct.pack("<q", found.position))
                rows.append((found.position, state.digest()))
            on_way.add(group.send(_tensor(b"".join(_ROW.pack(*row) for row in rows)).to(group.device)))
            on_way.finish()
        return [position >= 0 for position, _ in rows]

    def receive(self, hello: bytes, rooms: Sequence[torch.Tensor]) -> list[int | None]:
        """Fills `rooms`; of each the position that it was encoded at, or None where the chunk did not come. What is in
        a room then is nothing to be used. Raises `LineFailed`."""
        with _Transfer(self) as group:
            told = torch.zeros(HELLO_BYTES, dtype=torch.uint8, device=group.device)
            wait = group.receive(told)
            wires = [_wire(room, group.device) for room in rooms]
            for wire in wires:  # new memory is made when it is first written to: better before something comes
                if wire.device.type == "cpu":
                    wire.numpy()[::PAGE_BYTES] = 0
            wait()
            if _bytes(told) != hello:
                raise LineFailed("the other end sends something else")
            table = torch.zeros(len(rooms) * _ROW.size, dtype=torch.uint8, device=group.device)
            sums = [xxhash.xxh3_128() for _ in rooms]
            for place, piece in _received(group, wires):
                sums[place].update(_on_host(piece).numpy())
            group.receive(table)()
            positions: list[int | None] = []
            for place, (position, checksum) in enumerate(_ROW.iter_unpack(_bytes(table))):
                sums[place].update(struct.pack("<q", position))
                came = position >= 0 and sums[place].digest() == checksum
                positions.append(position if came else None)
                if came and wires[place].data_ptr() != rooms[place].data_ptr():
                    rooms[place].copy_(wires[place].view(rooms[place].dtype).view(rooms[place].shape))
        return positions


class _Transfer:
    """The line's group while something goes over it; afterwards the line works or is broken."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def __enter__(self) -> Group:
        group = self._line._group
        if group is None:
            error = self._line._connecting.exception(timeout=0)
            raise LineFailed(f"the line is broken: {error}" if error else "the line is broken")
        return group

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if error is None:
            return
        group, self._line._group = self._line._group, None
        if group is not None:
            group.close()
        if isinstance(error, RuntimeError):  # torch's word for whatever happened to the group
            raise LineFailed(str(error).split("\n", 1)[0]) from error


class _Window:
    """What is being sent, its tensors kept until it has been."""

    def __init__(self) -> None:
        self._waits: deque[tuple[Callable[[], None], object]] = deque()

    def add(self, wait: Callable[[], None], kept: object = None) -> None:
        self._waits.append((wait, kept))
        if len(self._waits) > WINDOW:
            self._waits.popleft()[0]()

    def finish(self) -> None:
        while self._waits:
            self._waits.popleft()[0]()


def _pieces(flat: torch.Tensor) -> Sequence[torch.Tensor]:
    return (flat,) if flat.numel() <= PIECE_BYTES else flat.split(PIECE_BYTES)


def _received(group: Group, wires: Sequence[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
    """The pieces as they come, each with its room's place; those that follow are asked for meanwhile."""
    pieces = ((place, piece) for place, wire in enumerate(wires) for piece in _pieces(wire))
    coming: deque[tuple[int, torch.Tensor, Callable[[], None]]] = deque()
    for place, piece in pieces:
        coming.append((place, piece, group.receive(piece)))
        if len(coming) > WINDOW:
            first, arrived, wait = coming.popleft()
            wait()
            yield first, arrived
    while coming:
        first, arrived, wait = coming.popleft()
        wait()
        yield first, arrived


def _flat(kv: torch.Tensor) -> torch.Tensor:
    return kv.view(-1).view(torch.uint8)


def _wire(room: torch.Tensor, device: torch.device) -> torch.Tensor:
    """What a chunk is received into: its room, or memory beside it where the group cannot write there."""
    if room.device == device:
        return _flat(room)
    return torch.empty(room.numel() * room.element_size(), dtype=torch.uint8, device=device, pin_memory=True)


def _on_host(flat: torch.Tensor) -> torch.Tensor:
    if flat.device.type == "cpu":
        return flat
    return torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True).copy_(flat)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.cpu().numpy().tobytes())
