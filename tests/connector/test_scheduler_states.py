"""The scheduler's half under whatever order vLLM may call it in: admissions, preemptions, failures, aborts."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from connector.chunk import ChunkId
from connector.metadata import StepReport, transfer_params
from connector.reason import Reason
from connector.scheduler_side import SchedulerSide

BLOCK = 4


@dataclass
class Asked:
    """A request as vLLM knows it: waiting, or with blocks that hold its first `computed` tokens."""

    prompt: int
    load: int
    salt: str
    reads_cache: bool
    blocks: list[int] | None = None
    computed: int = 0
    loaded_in_this_step: int = 0
    failed: bool = False


class Scheduling(RuleBasedStateMachine):
    """vLLM's side of the contract; blocks are handed out once and never again, so that a slot says whose it is."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = SchedulerSide(BLOCK)
        self.requests: dict[str, Asked] = {}
        self.published: dict[str, int] = {}  # by salt: tokens that the prefix cache has
        self.names = 0
        self.next_block = 0

    @rule(prompt=st.integers(1, 30), load=st.integers(0, 30), salt=st.sampled_from("ab"), reads=st.booleans())
    def arrive(self, prompt: int, load: int, salt: str, reads: bool) -> None:
        name = f"r{self.names}"
        self.names += 1
        self.requests[name] = Asked(prompt, min(load, prompt), salt, reads or not load)
        wishes = transfer_params([(ChunkId(salt), min(load, prompt))] if load else [])
        self.scheduler.arrived(name, wishes, prompt, salt=salt, reads_cache=reads or not load)

    @precondition(lambda self: any(asked.blocks is None for asked in self.requests.values()))
    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([name for name, asked in self.requests.items() if asked.blocks is None]))
        asked = self.requests[name]
        hit = 0
        if asked.reads_cache:
            hit = min(self.published.get(asked.salt, 0), asked.prompt - 1) // BLOCK * BLOCK
        external = self.scheduler.matched_tokens(name, hit)
        sharing = any(
            other.loaded_in_this_step and other.salt == asked.salt
            for other_name, other in self.requests.items()
            if other_name != name
        )
        if external is None:
            assert sharing, "nothing to wait for"
            return
        assert not (sharing and asked.load), "would share blocks of a load that may fail"
        if not asked.reads_cache:
            assert external == 0
        expected = 0 if asked.failed else max(0, min(asked.load, asked.prompt - 1) - hit)
        assert external == (expected if asked.reads_cache else 0)
        needed = -(-asked.prompt // BLOCK)
        asked.blocks = list(range(self.next_block, self.next_block + needed))
        self.next_block += needed
        self.scheduler.allocated(name, asked.blocks, external)
        asked.computed, asked.loaded_in_this_step = hit + external, external

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """One engine step: loads happen, or fail; what was loaded is in the prefix cache from then on."""
        loads = {load.request_id: load for load in self.scheduler.step([]).loads}
        due = {name: asked for name, asked in self.requests.items() if asked.loaded_in_this_step}
        assert loads.keys() == due.keys(), "every admitted load once, and none of a request that has ended"
        failed = data.draw(st.sets(st.sampled_from(sorted(due)))) if due else set()
        for name, asked in due.items():
            load, blocks = loads[name], asked.blocks
            assert blocks is not None
            assert (load.skip + len(load.slots), len(load.slots)) == (asked.computed, asked.loaded_in_this_step)
            assert {slot // BLOCK for slot in load.slots} == set(load.blocks) <= set(blocks)
            asked.loaded_in_this_step = 0
            if name in failed:
                asked.failed = True
            else:
                self.published[asked.salt] = max(self.published.get(asked.salt, 0), asked.computed)
        if failed:
            self.scheduler.reported(StepReport(dict.fromkeys(failed, Reason.MISSING_CHUNK)))

    @precondition(lambda self: any(asked.blocks is not None for asked in self.requests.values()))
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """Only a request of an earlier step: vLLM admits nobody in a step in which it preempts."""
        running = [
            n for n, asked in self.requests.items() if asked.blocks is not None and not asked.loaded_in_this_step
        ]
        if running:
            self.requests[data.draw(st.sampled_from(running))].blocks = None

    @rule(salt=st.sampled_from("ab"))
    def evict_the_prefix_cache(self, salt: str) -> None:
        self.published.pop(salt, None)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """Whether it is done or was aborted, waiting or running, before its step or after."""
        name = data.draw(st.sampled_from(sorted(self.requests)))
        asked = self.requests.pop(name)
        told = self.scheduler.finished(name)
        assert (told is None) == (not asked.load)
        if told is not None:
            covered = min(asked.load, asked.prompt - 1)
            assert 0 <= told["injected_tokens"] + told["hit_tokens"] <= covered
            reason = Reason.MISSING_CHUNK if asked.failed else None if asked.reads_cache else Reason.READS_NO_CACHE
            assert told["fallback"] == reason
            if reason is None and asked.blocks is not None:
                assert told["injected_tokens"] + told["hit_tokens"] == covered

    @invariant()
    def nothing_is_kept_of_who_has_gone(self) -> None:
        wishing = {name for name, asked in self.requests.items() if asked.load}
        assert self.scheduler._known.keys() == wishing
        assert self.scheduler._loads.keys() <= wishing


Scheduling.TestCase.settings = settings(max_examples=80, stateful_step_count=40)
TestScheduling = Scheduling.TestCase
