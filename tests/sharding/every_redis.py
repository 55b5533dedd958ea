"""Each kind of Redis that a cluster may use, started from the embedded binary: one server, Redis Cluster, Sentinel.

`fail_over` kills the primary that holds `key` and returns at once: what takes over, and when, is the servers' matter.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from real_valkey import binary

from tests.ports import free_ports

DEADLINE_S = 20.0
DOWN_AFTER_MS = 500


@dataclass(frozen=True)
class Kind:
    """One running store."""

    url: str
    fail_over: Callable[[str], None] | None
    primaries: tuple[int, ...] = ()

    def replicated(self) -> None:
        """Returns when replicas have taken all that was acknowledged: they do so afterwards, and begin only when they
        have told the primary of their first copy, which is up to a second later."""
        for port in self.primaries:
            with redis.Redis(port=port) as primary:
                _until(lambda primary=primary: _taken(primary.info("replication")))


@contextmanager
def one(folder: Path) -> Iterator[Kind]:
    with _servers(folder, 1) as (ports, _):
        yield Kind(f"redis://127.0.0.1:{ports[0]}/0", None)


@contextmanager
def cluster(folder: Path) -> Iterator[Kind]:
    """Three primaries, each with a replica."""
    options = ("--cluster-enabled", "yes", "--cluster-node-timeout", str(DOWN_AFTER_MS))
    with _servers(folder, 6, *options, bus=True) as (ports, processes):
        nodes = [redis.Redis(port=port) for port in ports]
        for at in range(3):
            nodes[at].execute_command("CLUSTER", "ADDSLOTSRANGE", 16384 * at // 3, 16384 * (at + 1) // 3 - 1)
        for at, node in enumerate(nodes):
            node.execute_command("CLUSTER", "SET-CONFIG-EPOCH", at + 1)
        buses = [_bus_of(folder, port) for port in ports]
        for port, bus in zip(ports[1:], buses[1:], strict=True):
            nodes[0].execute_command("CLUSTER", "MEET", "127.0.0.1", port, bus)
        _until(lambda: all(_info(node, "CLUSTER INFO")["cluster_known_nodes"] == "6" for node in nodes))
        ids = [_text(node.execute_command("CLUSTER", "MYID")) for node in nodes]
        for at in range(3):
            _until(lambda at=at: ids[at] in _text(nodes[at + 3].execute_command("CLUSTER", "NODES")))
            nodes[at + 3].execute_command("CLUSTER", "REPLICATE", ids[at])
        _until(lambda: all(_info(node, "CLUSTER INFO")["cluster_state"] == "ok" for node in nodes))
        _until(lambda: all(_info(node, "INFO replication")["master_link_status"] == "up" for node in nodes[3:]))

        def fail_over(key: str) -> None:
            slot = nodes[0].execute_command("CLUSTER", "KEYSLOT", key)
            at = next(at for at in range(3) if slot < 16384 * (at + 1) // 3)
            processes[at].kill()

        for node in nodes:
            node.close()
        yield Kind("redis+cluster://" + ",".join(f"127.0.0.1:{port}" for port in ports), fail_over, tuple(ports[:3]))


@contextmanager
def sentinel(folder: Path) -> Iterator[Kind]:
    """A primary, its replica, and one Sentinel that decides alone."""
    with _servers(folder, 2) as (ports, processes):
        with redis.Redis(port=ports[1]) as replica:
            replica.replicaof("127.0.0.1", str(ports[0]))
            _until(lambda: replica.info("replication")["master_link_status"] == "up")
        config = folder / "sentinel.conf"
        config.write_text(
            f"sentinel monitor store 127.0.0.1 {ports[0]} 1\n"
            f"sentinel down-after-milliseconds store {DOWN_AFTER_MS}\n"
            "sentinel failover-timeout store 5000\n"
        )
        with _servers(folder, 1, "--sentinel", config=config) as (watch, _):
            with redis.Redis(port=watch[0]) as client:
                _until(lambda: client.sentinel_masters()["store"]["num-slaves"] == 1)
            url = f"redis+sentinel://127.0.0.1:{watch[0]}/store"
            yield Kind(url, lambda key: processes[0].kill(), (ports[0],))


@contextmanager
def _servers(
    folder: Path, count: int, *options: str, bus: bool = False, config: Path | None = None
) -> Iterator[tuple[list[int], list[subprocess.Popen[bytes]]]]:
    ports: list[int] = []
    processes: list[subprocess.Popen[bytes]] = []
    try:
        free = free_ports(2 * count)
        for port, bus_port in zip(free[:count], free[count:], strict=True):
            (folder / str(port)).mkdir()
            (folder / str(port) / "bus").write_text(str(bus_port))
            command = [binary(), *([str(config)] if config else []), "--port", str(port), "--bind", "127.0.0.1"]
            command += ["--dir", str(folder / str(port)), "--logfile", "log", *options]
            command += ["--cluster-port", str(bus_port)] if bus else []
            command += [] if config else ["--save", "", "--repl-diskless-sync-delay", "0"]
            processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
            ports.append(port)
        for port in ports:
            with redis.Redis(port=port) as client:
                _until(client.ping)
        yield ports, processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _bus_of(folder: Path, port: int) -> int:
    return int((folder / str(port) / "bus").read_text())


def _until(ready: Callable[[], Any]) -> None:
    give_up = time.monotonic() + DEADLINE_S
    while True:
        try:
            if ready():
                return
        except redis.ConnectionError:
            pass
        assert time.monotonic() < give_up, "the servers do not come together"
        time.sleep(0.02)


def _taken(primary: dict[str, Any]) -> bool:
    replicas = [primary[f"slave{n}"] for n in range(primary["connected_slaves"])]
    return bool(replicas) and all(replica["offset"] == primary["master_repl_offset"] for replica in replicas)


def _info(client: redis.Redis, command: str) -> dict[str, str]:
    told = client.execute_command(*command.split())
    if isinstance(told, dict):
        return {str(name): str(value) for name, value in told.items()}
    return dict(line.split(":", 1) for line in _text(told).splitlines() if ":" in line)


def _text(told: Any) -> str:
    return told.decode() if isinstance(told, bytes) else str(told)
