"""Why memory was prefilled as text: the words of answers, counters and metrics."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Why memory was prefilled as text."""

    NOT_ENCODED = "not_encoded"  # no chunk was made of it yet
    EVICTED = "evicted"  # its chunk gave its room to others
    LATE = "late"  # its chunk was in a slower tier, and did not come in time
    MISSING_CHUNK = "missing_chunk"  # a worker does not have it, or not all of it
    LOAD_FAILED = "load_failed"  # a worker has it, and failed to write it
    MODEL_REFUSED = "model_refused"  # this model's memory cannot be injected exactly
    READS_NO_CACHE = "skip_reading_prefix_cache"  # the request wants every token computed, for `prompt_logprobs` say
