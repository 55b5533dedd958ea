"""Embeddings and chunks follow the facts of a resident user: what is told gets them, what is deleted loses them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest
from resident_home import DIM, PLACEMENT, Home, LengthEmbedder, fact
from slow_engine import dead

from connector.chunk import ChunkId
from connector.plan import Piece
from connector.reason import Reason
from deployments.resident import SPARE_S
from sharding.errors import EngineFailed, Unavailable, WrongShard
from sharding.ids import FactId
from sharding.user_memory import UserMemory


@pytest.fixture
async def home() -> AsyncIterator[Home]:
    home = Home()
    yield home
    home.encoder.close()
    home.ledger.check_integrity()
    home.memory.check_integrity()


async def test_facts_are_text_until_their_chunks_are_there(home: Home) -> None:
    home.engine.gate.clear()
    await home.tell(0, 1, 2)
    assert home.encoded() == set()
    chunks = await home.residents.ready(home.memory)
    piece = chunks.piece(FactId("f1"))
    assert home.residents.servable(piece) == Piece(tuple(map(ord, "- fact 1\n")), unready=Reason.NOT_ENCODED)
    home.engine.gate.set()
    await home.settled()
    assert home.encoded() == {0, 1, 2}
    assert home.residents.servable(piece) == piece
    assert home.worker_texts() == ["- fact 0\n", "- fact 1\n", "- fact 2\n"]


async def test_facts_are_encoded_behind_the_default_head_and_their_window(home: Home) -> None:
    await home.tell(0, 1, 2, 3)
    await home.settled()
    head = home.template.default_head()
    prompts = ["".join(map(chr, prefill.token_ids[len(head) :])) for prefill in home.engine.prefills]
    assert all(list(prefill.token_ids[: len(head)]) == head for prefill in home.engine.prefills)
    assert prompts == ["- fact 0\n- fact 1\n- fact 2\n- fact 3\n", "- fact 0\n- fact 1\n"]


async def test_a_fact_told_later_is_the_only_one_encoded_then(home: Home) -> None:
    await home.tell(0, 1, 2)
    await home.settled()
    before = len(home.engine.prefills)
    await home.tell(3)
    await home.settled()
    assert [len(prefill.captures) for prefill in home.engine.prefills[before:]] == [1]


async def test_a_deleted_fact_and_all_that_was_encoded_behind_it_are_gone_when_the_change_is_done(home: Home) -> None:
    await home.tell(0, 1, 2, 3, 4)
    await home.settled()
    home.engine.fails_with = RuntimeError("nothing is encoded again in this test")
    await home.delete(2)
    assert home.worker_texts() == ["- fact 0\n", "- fact 1\n"]
    await home.settled()
    assert home.encoded() == {0, 1}


async def test_facts_behind_a_deleted_one_are_encoded_again(home: Home) -> None:
    await home.tell(0, 1, 2, 3, 4)
    await home.settled()
    await home.delete(2)
    await home.settled()
    assert home.encoded() == {0, 1, 3, 4}
    assert home.worker_texts() == ["- fact 0\n", "- fact 1\n", "- fact 3\n", "- fact 4\n"]
    assert set(home.ledger.ids_of(PLACEMENT.user)) == set(home.engine.chunks)


@pytest.mark.parametrize("seq", range(6))
async def test_a_fact_deleted_while_the_backlog_is_encoded_is_never_encoded_after_all(home: Home, seq: int) -> None:
    home.engine.gate.clear()
    await home.tell(*range(6))
    await asyncio.sleep(0.01)  # the first prefill runs now
    deleting = asyncio.create_task(home.delete(seq))
    await asyncio.sleep(0.01)
    home.engine.gate.set()
    await deleting
    await home.settled()
    left = set(range(6)) - {seq}
    assert home.encoded() == left
    assert home.worker_texts() == [f"- fact {n}\n" for n in sorted(left)]
    assert set(home.ledger.ids_of(PLACEMENT.user)) == set(home.engine.chunks)


async def test_a_user_loaded_anew_finds_the_chunks_and_loses_those_of_facts_deleted_elsewhere(home: Home) -> None:
    await home.tell(0, 1, 2, 3)
    await home.settled()
    before = len(home.engine.prefills)
    home.memory = UserMemory(PLACEMENT, DIM, [fact(seq) for seq in (0, 1, 2)], embedding_model=LengthEmbedder.model)
    await home.residents.ready(home.memory)
    assert home.encoded() == {0, 1, 2}
    assert home.worker_texts() == ["- fact 0\n", "- fact 1\n", "- fact 2\n"]
    await home.settled()
    assert len(home.engine.prefills) == before


async def test_a_user_dropped_and_loaded_anew_while_encoded_gets_no_chunk_of_a_fact_deleted_elsewhere(
    home: Home,
) -> None:
    home.engine.gate.clear()
    await home.tell(*range(6))
    await asyncio.sleep(0.01)
    home.memory = UserMemory(
        PLACEMENT, DIM, [fact(seq) for seq in (0, 2, 3, 4, 5)], embedding_model=LengthEmbedder.model
    )
    loading = asyncio.create_task(home.residents.ready(home.memory))
    await asyncio.sleep(0.01)
    home.engine.gate.set()
    await loading
    await home.settled()
    assert home.encoded() == {0, 2, 3, 4, 5}
    assert "- fact 1\n" not in home.worker_texts()
    assert set(home.ledger.ids_of(PLACEMENT.user)) == set(home.engine.chunks)


async def test_all_of_a_users_facts_forgotten_leave_no_chunk(home: Home) -> None:
    await home.tell(0, 1, 2)
    await home.settled()
    home.memory.clear()
    await home.residents.changed(home.memory)
    await home.settled()
    assert home.engine.chunks == {}
    assert home.ledger.bytes == 0


async def test_what_the_budget_has_no_room_for_stays_text() -> None:
    home = Home(budget=20)  # a fact takes nine
    await home.tell(0, 1)
    await home.tell(2)
    await home.settled()
    assert len(home.encoded()) <= 2
    assert len(home.engine.chunks) == len(home.encoded())
    home.ledger.check_integrity()
    home.encoder.close()


async def test_what_was_evicted_is_encoded_again_for_a_chat_but_nobody_active_gives_chunks_for_it() -> None:
    """Else two users who do not fit together encode each other's chunks away with each chat."""
    home = Home(budget=20)
    await home.tell(0, 1)
    await home.settled()
    other = ChunkId("other")
    home.now = 10.0
    await home.encoder.forget(home.ledger.reserve("bob", [(other, 18)]) or [])
    for id_ in list(home.engine.chunks):
        del home.engine.chunks[id_]
    home.ledger.commit([other])
    prefills = len(home.engine.prefills)
    home.now = 10.0 + SPARE_S - 1
    await home.residents.ready(home.memory)
    await home.settled()
    assert (home.encoded(), len(home.engine.prefills)) == (set(), prefills)
    home.now = 10.0 + SPARE_S
    await home.residents.ready(home.memory)
    await home.settled()
    assert home.encoded() == {0, 1}
    home.encoder.close()


