"""Facts become chunks in the background: fairly, within the budget, and never after they were forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from slow_engine import STEP_TOKENS, SlowEngine, dead

from connector.chunk import CaptureRange, ChunkId, chunk_id, text_salt
from connector.ledger import ChunkLedger
from connector.windows import EncodeJob
from deployments.encode_pace import EncodePace
from deployments.encoder import ENCODES_AT_ONCE, Encoder
from sharding.errors import EngineFailed

BUDGET = 20


def job(owner: str, *facts: int) -> EncodeJob:
    """Captures facts of two tokens each behind a head of one."""
    ids = [chunk_id("model", owner, (), (fact,)) for fact in facts]
    captures = tuple(CaptureRange(id_, 1 + 2 * place, 2) for place, id_ in enumerate(ids))
    return EncodeJob((0, *(token for fact in facts for token in (fact, fact))), captures)


def ids_of(jobs: Sequence[EncodeJob]) -> list[ChunkId]:
    return [range_.id for job in jobs for range_ in job.captures]


class Missing:
    """Wishes for these jobs: each of which a chunk is not here."""

    def __init__(self, *jobs: EncodeJob) -> None:
        self._jobs = jobs

    def ids(self) -> list[ChunkId]:
        return ids_of(self._jobs)

    def jobs(self, resident: Callable[[ChunkId], bool]) -> Iterator[EncodeJob]:
        return (job for job in self._jobs if not all(map(resident, ids_of([job]))))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110  # the engine and the ledger tell nobody of their changes
            await asyncio.sleep(0)


async def test_what_was_submitted_is_encoded_one_prefill_a_job_under_the_owners_own_salt(
    encoder: Encoder, engine: SlowEngine, ledger: ChunkLedger
) -> None:
    jobs = [job("alice", 1, 2), job("alice", 3)]
    await encoder.submit("alice", Missing(*jobs))
    await encoder.settled("alice")
    assert all(map(ledger.peek_resident, ids_of(jobs)))
    assert [prefill.token_ids for prefill in engine.prefills] == [(0, 1, 1, 2, 2), (0, 3, 3)]
    assert {prefill.salt for prefill in engine.prefills} == {text_salt("alice")}
    assert encoder.backlog() == 0


async def test_a_long_job_is_prefilled_in_steps_and_what_one_captured_is_served_before_the_next(
    engine: SlowEngine, ledger: ChunkLedger
) -> None:
    encoder = Encoder(engine, ledger, EncodePace((4, 4)))
    ids = ids_of([job("alice", 1, 2, 3, 4)])
    served: list[list[bool]] = []
    encode = engine.encode

    async def watched(*args: Any) -> set[ChunkId]:
        served.append(list(map(ledger.peek_resident, ids)))
        return await encode(*args)

    engine.encode = watched  # type: ignore[method-assign]
    await encoder.submit("alice", Missing(job("alice", 1, 2, 3, 4)))
    await encoder.settled("alice")
    encoder.close()
    assert [len(prefill.token_ids) for prefill in engine.prefills] == [3, 7, 9]
    assert served == [[False] * 4, [True, False, False, False], [True, True, True, False]]
    assert list(engine.chunks) == ids


async def test_steps_that_were_not_begun_are_left_out_when_the_facts_change(
    engine: SlowEngine, ledger: ChunkLedger
) -> None:
    encoder = Encoder(engine, ledger, EncodePace((4, 4)))
    engine.gate.clear()
    await encoder.submit("alice", Missing(job("alice", 1, 2, 3, 4)))
    await until(lambda: engine.running)
    await encoder.submit("alice", Missing())
    engine.gate.set()
    await encoder.settled("alice")
    encoder.close()
    assert len(engine.prefills) == 1
    assert (len(ledger), ledger.bytes) == (1, 2), "what the other steps had reserved is given back"


async def test_the_backlog_counts_chunks_that_wait_or_run(encoder: Encoder, engine: SlowEngine) -> None:
    engine.gate.clear()
    for n in range(ENCODES_AT_ONCE + 2):
        await encoder.submit(f"user-{n}", Missing(job(f"user-{n}", 1)))
    await until(lambda: engine.running == ENCODES_AT_ONCE)
    assert encoder.backlog() == ENCODES_AT_ONCE + 2
    engine.gate.set()
    for n in range(ENCODES_AT_ONCE + 2):
        await encoder.settled(f"user-{n}")
    assert encoder.backlog() == 0
    assert engine.most_running == ENCODES_AT_ONCE


async def test_jobs_of_one_owner_never_run_at_the_same_time(encoder: Encoder, engine: SlowEngine) -> None:
    for first in (1, 3, 5):
        await encoder.submit("alice", Missing(job("alice", first), job("alice", first + 1)))
        await asyncio.sleep(0)
    await encoder.settled("alice")
    assert engine.most_running == 1


async def test_a_later_submission_takes_the_place_of_one_that_was_not_begun_and_of_the_rest_of_one_that_was(
    encoder: Encoder, engine: SlowEngine, ledger: ChunkLedger
) -> None:
    engine.gate.clear()
    await encoder.submit("alice", Missing(job("alice", 1), job("alice", 2)))
    await until(lambda: engine.running)
    await encoder.submit("alice", Missing(job("alice", 3)))
    await encoder.submit("alice", Missing(job("alice", 4)))
    engine.gate.set()
    await encoder.settled("alice")
    assert [prefill.ids for prefill in engine.prefills] == [ids_of([job("alice", n)]) for n in (1, 4)]


async def test_a_chunk_forgotten_while_it_is_encoded_is_gone_when_its_prefill_ends(
    encoder: Encoder, engine: SlowEngine, ledger: ChunkLedger
) -> None:
    [forgotten, kept] = ids_of([job("alice", 1, 2)])
    engine.gate.clear()
    await encoder.submit("alice", Missing(job("alice", 1, 2)))
    await until(lambda: engine.running)
    forgetting = asyncio.create_task(encoder.forget([forgotten]))
    await asyncio.sleep(0)
    engine.gate.set()
    await forgetting
    await encoder.settled("alice")
    assert list(engine.chunks) == [kept]
    assert ledger.peek_resident(kept)
    assert not ledger.peek_resident(forgotten)


async def test_forgotten_chunks_are_gone_from_the_worker_when_the_call_returns(
    encoder: Encoder, engine: SlowEngine
) -> None:
    await encoder.submit("alice", Missing(job("alice", 1, 2)))
    await encoder.settled("alice")
    await encoder.forget([*ids_of([job("alice", 1, 2)]), *ids_of([job("alice", 9)])])
    assert engine.chunks == {}


async def test_room_is_made_on_the_worker_before_new_chunks_come(
    encoder: Encoder, engine: SlowEngine, ledger: ChunkLedger
) -> None:
    for n in range(4):  # the engine asserts the budget
        await encoder.submit(f"user-{n}", Missing(job(f"user-{n}", 1, 2, 3, 4)))
        await encoder.settled(f"user-{n}")
    assert len(ledger) == len(engine.chunks) == 10
    assert all(map(ledger.peek_resident, ids_of([job("user-3", 1, 2, 3, 4)])))


async def test_what_does_not_fit_the_budget_stays_text_without_a_prefill_and_later_jobs_go_on(
    encoder: Encoder, engine: SlowEngine, ledger: ChunkLedger
) -> None:
    large, small = job("alice", *range(11)), job("alice", 20)
    await encoder.submit("alice", Missing(large, small))
    await encoder.settled("alice")
    assert list(engine.chunks) == ids_of([small])
    assert len(engine.prefills) == 1


async def test_a_chunk_that_did_not_become_complete_leaves_no_reservation_and_is_tried_with_the_next_submission(
    encoder: Encoder, engine: SlowEngine, ledger: ChunkLedger
) -> None:
    [lost, came] = ids_of([job("alice", 1, 2)])
    engine.loses = {lost}
    await encoder.submit("alice", Missing(job("alice", 1, 2)))
    await encoder.settled("alice")
    assert (ledger.bytes, ledger.peek_resident(came)) == (2, True)
    engine.loses = set()
    await encoder.submit("alice", Missing(job("alice", 1, 2)))
    await encoder.settled("alice")
    assert ledger.peek_resident(lost)


@pytest.mark.parametrize("failure", [ValueError("this prompt is too long"), dead()])
async def test_a_failed_encode_leaves_nothing_reserved_and_ends_encoding_for_nobody_else(
    encoder: Encoder, engine: SlowEngine, ledger: ChunkLedger, failure: Exception
) -> None:
    engine.fails_with = failure
    for n in range(ENCODES_AT_ONCE + 1):
        await encoder.submit(f"user-{n}", Missing(job(f"user-{n}", 1)))
        await encoder.settled(f"user-{n}")
    assert ledger.bytes == 0
    engine.fails_with = None
    await encoder.submit("alice", Missing(job("alice", 1)))
    await encoder.settled("alice")
    assert len(ledger) == 1


@pytest.mark.parametrize(("failure", "tried"), [(ValueError("this prompt is too long"), 3), (dead(), 1)])
async def test_one_failed_job_does_not_end_the_owners_others_but_a_failed_engine_does(
    encoder: Encoder, engine: SlowEngine, failure: Exception, tried: int
) -> None:
    engine.fails_with = failure
    await encoder.submit("alice", Missing(*(job("alice", n) for n in range(3))))
    await encoder.settled("alice")
    assert len(engine.prefills) == tried


# -- what the workers did not confirm ---------------------------------------------------------------------------------


async def test_a_chunk_is_dropped_until_the_workers_confirm_it_and_no_deletion_is_done_before(
    encoder: Encoder, engine: SlowEngine
) -> None:
    await encoder.submit("alice", Missing(job("alice", 1)))
    await encoder.settled("alice")
    engine.drops_fail_with = dead()
    with pytest.raises(EngineFailed):
        await encoder.forget(ids_of([job("alice", 1)]))
    with pytest.raises(EngineFailed):
        await encoder.forget([])  # the deletion again: the ledger knows nothing of the chunk any more
    assert engine.chunks
    engine.drops_fail_with = None
    await encoder.forget([])
    assert engine.chunks == {}


async def test_what_is_to_be_dropped_is_gone_before_the_same_chunk_is_encoded_again(
    encoder: Encoder, engine: SlowEngine, ledger: ChunkLedger
) -> None:
    wishes = Missing(job("alice", 1))
    await encoder.submit("alice", wishes)
    await encoder.settled("alice")
    engine.drops_fail_with = dead()
    with pytest.raises(EngineFailed):
        await encoder.forget(wishes.ids())
    await encoder.submit("alice", wishes)
    await encoder.settled("alice")
    assert len(engine.prefills) == 1, "not before the drop was confirmed"
    engine.drops_fail_with = None
    await encoder.submit("alice", wishes)
    await encoder.settled("alice")
    await encoder.forget([])
    assert list(engine.chunks) == wishes.ids()
    assert all(map(ledger.peek_resident, wishes.ids()))


async def test_what_an_encode_that_failed_left_on_the_workers_is_dropped_with_the_next(
    encoder: Encoder, engine: SlowEngine
) -> None:
    engine.fails_with = dead()
    await encoder.submit("alice", Missing(job("alice", 1)))
    await encoder.settled("alice")
    engine.chunks[ids_of([job("alice", 1)])[0]] = (1, 1)  # complete there, as nobody was told
    await encoder.forget([])
    assert engine.chunks == {}


async def test_a_deletion_during_anothers_drop_is_done_with_it_or_after_it(
    encoder: Encoder, engine: SlowEngine
) -> None:
    for owner in ("alice", "bob"):
        await encoder.submit(owner, Missing(job(owner, 1)))
        await encoder.settled(owner)
    engine.gate.clear()
    first = asyncio.create_task(encoder.forget(ids_of([job("alice", 1)])))
    await asyncio.sleep(0.01)
    second = asyncio.create_task(encoder.forget(ids_of([job("bob", 1)])))
    await asyncio.sleep(0.01)
    assert not second.done()
    engine.gate.set()
    await asyncio.gather(first, second)
    assert engine.chunks == {}


async def test_whoever_waits_for_one_owner_does_not_wait_for_another(encoder: Encoder, engine: SlowEngine) -> None:
    engine.gate.clear()
    await encoder.submit("alice", Missing(job("alice", 1)))
    await until(lambda: engine.running)
    async with asyncio.timeout(1):
        await encoder.settled("bob")
    assert encoder.backlog() == 1


async def test_closing_gives_back_what_a_running_encode_had_reserved(engine: SlowEngine, ledger: ChunkLedger) -> None:
    encoder = Encoder(engine, ledger, EncodePace(STEP_TOKENS))
    engine.gate.clear()
    await encoder.submit("alice", Missing(job("alice", 1)))
    await until(lambda: engine.running)
    encoder.close()
    await until(lambda: ledger.bytes == 0 and engine.running == 0)


async def test_for_a_refused_model_nothing_is_ever_encoded(encoder: Encoder, engine: SlowEngine) -> None:
    engine.refusal = "its positions are not rotary"
    await encoder.submit("alice", Missing(job("alice", 1)))
    await encoder.settled("alice")
    assert engine.prefills == []
