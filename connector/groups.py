"""A process group of two, and of nobody else: this worker and one of another shard's.

Made without torch.distributed's default world, over a store of its own, so it disturbs none of vLLM's groups. `Door` is
one end, which says where it is found; `dial` is the other. Whoever does not know the token meets nobody.

Every wait has a deadline. The NCCL side has never run: no machine with two GPUs was at hand. Imports no vLLM.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch

CONNECT_S = 5.0
"""How long the two ends wait for each other."""

STALL_S = 5.0
"""How long one piece may take: whoever is silent for longer counts as gone."""


class LineFailed(Exception):
    """The other end is gone, silent, or not who it should be."""


class Group(Protocol):
    """Two processes. What is sent or received is a contiguous uint8 tensor on `device`."""

    device: torch.device

    def send(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Begins; the answer waits until it is done, at most `STALL_S`, and raises where it was not."""

    def receive(self, tensor: torch.Tensor) -> Callable[[], None]: ...

    def close(self) -> None:
        """Ends what is on the way."""


class Door:
    """Where a worker waits for the other end: made at once, `connect` waits."""

    def __init__(self, host: str, token: str, device: torch.device, nccl: bool) -> None:
        self._about = (host, token, device, nccl)
        self._store = torch.distributed.TCPStore(  # listens on every address of this machine
            "127.0.0.1", 0, None, True, timeout=timedelta(seconds=CONNECT_S), wait_for_workers=False
        )
        self.address = (host, int(self._store.port))

    def connect(self) -> Group:
        """Raises RuntimeError where nobody comes."""
        return _group(self._store, 1, *self._about)


def dial(address: tuple[str, int], host: str, token: str, device: torch.device, nccl: bool) -> Group:
    """The other end of a `Door`, from this `host`. Raises RuntimeError where there is none."""
    store = torch.distributed.TCPStore(*address, None, False, timeout=timedelta(seconds=CONNECT_S))
    return _group(store, 0, host, token, device, nccl)


def _group(store: Any, rank: int, host: str, token: str, device: torch.device, nccl: bool) -> Group:
    """The token is part of every key in the store: who does not know it meets nobody."""
    own = torch.distributed.PrefixStore(token, store)
    return _NcclGroup(own, rank, device) if nccl else _GlooGroup(own, rank, host)


class _GlooGroup:
    device = torch.device("cpu")

    def __init__(self, store: Any, rank: int, host: str) -> None:
        gloo = torch.distributed.ProcessGroupGloo
        options = gloo._Options()  # vLLM makes its stateless groups with the same private parts
        options._timeout = timedelta(seconds=CONNECT_S)
        options._threads = 1
        options._devices = [gloo.create_device(hostname=host)]
        self._group: Any = gloo(store, rank, 2, options)
        self._peer = 1 - rank

    def send(self, tensor: torch.Tensor) -> Callable[[], None]:
        return _wait(self._group.send([tensor], self._peer, 0))

    def receive(self, tensor: torch.Tensor) -> Callable[[], None]:
        return _wait(self._group.recv([tensor], self._peer, 0))

    def close(self) -> None:
        self._group = None


def _wait(work: Any) -> Callable[[], None]:
    def wait() -> None:
        work.wait(timedelta(seconds=STALL_S))

    return wait


class _NcclGroup:
    """Never run. NCCL hangs on a peer that is gone: a stream of its own and an abort at the deadline end that."""

    def __init__(self, store: Any, rank: int, device: torch.device) -> None:
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # its watchdog would end the engine's process
        nccl = torch.distributed.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timedelta(seconds=CONNECT_S)
        self.device = device
        self._group: Any = nccl(store, rank, 2, options)
        self._peer = 1 - rank
        self._stream = torch.cuda.Stream(device)

    def send(self, tensor: torch.Tensor) -> Callable[[], None]:
        with torch.cuda.stream(self._stream):
            return self._wait(self._group.send([tensor], self._peer, 0))

    def receive(self, tensor: torch.Tensor) -> Callable[[], None]:
        with torch.cuda.stream(self._stream):
            return self._wait(self._group.recv([tensor], self._peer, 0))

    def _wait(self, work: Any) -> Callable[[], None]:
        def wait() -> None:
            ends_at = time.monotonic() + STALL_S
            while not work.is_completed():
                if time.monotonic() > ends_at:
                    self.close()
                    raise LineFailed("the other GPU is silent")
                time.sleep(0.0005)

        return wait

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.abort()
