"""Where the tokens of memory came from, since the start, over all requests that ended. Metrics are read off here.

    memory at the front of a prompt  =  injected  +  hit natively  +  prefilled as text, for a reason

"Memory" is what a prompt starts with, head and facts, where it was to be injected.

Imports nothing heavy.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from connector.plan import PromptPlan
from connector.port import EngineDelta
from connector.reason import Reason


@dataclass(slots=True)
class MemoryCounts:
    """In tokens."""

    injected: int = 0
    hit: int = 0  # found in the engine's prefix cache, where an earlier composition left them
    prefilled: Counter[Reason] = field(default_factory=Counter)

    def add(self, plan: PromptPlan, last: EngineDelta) -> None:
        """One request and its last delta."""
        self.injected += last.injected_tokens
        self.hit += last.hit_tokens
        if last.fallback is not None:
            self.prefilled[last.fallback] += plan.load_tokens - last.injected_tokens - last.hit_tokens
        if plan.unready is not None:
            self.prefilled[plan.unready] += plan.unready_tokens

    def plain(self) -> dict[str, int]:
        """`memory_tokens_…`, every reason from the start on."""
        prefilled = {f"memory_tokens_prefilled_{reason}": self.prefilled[reason] for reason in Reason}
        return {"memory_tokens_injected": self.injected, "memory_tokens_hit": self.hit, **prefilled}
