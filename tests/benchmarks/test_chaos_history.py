"""What a chaos run takes for right and for wrong, and that its users talk to a real gateway as they should."""

from __future__ import annotations

import asyncio
import os
import random
import time
from pathlib import Path

import httpx

from benchmarks.chaos_history import History
from benchmarks.chaos_proxy import RedisProxy
from benchmarks.chaos_talker import Talker
from cluster.embedded_redis import EmbeddedRedis
from deployments.deterministic import answer
from sharding.client import connect
from sharding.errors import Unavailable
from sharding.redis_errors import redis_errors
from tests.benchmarks.local_cluster import local_cluster


def test_an_answer_with_all_that_was_told_is_right_in_any_order() -> None:
    history = History("ada")
    for text in ("one", "two"):
        history.told(text, f"id-{text}")
    assert history.answered(answer(["two", "one"])) is None
    assert history.listed({"one": "id-one", "two": "id-two"}) is None


def test_a_fact_that_was_acknowledged_and_is_missing_is_lost() -> None:
    history = History("ada")
    history.told("one", "id")
    assert "without 1 facts" in (history.answered(answer([])) or "")
    assert "without 1 facts" in (history.listed({}) or "")


def test_a_deleted_fact_and_a_strangers_are_wrong() -> None:
    history = History("ada")
    history.told("one", "id")
    history.deleted("one")
    assert "deleted, or is another user's" in (history.answered(answer(["one"])) or "")
    assert "deleted, or is another user's" in (history.listed({"bob's": "id"}) or "")


def test_a_write_that_failed_may_have_happened_or_not_until_it_is_seen() -> None:
    history = History("ada")
    history.may.add("perhaps")
    assert history.answered(answer([])) is None
    assert history.answered(answer(["perhaps"])) is None
    assert history.listed({"perhaps": "id"}) is None
    assert "without 1 facts" in (history.answered(answer([])) or "")
    history.doubtful("perhaps")  # a deletion that failed
    assert history.listed({}) is None


def test_a_fact_served_twice_is_wrong() -> None:
    history = History("ada")
    history.told("one", "id")
    assert "twice" in (history.answered(answer(["one", "one"])) or "")


def test_ids_that_an_answer_was_given_are_those_of_what_was_told() -> None:
    history = History("ada")
    for text in ("one", "two"):
        history.told(text, f"id-{text}")
    assert history.served(["id-two", "id-one"]) is None
    assert "without 1 facts" in (history.served(["id-one"]) or "")
    assert "never told" in (history.served(["id-one", "id-two", "bob's"]) or "")
    history.may.add("perhaps")
    assert history.served(["id-one", "id-two", "its"]) is None
    assert "never told" in (history.served(["id-one", "id-two", "its", "bob's"]) or "")
    history.deleted("one")
    assert "deleted" in (history.served(["id-one", "id-two"]) or "")


async def test_users_who_talk_to_a_whole_cluster_find_nothing_wrong(tmp_path: Path) -> None:
    with local_cluster(tmp_path, 2) as cluster:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=20) as http:
            talkers = [Talker(f"u{n}", http, random.Random(n)) for n in range(4)]
            await asyncio.gather(*(talker.talk(25) for talker in talkers))
            assert [talker.failures for talker in talkers] == [[]] * 4
            assert [talker.wrong for talker in talkers] == [[]] * 4
            assert any(talker.history.must for talker in talkers)
            # What goes behind their backs is noticed.
            victim = max(talkers, key=lambda talker: len(talker.history.must))
            victim.history.must["never told"] = "id"
            await victim.chat(stream=True)
            await victim.list_facts()
            assert len(victim.wrong) == 2


async def test_a_process_that_is_cut_off_gets_no_answer_until_it_is_healed(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        server.wait_ready()
        proxy = RedisProxy(int(server.url.rpartition(":")[2].partition("/")[0]))
        await proxy.start()
        url = f"redis://127.0.0.1:{proxy.port}"
        async with connect(url, timeout_s=0.3, retries=0) as redis:
            await redis.set("key", b"value")
            proxy.cut(os.getpid())
            began = time.monotonic()
            try:
                with redis_errors("read"):
                    await redis.get("key")
                raise AssertionError("it was answered")
            except Unavailable:
                assert time.monotonic() - began >= 0.25
            proxy.heal()
            assert await redis.get("key") == b"value"
        await proxy.stop()
