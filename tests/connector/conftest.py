"""What the tests of `connector` share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from cluster.models import prepare_language_model
from cluster.settings import Settings

# Deadlines measure the machine, which is shared; the whole run has a time limit of its own.
settings.register_profile("memshard", deadline=None, max_examples=50)
settings.load_profile("memshard")


@pytest.fixture(scope="session")
def language_model() -> Path:
    """The packaged SmolLM2-135M-Instruct, prepared once a machine."""
    return prepare_language_model(Settings.from_environment())
