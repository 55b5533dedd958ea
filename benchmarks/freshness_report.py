"""From what `freshness.py` measured to rows and tables. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from rich.table import Table

from benchmarks.freshness import FULL, TEXT, Answer, Measured, shares_of_full_build
from benchmarks.results import Row

PERCENT = 100.0
TURNS = 100
TURN_FACTS = (1, 2, 3, 5)  # distillation leaves five at most
FACT_TOKENS, HEAD_TOKENS = 3, 7  # in proportion; no share depends on more


def arms(measured: Measured) -> list[str]:
    """In the order in which they were asked."""
    return list(dict.fromkeys(answer.arm for answer in measured.answers))


def rows(measured: Measured) -> Iterator[Row]:
    """One row an arm, then one a number of facts that a turn leaves. `followed` is the share of new values among the
    questions that text answers with the new value."""
    full = _cost(measured, FULL)
    by_text = {_key(answer) for answer in measured.answers if answer.arm == TEXT and answer.new}
    for arm in arms(measured):
        found = [answer for answer in measured.answers if answer.arm == arm]
        followed = [answer.new for answer in found if _key(answer) in by_text]
        prompt, computed, chat = _cost(measured, arm)
        yield {
            "arm": arm,
            "model": measured.model,
            "window_facts": measured.window_facts,
            "n": len(found),
            "new": statistics.fmean(answer.new for answer in found),
            "old": statistics.fmean(answer.old for answer in found),
            "followed": sum(followed) / max(1, len(by_text)),
            "followed_of": len(by_text),
            "prompt_tokens": prompt,
            "computed_tokens": computed,
            "chat_tokens": chat,
            "share_of_full_build": prompt / full[0] if full[0] else 0.0,
            "share_of_full_computed": computed / full[1] if full[1] else 0.0,
        }


def cost_rows(window_facts: int) -> Iterator[Row]:
    """Shares of a full build, counted, for one changed turn in a hundred."""
    for turn_facts in TURN_FACTS:
        shares = shares_of_full_build(TURNS, turn_facts, window_facts, FACT_TOKENS, HEAD_TOKENS)
        yield {
            "turns": TURNS,
            "turn_facts": turn_facts,
            "window_facts": window_facts,
            "share_of_full_build": statistics.fmean(shares),
            "largest_share": max(shares),
        }


def table(measured: Measured) -> Table:
    """One line an arm."""
    drawn = Table(
        title=f"One fact corrected, {measured.model}",
        caption="new, old: answers with the corrected, the former value, %; followed: new among those that text answers"
        " so, %; encoded: tokens of the prompts that were prefilled once for the correction, computed: those that were "
        "not in the prefix cache, each with its share of a full build; chat: tokens of text more in each chat",
    )
    for heading in ("arm", "new", "old", "followed", "encoded", "computed", "chat"):
        drawn.add_column(heading, justify="left" if heading == "arm" else "right", overflow="fold")
    for row in rows(measured):
        drawn.add_row(
            str(row["arm"]),
            *(f"{PERCENT * float(row[name]):.1f}" for name in ("new", "old", "followed")),
            f"{row['prompt_tokens']:.0f} ({PERCENT * float(row['share_of_full_build']):.0f} %)",
            f"{row['computed_tokens']:.0f} ({PERCENT * float(row['share_of_full_computed']):.0f} %)",
            f"{row['chat_tokens']:.0f}",
        )
    return drawn


def cost_table(window_facts: int) -> Table:
    """What a rebuild prefills for one changed turn in a hundred, without any prefix cache."""
    drawn = Table(
        title=f"A warm rebuild's prompts, of a full build's, window {window_facts}",
        caption="one turn of a hundred changed, all of its facts; counted for each turn, nothing in the prefix cache",
    )
    for heading in ("facts a turn", "mean", "most"):
        drawn.add_column(heading, justify="right")
    for row in cost_rows(window_facts):
        shares = (f"{PERCENT * float(row[name]):.1f} %" for name in ("share_of_full_build", "largest_share"))
        drawn.add_row(str(row["turn_facts"]), *shares)
    return drawn


def _key(answer: Answer) -> tuple[str, str]:
    return answer.profile, answer.question


def _cost(measured: Measured, arm: str) -> tuple[float, float, float]:
    """Means of what one correction cost in this arm: prompts, computed, in each chat."""
    costs = [(cost.prompt_tokens, cost.computed_tokens, cost.chat_tokens) for cost in measured.costs if cost.arm == arm]
    prompt, computed, chat = (statistics.fmean(of) for of in zip(*costs, strict=True)) if costs else (0.0, 0.0, 0.0)
    return prompt, computed, chat
