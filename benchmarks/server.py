"""The server that a benchmark measures: one that already runs, or a `memshard serve` of its own.

Its own one has a free port, one shard whose engine computes with one thread (the rest has the other cores), memory
injected as the operator decided (all of it, unless MEMSHARD_PREFILL_NEAREST says otherwise), a Redis and
logs in a temporary directory, and the models that are prepared already. The variables MEMSHARD_* apply to it, those of
where it listens and what it stores in excepted. Refused: to leave a process behind, Ctrl-C and SIGTERM included.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
from rich.console import Console

from cluster import models, processes
from cluster.settings import PREFIX, Settings
from sharding.errors import StartupError

COMMAND = Path(sys.executable).with_name("memshard")
STOP_MARGIN_S = 30.0  # beside the server's own deadline for running requests
DEFAULTS = {"SHARDS": "1", "THREADS_PER_SHARD": "1", "PREFILL_NEAREST": "0"}
SHARD = "ServeReplica:memshard:Shard"
"""What a shard's process calls itself."""

OURS = ("REDIS_URL", "NAMESPACE", "STATE_DIR", "HOST", "PORT")


@contextmanager
def serving(console: Console, url: str | None = None, model: Path | None = None) -> Iterator[str]:
    """The address of a ready server; one that was started here is stopped at the end.

    Raises:
        StartupError: it does not start; its directory, logs included, is kept then.
    """
    with processes.interruptible():
        if url is not None:
            yield url.rstrip("/")
            return
        settings = Settings.from_environment(model=model)
        model_path = models.prepare_language_model(settings, console.print)
        state_dir, port = Path(tempfile.mkdtemp(prefix="memshard-bench-")), free_port()
        command = (str(COMMAND), "serve", "--host", "127.0.0.1", "--port", str(port))
        environment = _environment(os.environ, settings, model_path, state_dir)
        with started(console, command, port, state_dir, settings, environment) as address:
            yield address


@contextmanager
def started(
    console: Console,
    command: Sequence[str],
    port: int,
    state_dir: Path,
    settings: Settings,
    environment: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Runs a server that listens on `port`; its address once it is ready. At the end it is stopped and its directory
    deleted.

    Raises:
        StartupError: it does not start; its directory, logs included, is kept then.
    """
    log, address = state_dir / "serve.log", f"http://127.0.0.1:{port}"
    server = _start(command, log, environment)
    keep = False
    try:
        with console.status("Starting a server (about a minute)"):
            _wait_ready(server, address, settings.start_deadline_s, log)
        yield address
    except StartupError:
        keep = True
        raise
    finally:
        with console.status("Stopping the server"):
            _stop(server, settings.stop_deadline_s + STOP_MARGIN_S)
        if not keep:
            shutil.rmtree(state_dir, ignore_errors=True)


def _start(command: Sequence[str], log: Path, environment: Mapping[str, str] | None) -> subprocess.Popen[bytes]:
    processes.adopt_orphans()  # what the server may leave behind is then below us
    with log.open("w") as output:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C of ours is not its second one
        )


def _environment(given: Mapping[str, str], settings: Settings, model_path: Path, state_dir: Path) -> dict[str, str]:
    """The server's environment: what was given, our defaults below it, what is ours above it."""
    kept = {name: value for name, value in given.items() if name not in {PREFIX + ours for ours in OURS}}
    defaults = {PREFIX + name: value for name, value in DEFAULTS.items()}
    return {
        **defaults,
        **kept,
        f"{PREFIX}STATE_DIR": str(state_dir),
        f"{PREFIX}MODEL": str(model_path),
        f"{PREFIX}SERVED_MODEL_NAME": models.model_name(settings),
    }


def shard_processes() -> list[psutil.Process]:
    """The shards of the servers that were started here, by age."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if SHARD in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return sorted(found, key=lambda process: process.create_time())


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_ready(server: subprocess.Popen[bytes], address: str, deadline_s: float, log: Path) -> None:
    give_up = time.monotonic() + deadline_s
    with httpx.Client(base_url=address, timeout=5.0, trust_env=False) as client:
        while time.monotonic() < give_up:
            if server.poll() is not None:
                raise StartupError(f"The server did not start: {_last_line(log)} (see {log.parent})")
            try:
                if client.get("/readyz").status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
    raise StartupError(f"The server was not ready within {deadline_s:.0f} s: {_last_line(log)} (see {log.parent})")


def _stop(server: subprocess.Popen[bytes], deadline_s: float) -> None:
    server.terminate()
    try:
        server.wait(deadline_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        processes.end_descendants()


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("memshard: ") if lines else "it said nothing"
