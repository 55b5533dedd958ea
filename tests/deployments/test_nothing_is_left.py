"""After a deletion the bytes of everything there is are searched: Redis and what it writes, every file of every tier,
logs at their most talkative; and for KV the inventories of all tiers of all shards.

Each user here was on both shards, so that one of them has everything of somebody who is not its own any more.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from connector.chunk import ChunkId
from connector.chunk_file import HEADER_BYTES, ChunkFormat, Damaged, Label
from connector.files import LocalFiles, name_of, owner_key
from deployments.deterministic import TOKEN_BYTES, ByteTokenizer, decode
from deployments.shard import Shard
from sharding.ids import ShardId, UserId
from sharding.scopes import Entity, owner_id
from sharding.sealing import Seal, new_secret
from tests.deployments.town import MODEL, Town, a_town
from tests.sharding.real_valkey import running_valkey

SECRET = "xylophone"
OLDER = "glockenspiel"
SAID = "Her brother owns one harmonica"  # in a turn


@dataclass
class Place:
    """A town whose every byte lies below `folder`."""

    town: Town
    folder: Path
    key: bytes | None

    def client(self, tenant: str, role: Any = "admin") -> httpx.Client:
        key, _ = self.town.run(self.town.api_keys.create(tenant, role))
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.town.url, headers=headers, trust_env=False, timeout=30)

    def shards(self) -> list[Shard]:
        return list(self.town.shards.by_id.values())

    def rewrite(self) -> None:
        """Redis writes both of its files anew; a rewrite that runs began before the deletion, perhaps."""
        for write in (self.town.redis.bgrewriteaof, self.town.redis.bgsave):
            self._wait_written()
            write()
        self._wait_written()

    def _wait_written(self) -> None:
        busy = ("aof_rewrite_in_progress", "aof_rewrite_scheduled", "rdb_bgsave_in_progress")
        while any(self.town.redis.info("persistence")[name] for name in busy):
            time.sleep(0.01)

    def raw(self, *words: str) -> list[Path]:
        """Files that hold one of the words as it is."""
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        return [path for path in files for word in words if word.encode() in path.read_bytes()]

    def chunks(self, *words: str) -> list[object]:
        """Chunks, in files and in memory, that were made of one of the words."""
        texts: list[tuple[object, str]] = [(path, self._text(path.read_bytes())) for path in self.folder.rglob("*.0")]
        for shard in self.shards():
            for store in (shard.engine.chunks, shard.engine.host):  # type: ignore[attr-defined]
                texts += [(id_, decode(tokens)) for id_, tokens in store.items()]
        return [place for place, text in texts for word in words if word in text]

    def facts(self, *words: str) -> list[object]:
        held = [fact for shard in self.shards() for memory in shard.table.memories() for fact in memory.facts]
        return [fact for fact in held for word in words if word in repr(fact)]

    def inventories(self, owner: UserId) -> list[object]:
        """What any tier of any shard, and any directory, has of an owner."""
        held: list[object] = [id_ for shard in self.shards() for id_ in shard.tiers.ids_of(owner)]
        held += [path for path in self.folder.rglob(owner_key(owner)) if any(path.iterdir())]
        return [*held, *(shard for shard in self.shards() if shard.encoder.backlog())]

    def everywhere(self, *words: str) -> list[object]:
        kept = [key for key, value in self.town.kept().items() for word in words if word.encode() in key + value]
        return [*kept, *self.raw(*words), *self.chunks(*words), *self.facts(*words)]

    def _text(self, data: bytes) -> str:
        payload = bytearray(data[HEADER_BYTES:])
        header = data[:HEADER_BYTES]
        tokens = len(payload) // TOKEN_BYTES
        form = ChunkFormat(self.key)
        try:
            digest, rank, owner, id_, count, _ = form._fields(header)
            form.position_of(header, memoryview(payload), Label(digest, rank, owner, id_, count))  # type: ignore[arg-type]
        except Damaged:
            return ""
        return decode(np.frombuffer(payload, np.int64)[:tokens].tolist())

    def settled(self, owner: UserId) -> None:
        for shard in self.shards():
            self.town.run(shard.encoder.settled(owner))
            self.town.run(shard.distillation.settled())
            self.town.run(shard.tiers.writer.written())

    def remember(self, http: httpx.Client, tenant: str, user: str) -> str:
        """A fact with a history, metadata and feedback, a turn, chunks in every tier of both shards; the fact's id."""
        told = {"user_id": user, "agent_id": "band", "messages": f"I play the {OLDER}.", "metadata": {"what": OLDER}}
        (fact,) = http.post("/v1/memories", json=told).raise_for_status().json()["results"]
        owner = owner_id(tenant, Entity("user", user))
        self.settled(owner)
        assert len(self.chunks(OLDER)) == 3, "on a device, a disk and the shared path"
        change = {"text": f"I play the {SECRET}.", "metadata": {"what": SECRET}}
        http.put(f"/v1/memories/{fact['id']}/", json=change).raise_for_status()
        assert self.chunks(OLDER) == [], "an update is answered when the old version is in no tier"
        said = {"memory_id": fact["id"], "feedback": "POSITIVE", "feedback_reason": f"true, {SECRET}"}
        http.post("/v1/feedback/", json=said).raise_for_status()
        turn = {"user_id": user, "run_id": "evening", "messages": f"{SAID}."}
        http.post("/v3/memories/add/", json=turn).raise_for_status()
        self.settled(owner)
        before = self.town.run(self.town.directory.lookup(owner))
        (other,) = {ShardId("shard-a"), ShardId("shard-b")} - {before.shard}
        self.town.gateway.owners.moved(self.town.run(self.town.directory.switch(before, other)))
        assert fact["id"] in ask(http, user)
        self.settled(owner)
        assert all(shard.tiers.ids_of(owner) for shard in self.shards())
        return str(fact["id"])


