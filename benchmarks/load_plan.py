"""What the load is asked to do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """`rate` (requests a second) makes the loop open; else `users` sessions close it. Times are seconds."""

    url: str
    people: int
    facts: int  # each person's, before it begins
    mix: dict[str, float]  # shares of chat, add, update, delete
    arms: tuple[str, ...]  # of the chats: inject, prompt, off
    users: int = 10
    rate: float | None = None
    duration_s: float = 60.0
    ramp_s: float = 5.0
    think_s: float = 1.0  # mean, exponential
    turns: float = 5.0  # of a session, mean, geometric
    zipf: float = 1.0
    top_k: int = 10
    max_tokens: int = 50
    min_tokens: int = 0
    deadline_s: float = 60.0
    seed: int = 0
    page_port: int | None = None
    kill_every_s: float | None = None  # a shard of a server that was started here
