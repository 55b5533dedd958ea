"""`memshard demo`: two people, their facts, and the same questions answered from injected memory and from text.

A client like any other: it knows the server by its HTTP API alone. Its users have names of their own for each run
and are forgotten at the end, Ctrl-C included.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from cluster.client import gateway
from sharding.errors import DeadlineExceeded

ENCODE_DEADLINE_S = 120.0
ANSWER_TOKENS = 32
MODES = ("inject", "prompt")


@dataclass(frozen=True, slots=True)
class Person:
    """Somebody made up: what the server is told about them, one fact each, and what it is asked."""

    name: str
    facts: tuple[str, ...]
    questions: tuple[str, ...]


PEOPLE = (
    Person(
        "Ada",
        (
            "My name is Ada Lindqvist and I am a marine biologist.",
            "I live in Bergen, in a yellow house above the harbour.",
            "My dog is called Biscuit. He is a small brown terrier who is afraid of seagulls.",
            "I am allergic to peanuts, and I always carry my medicine with me when I travel.",
            "My sister Ingrid lives in Lisbon, where she runs a small bakery with her husband.",
            "I drink my coffee black, and I never drink it after four in the afternoon.",
            "My favourite colour is green, because it reminds me of the kelp forests I study.",
            "Every Tuesday evening I play the cello in an amateur orchestra.",
            "I drive a blue electric car that I bought second-hand in March.",
            "Next summer I will sail to the Faroe Islands to count puffins.",
        ),
        ("What is the name of my dog?", "What colour is my car?", "What is the name of my sister?"),
    ),
    Person(
        "Tomas",
        (
            "My name is Tomas Novak and I teach mathematics at a school in Prague.",
            "My dog is called Pascal. He is a large white sheepdog who sleeps under my desk.",
            "I have two children, Eva, who is nine, and Karel, who is six years old.",
            "I am allergic to strawberries, so I always ask what is in a dessert.",
            "On Saturdays I repair old clocks, and I own forty-one of them by now.",
            "My brother Jan lives in Toronto and works there as a bus driver.",
            "I prefer tea to coffee, and I take it with honey and a slice of lemon.",
            "My favourite film is a silent comedy that I have seen more than twenty times.",
            "I drive an old red van that I repaired myself last autumn.",
            "Next spring I will walk from Prague to Vienna with two old friends.",
        ),
        ("What is the name of my dog?", "What colour is my van?", "What is the name of my brother?"),
    ),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one question, and when: `ttft_s` is from sending the request to the first text received."""

    text: str
    ttft_s: float
    injected_tokens: int
    prompt_tokens: int


def play(url: str, console: Console, people: tuple[Person, ...] = PEOPLE) -> None:
    """Run the conversation against the server at `url` and print what it answered.

    Raises:
        DeadlineExceeded: the facts were not encoded within `ENCODE_DEADLINE_S`.
        MemshardError: what `client.gateway` raises.
    """
    run = uuid.uuid4().hex[:8]
    users = {person: f"demo-{person.name.lower()}-{run}" for person in people}
    with gateway(url) as client:
        models = client.get("/v1/models")
        models.raise_for_status()
        model = models.json()["data"][0]["id"]
        try:
            for person, user in users.items():
                remember(client, user, person.facts)
                console.print(f"Told {model} {len(person.facts)} facts about {person.name}")
            with console.status("Waiting until every fact is encoded"):
                for user in users.values():
                    wait_encoded(client, user)
            drawn = _table(len(people[0].facts))
            with console.status("Asking"):
                for person, user in users.items():
                    for question in person.questions:
                        _ask_both(client, model, user, len(person.facts), question, person.name, drawn)
            console.print(drawn)
        finally:
            for user in users.values():
                client.delete("/v1/memories", params={"user_id": user})


def remember(client: httpx.Client, user: str, facts: tuple[str, ...]) -> None:
    """Store each of `facts` for `user`, as one conversation turn."""
    messages = [{"role": "user", "content": fact} for fact in facts]
    client.post("/v1/memories", json={"user_id": user, "messages": messages, "infer": False}).raise_for_status()


def wait_encoded(client: httpx.Client, user: str) -> None:
    """Return once the keys and values of all of the user's facts are computed."""
    give_up = time.monotonic() + ENCODE_DEADLINE_S
    while True:
        listed = client.get("/v1/memories", params={"user_id": user})
        listed.raise_for_status()
        waiting = sum(not fact["encoded"] for fact in listed.json()["results"])
        if not waiting:
            return
        if time.monotonic() > give_up:
            raise DeadlineExceeded(f"{waiting} facts were not encoded within {ENCODE_DEADLINE_S:.0f} s")
        time.sleep(0.2)


def ask(client: httpx.Client, model: str, user: str, question: str, memory: dict[str, Any]) -> Answer:
    """One streamed chat completion; `memory` is the request's object of that name."""
    body = {
        "model": model,
        "user_id": user,
        "messages": [{"role": "user", "content": question}],
        "memory": memory,
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    pieces: list[str] = []
    first = 0.0
    usage: dict[str, Any] = {}
    sent = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            usage = chunk.get("usage") or usage
            for choice in chunk.get("choices", ()):
                if text := choice["delta"].get("content"):
                    first = first or time.perf_counter()
                    pieces.append(text)
    return Answer(
        "".join(pieces).strip(),
        (first or time.perf_counter()) - sent,
        (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
        usage.get("prompt_tokens", 0),
    )


def _ask_both(client: httpx.Client, model: str, user: str, top_k: int, question: str, name: str, drawn: Table) -> None:
    answers = [ask(client, model, user, question, {"mode": mode, "top_k": top_k}) for mode in MODES]
    row = [name, question]
    for answer in answers:
        row += [answer.text, f"{1000 * answer.ttft_s:.0f} ms", f"{answer.injected_tokens}/{answer.prompt_tokens}"]
    drawn.add_row(*row)


def _table(facts: int) -> Table:
    drawn = Table(
        title=f"The same {facts} facts, injected as keys and values, and as text",
        caption="first token: at the client, from sending the request; cached: prompt tokens that were not prefilled",
    )
    for heading in ("user", "question"):
        drawn.add_column(heading)
    for mode in MODES:
        drawn.add_column(mode)
        drawn.add_column("first token", justify="right")
        drawn.add_column("cached", justify="right")
    return drawn
