"""Time to first token: memory injected, the same memory as text, a native prefix-cache hit, no memory at all.

    each round, k in random order, a (user, question) never asked before:
        prompt       the k facts as text; vLLM's prefix caching is on and cannot hit, the composition is new
        native_hit   the prompt request once more: what a prefix cache can give at best
        inject       the same token ids, the facts' keys and values out of chunks; never a native hit either
        no_memory    the question alone
    in random order, native_hit behind prompt, which warms it. One request at a time, on an idle server.

A native hit ends on a block's border (128 tokens on the CPU) and computes what is behind it, from nothing to a whole
block by the prompt's length. So that chance decides nothing, people differ in the length of their facts, and at k = 50
their prompts' lengths are spread evenly over a block.

Every response says what was injected and what vLLM's own cache held. A response that is not what its arm means ends
the benchmark: it is an error, not a data point.
"""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import httpx
from rich.console import Console
from rich.progress import track

from benchmarks.facts import Fact, person_facts
from cluster.client import gateway
from cluster.demo import remember, wait_encoded
from sharding.errors import MemshardError

Arm = Literal["prompt", "inject", "native_hit", "no_memory"]
ARMS: tuple[Arm, ...] = ("prompt", "inject", "native_hit", "no_memory")
MODES = {"prompt": "prompt", "native_hit": "prompt", "inject": "inject", "no_memory": "off"}

FACT_COUNTS = (5, 10, 20, 50)
ROUNDS = 15
QUICK_FACT_COUNTS = (5, 50)
QUICK_ROUNDS = 3
WARM_UP_ROUNDS = 1
PEOPLE = 6
BLOCK_TOKENS = 128  # of the CPU's paged cache
SEED = 20260

ANSWER_TOKENS = 4  # enough for one that prints something
SETTLE_S = 0.05  # between requests: what the last one left behind has ended


