"""The OpenAPI description is served and true: requests made up from it get no answer that it does not declare."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import schemathesis
from gateway_fakes import Cluster
from hypothesis import given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode, checks
from schemathesis.specs.openapi import checks as openapi_checks

from deployments.gateway import create_app
from tests.deployments.town import Town

DESCRIBED = create_app(Cluster().gateway).openapi()
OPERATIONS = [(method, path) for path, methods in DESCRIBED["paths"].items() for method in methods]
CHECKS = [
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
]
"""Whether a made-up request should be refused is no check: a description does not say whose memories exist."""


def test_the_description_is_served(town: Town) -> None:
    assert httpx.get(f"{town.url}/openapi.json", trust_env=False).json() == DESCRIBED


@pytest.fixture(scope="module")
def known(town: Town) -> str:
    """The id of a memory that is there, until a made-up request deletes it."""
    told = {"user_id": "known", "messages": "I like tea.", "metadata": {"n": 1}, "expiration_date": "2999-01-01"}
    stored = httpx.post(f"{town.url}/v1/memories", json=told, trust_env=False).json()
    return str(stored["results"][0]["id"])


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_every_answer_is_declared(town: Town, known: str, method: str, path: str) -> None:
    operation = schemathesis.openapi.from_dict(DESCRIBED)[path][method]
    as_described, otherwise = (operation.as_strategy(generation_mode=mode) for mode in GenerationMode)

    @given(case=as_described | otherwise, asks_for_known=st.booleans())
    @settings(max_examples=16)
    def run(case: Any, asks_for_known: bool) -> None:
        if asks_for_known and "memory_id" in (case.path_parameters or {}):
            case.path_parameters["memory_id"] = known
        case.validate_response(case.call(base_url=town.url), checks=CHECKS)

    run()
