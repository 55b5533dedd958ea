"""The HTTP client of `memshard status` and `memshard demo`: one place that turns failures into sentences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from cluster.settings import Settings
from sharding.errors import MemshardError, Unavailable

TIMEOUT_S = 120.0


@contextmanager
def gateway(url: str, key: str | None = None, timeout_s: float | None = TIMEOUT_S) -> Iterator[httpx.Client]:
    """A client of the gateway at `url`, with the settings' API key or another one.

    Raises:
        Unavailable: nothing answers there, or not in time.
        MemshardError: it answered with an error (its own sentence is passed on).
    """
    key = key or Settings.from_environment().api_key
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=url, timeout=timeout_s, trust_env=False, headers=headers) as client:
        try:
            yield client
        except httpx.HTTPStatusError as failure:
            raise MemshardError(f"{url} answered {failure.response.status_code}: {_sentence(failure)}") from failure
        except (httpx.HTTPError, httpx.InvalidURL) as failure:
            raise Unavailable(f"No Memshard answers at {url} ({failure}); start one with `make up`") from failure


def _sentence(failure: httpx.HTTPStatusError) -> str:
    try:
        failure.response.read()
        return str(failure.response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return failure.response.text[:200]
