"""The embedded Redis keeps what it acknowledged, belongs to one process, and dies with it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import redis

from cluster.embedded_redis import EmbeddedRedis
from sharding.errors import StartupError

PARENT = """
import sys, time
from pathlib import Path
from cluster.embedded_redis import EmbeddedRedis
server = EmbeddedRedis(Path(sys.argv[1]))
server.wait_ready()
sys.stdout.write(f"{server.pid} {server.url}\\n")
sys.stdout.flush()
time.sleep(60)
"""


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)  # nobody may be there to reap an orphan
    except psutil.NoSuchProcess:
        return False


def test_what_was_written_is_there_after_a_restart(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as first:
        first.wait_ready()
        with redis.Redis.from_url(first.url) as client:
            client.set("fact", "tea at four")
    with EmbeddedRedis(tmp_path) as second:
        second.wait_ready()
        with redis.Redis.from_url(second.url) as client:
            assert client.get("fact") == b"tea at four"


def test_it_syncs_every_write_and_never_evicts(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        server.wait_ready()
        with redis.Redis.from_url(server.url, decode_responses=True) as client:
            assert client.config_get("appendfsync") == {"appendfsync": "always"}
            assert client.config_get("appendonly") == {"appendonly": "yes"}
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            assert client.config_get("bind") == {"bind": "127.0.0.1"}


def test_a_stop_leaves_no_process_and_may_be_repeated(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    server.wait_ready()
    server.stop()
    server.stop()
    assert not _runs(server.pid)


def test_one_that_was_killed_comes_back_at_the_same_address_with_its_data(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        server.wait_ready()
        with redis.Redis.from_url(server.url) as client:
            client.set("fact", "tea at four")
        psutil.Process(server.pid).kill()
        psutil.Process(server.pid).wait()
        server.revive()
        server.wait_ready()
        with redis.Redis.from_url(server.url) as client:
            assert client.get("fact") == b"tea at four"


def test_a_second_server_on_the_same_data_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        server.wait_ready()
        with pytest.raises(StartupError, match=rf"in use by process {psutil.Process().pid};"):
            EmbeddedRedis(tmp_path)


def test_a_directory_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="state directory cannot be used"):
        EmbeddedRedis(tmp_path / "file" / "redis")


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "appendonlydir").mkdir()
    (tmp_path / "appendonlydir" / "appendonly.aof.manifest").write_text("not a manifest\n")
    server = EmbeddedRedis(tmp_path)
    with pytest.raises(StartupError, match=r"did not start: .*manifest"):
        server.wait_ready()


def test_it_dies_with_a_parent_that_was_killed_and_keeps_the_data(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid, url = parent.stdout.readline().split()
    with redis.Redis.from_url(url) as client:
        client.set("fact", "acknowledged")
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()

    with EmbeddedRedis(tmp_path) as again:  # waits until the orphan has let go
        assert not _runs(int(pid))
        again.wait_ready()
        with redis.Redis.from_url(again.url) as client:
            assert client.get("fact") == b"acknowledged"
