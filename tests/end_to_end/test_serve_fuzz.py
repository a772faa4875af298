"""The service answers valid and invalid requests with responses of its OpenAPI description."""

# ruff: noqa: PLC0415  (schemathesis takes seconds, and each process of tests imports this file)

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from genius_search.index.index import Index
from genius_search.serve.app import create_app
from genius_search.serve.service import Service

QUICK_EXAMPLES = 3
"""Number of examples of each operation in tests that are not slow."""
QUICK = settings(phases=[Phase.generate], suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def app(trained, tmp_path_factory) -> Iterator[FastAPI]:
    folder = tmp_path_factory.mktemp("served") / "catalogue.index"
    pool = next((trained.data / "cand_pool" / "global").glob("*test*.jsonl"))
    index = Index.create(folder, pool, model=trained.model)
    app = create_app(Service({"catalogue": index}))
    with TestClient(app):
        yield app
    assert index.check().items


@pytest.mark.filterwarnings(
    "ignore::hypothesis.errors.HypothesisDeprecationWarning"
)  # of schemathesis
@pytest.mark.parametrize("examples", [QUICK_EXAMPLES, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_every_response_is_in_the_description(app, mode, examples):
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.core.control import SkipTest
    from schemathesis.generation.modes import GenerationMode
    from schemathesis.specs.openapi import checks as openapi_checks

    checks = [
        not_a_server_error,
        openapi_checks.status_code_conformance,
        openapi_checks.response_schema_conformance,
    ]
    mode = GenerationMode(mode)
    schema = schemathesis.openapi.from_asgi("/openapi.json", app, headers={"Host": "localhost"})
    schema.config.generation.update(modes=[mode])
    requests = 0
    for result in schema.get_all_operations():
        operation = result.ok()

        @settings(QUICK, max_examples=examples)
        @given(case=operation.as_strategy(generation_mode=mode))
        def request(case) -> None:
            nonlocal requests
            requests += 1
            case.headers["Host"] = "localhost"
            case.call_and_validate(checks=checks)

        with contextlib.suppress(SkipTest):  # an operation without invalid requests
            request()
    assert requests > 5 * examples


@given(
    st.binary(max_size=300),
    st.sampled_from(["application/json", "multipart/form-data; boundary=x"]),
)
@settings(max_examples=20, suppress_health_check=list(HealthCheck))
def test_any_bytes_are_refused_clearly(app, body, content_type):
    client = TestClient(app, base_url="http://localhost")
    for content in (
        body,
        b'--x\r\nContent-Disposition: form-data; name="json"\r\n\r\n' + body + b"\r\n--x--",
    ):
        for path in ("/v1/search", "/v1/explain", "/v1/items"):
            response = client.post(path, content=content, headers={"Content-Type": content_type})
            assert response.status_code in (400, 415, 422), response.text