@dataclass(frozen=True, slots=True)
class Question:
    """Who asks what in which round, about how many facts."""

    round: int
    k: int
    user: str
    text: str
    arms: tuple[Arm, ...]  # in the order of asking


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as it was measured. `client_ttft_s` is from sending it to the first text at the client's socket,
    `engine_ttft_s` from handing the prompt to the engine to its first token."""

    arm: Arm
    k: int
    round: int
    client_ttft_s: float
    engine_ttft_s: float
    prompt_tokens: int
    memory: dict[str, Any]  # the response's object of that name


def measure(url: str, console: Console, fact_counts: Sequence[int], rounds: int) -> tuple[str, list[Sample]]:
    """The model's name and the samples of all rounds but the warm-up's.

    Raises:
        MemshardError: the server is not there, facts were not encoded in time, or a response is not its arm's.
    """
    run = uuid.uuid4().hex[:8]
    spread = BLOCK_TOKENS / max(FACT_COUNTS) / PEOPLE
    people = {f"bench-{person}-{run}": person_facts(person, longer=person * spread) for person in range(PEOPLE)}
    with gateway(url) as client, ExitStack() as forgetting:
        model = str(_answer(client.get("/v1/models"))["data"][0]["id"])
        for user, facts in people.items():
            forgetting.callback(client.delete, "/v1/memories", params={"user_id": user})
            remember(client, user, tuple(fact.text for fact in facts))
        with console.status(f"Encoding {sum(map(len, people.values()))} facts"):
            for user in people:
                wait_encoded(client, user)
        asked = list(questions(people, fact_counts, WARM_UP_ROUNDS + rounds))
        samples: list[Sample] = []
        for question in track(asked, "Measuring", console=console, transient=True):
            answers = {arm: _ask(client, model, question, arm) for arm in question.arms}
            check_same_prompt(answers["prompt"], answers["native_hit"], answers["inject"])
            if question.round >= WARM_UP_ROUNDS:
                samples += answers.values()
        return model, samples


def questions(people: dict[str, tuple[Fact, ...]], fact_counts: Sequence[int], rounds: int) -> Iterator[Question]:
    """Every round's questions in a random order that is the same every time; no user is asked anything twice.

    Raises:
        MemshardError: there are not that many questions.
    """
    rng = random.Random(SEED)
    if rounds * len(fact_counts) > sum(map(len, people.values())):
        most = sum(map(len, people.values())) // len(fact_counts) - WARM_UP_ROUNDS
        raise MemshardError(f"There are questions for {most} rounds only")
    unasked = [(user, fact.question) for user, facts in people.items() for fact in facts]
    rng.shuffle(unasked)  # everybody is asked about as often
    for number in range(rounds):
        for k in rng.sample(list(fact_counts), len(fact_counts)):
            user, text = unasked.pop()
            yield Question(number, k, user, text, arms_in_random_order(rng))


def arms_in_random_order(rng: random.Random) -> tuple[Arm, ...]:
    """All arms, `native_hit` somewhere behind `prompt`."""
    order = rng.sample(ARMS, len(ARMS))
    first, second = sorted((order.index("prompt"), order.index("native_hit")))
    order[first], order[second] = "prompt", "native_hit"
    return tuple(order)


def check(sample: Sample) -> None:
    """Raise MemshardError unless the response is what its arm means.

    A native hit may leave the last block to compute; with blocks of 128 tokens, at k = 5 that is up to half of it.
    """
    told = sample.memory
    injected, cached, facts = told["injected_tokens"], told["prefix_cached_tokens"], len(told["fact_ids"])
    if sample.arm == "no_memory":
        right = told["mode"] == "off" and facts == injected == cached == told["memory_tokens"] == 0
    else:
        right = told["mode"] == MODES[sample.arm] and facts == sample.k and told["left_out"] == 0
        right &= {
            "prompt": injected == cached == 0,
            "native_hit": injected == 0 and 2 * cached >= sample.prompt_tokens,
            "inject": injected >= told["memory_tokens"] > 0 and cached == 0 and told["fallback"] is None,
        }[sample.arm]
    if not right:
        raise MemshardError(f"A response with k = {sample.k} is not what {sample.arm} means: {json.dumps(told)}")


def check_same_prompt(*samples: Sample) -> None:
    """Raise MemshardError unless these answered the same facts in the same order, as the same number of tokens."""
    prompts = {(*sample.memory["fact_ids"], sample.memory["memory_tokens"], sample.prompt_tokens) for sample in samples}
    if len(prompts) != 1:
        arms = ", ".join(sample.arm for sample in samples)
        raise MemshardError(f"With k = {samples[0].k}, {arms} did not answer the same prompt")


def _ask(client: httpx.Client, model: str, question: Question, arm: Arm) -> Sample:
    """One streamed request on the connection that is open, checked."""
    body = {
        "model": model,
        "user_id": question.user,
        "messages": [{"role": "user", "content": question.text}],
        "memory": {"mode": MODES[arm], "top_k": question.k},
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    time.sleep(SETTLE_S)
    first: float | None = None
    last: dict[str, Any] = {}
    sent = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.is_error:
            response.read()
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if first is None and any(choice["delta"].get("content") for choice in chunk.get("choices", ())):
                first = time.perf_counter()
            last |= {key: value for key, value in chunk.items() if value is not None}
    if "error" in last or "memory" not in last or "usage" not in last:
        raise MemshardError(f"{arm} with k = {question.k} was not answered: {last.get('error', 'the stream ended')}")
    if first is None:
        raise MemshardError(f"{arm} with k = {question.k} was answered with no text: {question.text}")
    sample = Sample(
        arm,
        question.k,
        question.round,
        first - sent,
        float(last["memory"]["timings"]["engine_ttft_s"]),
        int(last["usage"]["prompt_tokens"]),
        last["memory"],
    )
    check(sample)
    return sample


def _answer(response: httpx.Response) -> Any:
    response.raise_for_status()
    return response.json()
