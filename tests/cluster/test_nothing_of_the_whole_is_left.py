"""A whole server at its most talkative: what people said is in none of its files, and what was deleted in no tier."""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
from pathlib import Path

import psutil
import redis

from cluster.embedded_redis import ADDRESS
from connector.files import owner_key
from tests.cluster.whole_server import WholeServer

WORDS = ("Quillfeather", "marzipan", "zeppelin")
FACTS = [f"My parrot is called {WORDS[0]}.", f"I am allergic to {WORDS[1]}.", f"I have flown in a {WORDS[2]}."]


def ray_directory(server: WholeServer) -> Path:
    """Where Ray and all processes below it write their logs."""
    lines = " ".join(" ".join(child.cmdline()) for child in psutil.Process(server.process.pid).children(recursive=True))
    (found,) = set(re.findall(r"/tmp/memshard-\w+", lines))
    return Path(found)


def files_with(server: WholeServer, *words: str) -> list[Path]:
    found = []
    for folder in (server.state_dir, ray_directory(server)):
        for path in folder.rglob("*"):
            with suppress(FileNotFoundError):  # as temporary files are
                data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
                found += [path for word in words if word.encode() in data]
    return found


def chunk_files(server: WholeServer, user: str) -> list[Path]:
    return [path for folder in server.state_dir.rglob(owner_key(user)) for path in folder.iterdir()]


def bytes_in_tiers(server: WholeServer) -> dict[str, int]:
    """What all shards hold, by tier, once nothing is being encoded or written any more."""
    last: dict[str, int] = {}
    while True:
        shards = server.shards()
        sums: dict[str, int] = {}
        for shard in shards:
            for tier, held, _ in shard["tiers"]:
                sums[tier] = sums.get(tier, 0) + held
        if sums == last and not any(shard["encode_backlog"] for shard in shards):
            return sums
        last = sums
        time.sleep(0.5)


def rewrite(server: WholeServer) -> None:
    """Redis writes its append-only file anew."""
    with redis.Redis.from_url((server.state_dir / "redis" / ADDRESS).read_text()) as client:
        names = ("aof_rewrite_in_progress", "aof_rewrite_scheduled")
        for ask in (True, False):
            while any(client.info("persistence")[name] for name in names):
                time.sleep(0.05)
            if ask:
                client.bgrewriteaof()


def test_what_was_said_is_in_no_file_and_what_was_deleted_in_no_tier(server: WholeServer) -> None:
    server.ask("talkative", "Hello")  # the head is encoded from the second chat on
    server.ask("talkative", "Hello")
    before = bytes_in_tiers(server)
    ids = [fact["id"] for fact in server.remember("gone", *FACTS)]
    for refused in ({"text": "x " * 5000 + WORDS[0]}, {"text": 5, WORDS[1]: WORDS[2]}, {"text": FACTS[1]}):
        assert server.http.put(f"/v1/memories/{ids[0]}/", json=refused).status_code in (400, 409, 413)
    distilled = {"user_id": "gone", "infer": True, "messages": f"I also bake {WORDS[1]} cakes."}
    event = server.http.post("/v1/memories", json=distilled).raise_for_status().json()["event_id"]
    while server.http.get(f"/v1/event/{event}/").json()["status"] == "PENDING":
        time.sleep(0.2)
    server.wait_encoded("gone")
    for mode in ("inject", "prompt"):
        server.ask("gone", f"What do you know of {WORDS[0]}?", memory={"mode": mode})
    filters = {"filters": {"AND": [{"user_id": "gone"}, {"memory": {"icontains": WORDS[2]}}]}}
    server.http.post("/v3/memories/search/", json={"query": WORDS[2], **filters})
    server.http.post("/v1/memories", content=json.dumps(FACTS)[:-1])
    telling = bytes_in_tiers(server)
    assert all(telling[tier] > before.get(tier, 0) for tier in ("device", "disk", "shared"))
    assert len(chunk_files(server, "gone")) >= 2 * len(FACTS), "on a local disk, and on the shared path"
    assert files_with(server, *WORDS) == [], "not even before"

    some = {"AND": [{"user_id": "gone"}, {"memory": {"icontains": WORDS[2]}}]}
    server.http.delete("/v1/memories", params={"filters": repr(some)}).raise_for_status()
    server.http.delete(f"/v1/memories/{ids[0]}/").raise_for_status()
    server.http.delete("/v2/entities/user/gone/").raise_for_status()
    assert chunk_files(server, "gone") == []
    assert bytes_in_tiers(server) == before
    rewrite(server)
    assert files_with(server, *WORDS) == []
    assert server.memories("gone") == []
    assert server.http.get("/v1/export", params={"user_id": "gone"}).json()["turns"] == []


def test_the_key_is_in_no_file_but_its_own(server: WholeServer) -> None:
    secret = (server.state_dir / "key").read_text()
    assert files_with(server, secret) == [server.state_dir / "key"]
    started = psutil.Process(server.process.pid).children(recursive=True)
    assert not [process.cmdline() for process in started if secret in " ".join(process.cmdline())]


def test_a_word_in_any_log_would_be_found(server: WholeServer) -> None:
    for folder in (server.state_dir, next(ray_directory(server).glob("session_2*")) / "logs"):
        (folder / "plant.log").write_text(f"a {WORDS[0]}")
        assert files_with(server, *WORDS) == [folder / "plant.log"]
        (folder / "plant.log").unlink()
