"""Whatever the description allows, and much that it does not, is answered by one of its answers."""

# ruff: noqa: PLC0415  (schemathesis takes seconds, and each process that runs tests imports this file)

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

FEW = 3
"""Examples of each operation; the slow tests draw more."""
QUICKLY = settings(phases=[Phase.generate], suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def app(trained, tmp_path_factory) -> Iterator[FastAPI]:
    folder = tmp_path_factory.mktemp("served") / "catalogue.index"
    pool = next((trained.data / "cand_pool" / "global").glob("*test*.jsonl"))
    index = Index.create(folder, pool, model=trained.model)
    made = create_app(Service({"catalogue": index}))
    with TestClient(made):
        yield made
    assert index.check().items


@pytest.mark.filterwarnings(
    "ignore::hypothesis.errors.HypothesisDeprecationWarning"
)  # of schemathesis
@pytest.mark.parametrize("examples", [FEW, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_every_answer_to_whatever_is_asked_is_one_that_the_description_names(app, mode, examples):
    import schemathesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.core.control import SkipTest
    from schemathesis.generation.modes import GenerationMode
    from schemathesis.specs.openapi import checks as of_description

    checks = [
        not_a_server_error,
        of_description.status_code_conformance,
        of_description.response_schema_conformance,
    ]
    mode = GenerationMode(mode)
    schema = schemathesis.openapi.from_asgi("/openapi.json", app, headers={"Host": "localhost"})
    schema.config.generation.update(modes=[mode])
    asked = 0
    for result in schema.get_all_operations():
        operation = result.ok()

        @settings(QUICKLY, max_examples=examples)
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case) -> None:
            nonlocal asked
            asked += 1
            case.headers["Host"] = "localhost"
            case.call_and_validate(checks=checks)

        with contextlib.suppress(SkipTest):  # where nothing can be wrong
            ask()
    assert asked > 5 * examples


@given(
    st.binary(max_size=300),
    st.sampled_from(["application/json", "multipart/form-data; boundary=x"]),
)
@settings(max_examples=20, suppress_health_check=list(HealthCheck))
def test_any_bytes_are_refused_clearly(app, body, kind):
    client = TestClient(app, base_url="http://localhost")
    for content in (
        body,
        b'--x\r\nContent-Disposition: form-data; name="json"\r\n\r\n' + body + b"\r\n--x--",
    ):
        for path in ("/v1/search", "/v1/explain", "/v1/items"):
            answer = client.post(path, content=content, headers={"Content-Type": kind})
            assert answer.status_code in (400, 415, 422), answer.text
