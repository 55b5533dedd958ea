"""What all tests share."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Deadlines and slowness measure the machine, which is shared; the whole run has a time limit of its own.
settings.register_profile(
    "memshard", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("memshard")
