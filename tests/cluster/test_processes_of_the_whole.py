"""The processes of a running server: what each has to itself, and what is left when one is killed."""

from __future__ import annotations

import os
import time

import psutil
import pytest

from cluster.processes import runs
from tests.cluster.test_whole_path import FACTS
from tests.cluster.whole_server import WholeServer

USERS = [f"lost-{n}" for n in range(6)]


def a_replica(server: WholeServer) -> psutil.Process:
    """The process of a shard: the parent of an engine."""
    return an_engine(server).parent()


def an_engine(server: WholeServer, part: str = "EngineCore") -> psutil.Process:
    return next(process for process in running(server) if part in _title(process))


def running(server: WholeServer) -> list[psutil.Process]:
    """The server's processes, those that ended and were not reaped left out."""
    return [process for process in psutil.Process(server.process.pid).children(recursive=True) if runs(process)]


def _title(process: psutil.Process) -> str:
    return " ".join([process.name(), *process.cmdline()])


def test_a_killed_replica_leaves_no_process_and_no_user_behind_and_is_replaced(server: WholeServer) -> None:
    for user in USERS:
        server.remember(user, *FACTS)
    for user in USERS:
        server.wait_encoded(user)
    before = server.wait_whole()
    assert all(shard["users"] for shard in server.shards()), "both shards have users"
    killed = a_replica(server)
    engine = killed.children(recursive=True)
    killed.kill()
    killed_at = time.monotonic()
    for user in USERS:
        answer = server.ask(user, "Where does my sister live?")
        assert len(answer["memory"]["fact_ids"]) == len(FACTS)
        assert [fact["memory"] for fact in server.memories(user)] == FACTS
    while any(map(runs, engine)):
        assert time.monotonic() - killed_at < 10, [_title(process) for process in engine if runs(process)]
        time.sleep(0.1)

    # Serve replaces the shard; its users may come back to either, and all is encoded again.
    server.wait_whole(replaced=before)
    for user in USERS:
        server.wait_encoded(user)
        assert server.ask(user, "What do I play?")["memory"]["injected_tokens"] > 0


apart = pytest.mark.skipif(
    "MEMSHARD_TEST_CHAOS" not in os.environ, reason="takes 48 s beside its twin; MEMSHARD_TEST_CHAOS=1 runs it"
)


@pytest.mark.parametrize("part", ["EngineCore", pytest.param("VLLM::Worker", marks=apart)])
def test_users_of_a_shard_whose_engine_died_are_answered_by_the_other(server: WholeServer, part: str) -> None:
    users = [f"{part}-{n}" for n in range(6)]
    for user in users:
        server.remember(user, *FACTS)
    for user in users:
        server.wait_encoded(user)
    before = server.wait_whole()
    an_engine(server, part).kill()
    for user in users:
        answer = server.ask(user, "Where does my sister live?")
        assert len(answer["memory"]["fact_ids"]) == len(FACTS)
        assert [fact["memory"] for fact in server.memories(user)] == FACTS
    server.wait_whole(replaced=before)


def test_engines_run_as_fast_as_anything_else_on_the_machine(server: WholeServer) -> None:
    assert {process.nice() for process in running(server)} == {psutil.Process().nice()}


def test_each_engine_computes_on_cores_of_its_own(server: WholeServer) -> None:
    server.wait_whole()
    cores = [set(process.cpu_affinity()) for process in running(server) if "VLLM::Worker" in _title(process)]
    assert len(cores) == 2, [_title(process) for process in running(server)]
    if (psutil.cpu_count() or 1) > 1:
        assert not set.intersection(*cores)