@pytest.fixture(scope="module", params=[None, new_secret()], ids=["in the clear", "encrypted"])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("p")
    tiers = {
        "chunk_host_bytes": 1 << 20,
        "chunk_disk_dir": folder / "disk",
        "chunk_disk_bytes": 1 << 30,
        "chunk_shared_url": str(folder / "shared"),
        "chunk_shared_bytes": 1 << 30,
        "encryption_key": request.param,
    }
    (folder / "redis").mkdir()
    handler = logging.FileHandler(folder / "log")
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        with (
            running_valkey(folder / "redis", "--appendonly", "yes") as valkey,
            a_town(valkey, tiers, require_keys=True) as town,
        ):
            yield Place(town, folder, Seal(request.param).file_key)
    finally:
        root.setLevel(level)
        root.removeHandler(handler)
        handler.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pause after keys are revoked: there is one gateway."""
    monkeypatch.setattr("deployments.access.CACHE_S", 0.0)


@pytest.fixture
def tenant() -> str:
    return f"acme-{uuid.uuid4().hex[:8]}"


def ask(http: httpx.Client, user: str) -> list[str]:
    """The ids of the facts that an answer was given from."""
    body = {"model": MODEL, "user_id": user, "messages": [{"role": "user", "content": "What do I play?"}]}
    ids: list[str] = http.post("/v1/chat/completions", json=body).raise_for_status().json()["memory"]["fact_ids"]
    return ids


HOWS = {
    "fact": "/v1/memories/{id}/",
    "user": "/v2/entities/user/{user}/",
    "its memories": "/v1/memories?user_id={user}",
    "tenant": "/v1/admin/tenants/{tenant}",
}


@pytest.mark.parametrize("how", HOWS)
def test_what_was_deleted_is_in_no_byte_of_anything(place: Place, quick: None, tenant: str, how: str) -> None:
    words = [SECRET, OLDER] if how == "fact" else [SECRET, OLDER, "harmonica"]
    owner = owner_id(tenant, Entity("user", "ada"))
    with place.client(tenant) as http:
        id = place.remember(http, tenant, "ada")
        for word in words[:1] + words[2:]:
            assert len(place.chunks(word)) == 5, "on two devices, on two disks, and on the shared path"
            assert place.facts(word)
        if place.key is None:
            assert [path for path in place.raw(SECRET) if path.suffix == ".aof"]
        else:
            assert place.raw(*words) == [], "nothing is to be read without the key, not even before"
        assert not [path for path in place.raw(*words) if path.name == "log"]
        http.delete(HOWS[how].format(id=id, user="ada", tenant=tenant)).raise_for_status()
        place.rewrite()
        assert place.everywhere(*words) == []
        if how == "fact":
            assert len(http.get("/v1/memories?user_id=ada").json()["results"]) == 1, "the other one stays"
            place.settled(owner)
        else:
            assert place.inventories(owner) == []
            assert not [
                key
                for key in place.town.kept()
                if tenant.encode() in key and how == "tenant" and b"seq" not in key and b"owner" not in key
            ]
    with place.client(tenant) as http:
        http.delete(f"/v1/admin/tenants/{tenant}").raise_for_status()
    assert place.inventories(owner) == []


def plant_chunk(root: Path, place: Place, owner: UserId, digest: str) -> None:
    tokens = ByteTokenizer().encode(f"- I play the {SECRET}.\n")
    payload = np.array(tokens, np.int64).tobytes().ljust(len(tokens) * TOKEN_BYTES, b"\0")
    label = Label(digest, 0, owner, ChunkId("0" * 32), len(tokens))
    name = name_of(digest, owner_key(owner), label.id, 0)
    LocalFiles(root).write(name, *ChunkFormat(place.key).writing(label, 0, memoryview(payload)))


@pytest.mark.parametrize("where", ["shared", "disk/0", "disk/7"])
def test_a_chunk_that_is_left_in_any_file_is_found(place: Place, tenant: str, where: str) -> None:
    owner = owner_id(tenant, Entity("user", "ada"))
    assert place.everywhere(SECRET) == []
    plant_chunk(place.folder / where, place, owner, "f" * 32)
    assert [path.name for path in place.everywhere(SECRET)] == ["0" * 32 + ".0"]  # type: ignore[attr-defined]
    assert place.inventories(owner)
    for path in place.folder.rglob("0" * 32 + ".0"):
        path.unlink()
    assert place.inventories(owner) == []


@pytest.mark.parametrize("file", ["log", "redis/appendonlydir/leak", "disk/0/.tmp-leak", "crash"])
def test_a_word_that_is_left_in_any_file_is_found(place: Place, file: str) -> None:
    path = place.folder / file
    before = path.read_bytes() if path.exists() else b""
    path.write_bytes(before + b"...the xylophone...")
    assert place.everywhere(SECRET) == [path]
    path.write_bytes(before)


@pytest.mark.parametrize("how", ["fact", "user", "tenant"])
def test_files_that_no_ledger_counts_go_with_what_they_were_made_of(
    place: Place, quick: None, tenant: str, how: str
) -> None:
    """Of another model, of a shard that lost the user and wrote all the same, of one that stands still."""
    owner = owner_id(tenant, Entity("user", "ada"))
    with place.client(tenant) as http:
        id = place.remember(http, tenant, "ada")
        (digest,) = {shard.engine.model_digest for shard in place.shards()}
        for where in ("shared", "disk/7"):
            for of in (digest, "f" * 32):
                plant_chunk(place.folder / where, place, owner, of)
        http.delete(HOWS[how].format(id=id, user="ada", tenant=tenant)).raise_for_status()
        assert place.chunks(SECRET) == []
        if how != "tenant":
            http.delete(f"/v1/admin/tenants/{tenant}").raise_for_status()
    assert place.inventories(owner) == []