async def test_a_user_who_left_leaves_no_chunk_behind_not_even_one_being_encoded(home: Home) -> None:
    home.engine.gate.clear()
    await home.tell(*range(6))
    await asyncio.sleep(0.01)
    leaving = asyncio.create_task(home.residents.left(PLACEMENT.user))
    await asyncio.sleep(0.01)
    home.engine.gate.set()
    await leaving
    await home.settled()
    assert home.engine.chunks == {}
    assert home.ledger.bytes == 0


async def test_workers_that_do_not_answer_fail_a_deletion_and_nothing_else(home: Home) -> None:
    await home.tell(0, 1)
    await home.settled()
    home.engine.drops_fail_with = dead()
    assert home.memory.remove(fact(0).id)
    for _ in range(2):
        with pytest.raises(EngineFailed):
            await home.residents.changed(home.memory)
    home.memory.add([fact(2)])
    await home.residents.added(home.memory)
    home.memory = UserMemory(PLACEMENT, DIM, [fact(1), fact(2)], embedding_model=LengthEmbedder.model)
    await home.residents.ready(home.memory)


# -- embeddings -------------------------------------------------------------------------------------------------------


async def test_a_user_who_is_ready_has_every_fact_in_the_index_and_the_embeddings_kept(home: Home) -> None:
    await home.tell(0, 1)
    await home.residents.ready(home.memory)
    assert home.memory.facts_without_embedding() == []
    assert set(home.shelf.kept) == {"f0", "f1"}
    assert len(home.memory.search([1.0, 0.0], 5)) == 2


async def test_what_is_embedded_already_is_not_embedded_again(home: Home) -> None:
    await home.tell(0, 1)
    await home.residents.ready(home.memory)
    await home.residents.ready(home.memory)
    await home.tell(2)
    await home.residents.ready(home.memory)
    assert home.embedder.asked == [["fact 0", "fact 1"], ["fact 2"]]


async def test_what_another_embedding_model_made_is_embedded_again_and_kept(home: Home) -> None:
    old = b"former" + np.ones(DIM, np.float32).tobytes()
    home.memory.add([replace(fact(0), embedding=old)])
    await home.residents.ready(home.memory)
    assert home.embedder.asked == [["fact 0"]]
    assert home.shelf.kept[fact(0).id].startswith(LengthEmbedder.model)
    again = UserMemory(PLACEMENT, DIM, embedding_model=LengthEmbedder.model)
    again.add([replace(fact(0), embedding=home.shelf.kept[fact(0).id])])
    assert again.facts_without_embedding() == []


async def test_requests_that_come_together_wait_for_one_embedding(home: Home) -> None:
    await home.tell(0, 1)
    home.embedder.gate.clear()
    asking = [asyncio.create_task(home.residents.ready(home.memory)) for _ in range(5)]
    await asyncio.sleep(0.01)
    home.embedder.gate.set()
    await asyncio.gather(*asking)
    assert len(home.embedder.asked) == 1


async def test_a_fact_deleted_while_it_was_embedded_does_not_come_back(home: Home) -> None:
    await home.tell(0, 1)
    home.embedder.gate.clear()
    indexing = asyncio.create_task(home.residents.index(home.memory))
    await asyncio.sleep(0.01)
    await home.delete(0)
    home.embedder.gate.set()
    await indexing
    assert [f.seq for f in home.memory.search([1.0, 0.0], 5)] == [1]


@pytest.mark.parametrize("failure", [Unavailable("Redis is away"), WrongShard("moved")])
async def test_embeddings_that_cannot_be_kept_serve_this_process_all_the_same(home: Home, failure: Exception) -> None:
    home.shelf.fails_with = failure
    await home.tell(0, 1)
    await home.residents.ready(home.memory)
    assert len(home.memory.search([1.0, 0.0], 5)) == 2
    assert home.shelf.kept == {}


async def test_facts_are_tokenised_once_and_beside_the_event_loop(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    tokenise = home.template.fact

    def watched(text: str) -> list[int]:
        threads.append(threading.get_ident())
        return tokenise(text)

    monkeypatch.setattr(home.template, "fact", watched)
    told = [fact(n) for n in range(3)]
    await home.residents.read(home.memory, told)
    home.memory.add(told)
    await home.residents.changed(home.memory)
    assert len(threads) == 3
    assert threading.get_ident() not in threads
