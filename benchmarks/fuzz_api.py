"""Send a running service whatever its own description allows, and does not allow.

``python benchmarks/fuzz_api.py URL --cases 10000`` takes `/openapi.json` and lets schemathesis invent
requests for every operation, half of them valid and half broken. Each answer has to be one that the
description names, of the described form, and none may be an error of the server's own. It adds and deletes
items: give it a service over a copy of an index. ``--key`` is an API key where there are keys.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import sys
import time
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from PIL import Image
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
FEW = 20
"""Requests for an operation without parameters."""
REAL_SHARE = 3
"""One of so many requests names an id or a prefix that exists."""


@schemathesis.serializer("application/x-ndjson")
def lines(_: object, value: object) -> bytes:
    """Serialize the body of a stream, which is any text."""
    return str(value).encode("utf-8", "replace")


class Known:
    """Ids, prefixes and names that exist in the service."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        names = [index["name"] for index in get(url, "/v1/indexes", headers)["indexes"]]
        root = [get(url, f"/v1/codes?{urllib.parse.urlencode({'index': name})}", headers) for name in names]
        self.ids = [item["id"] for node in root for item in node["examples"]]
        self.prefixes = ["", *(str(child["code"]) for node in root for child in node["children"])]
        self.names = names


def get(url: str, path: str, headers: dict[str, str]) -> dict[str, object]:
    request = urllib.request.Request(url + path, headers=headers)  # noqa: S310
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        return json.load(answer)


def make_real(case: Case, known: Known, number: int) -> None:
    """Make a request name something that exists."""
    some = known.ids[number % len(known.ids)]
    if isinstance(case.query, dict):
        if "id" in case.query and case.method == "GET":
            case.query["id"] = some
        if "prefix" in case.query:
            case.query["prefix"] = known.prefixes[number % len(known.prefixes)]
        if "index" in case.query:
            case.query["index"] = known.names[0]
    if isinstance(case.path_parameters, dict) and "name" in case.path_parameters:
        case.path_parameters["name"] = known.names[0]
    if isinstance(case.body, dict) and case.path in ("/v1/search", "/v1/explain"):
        for name in (
            "index",
            "where",
            "match",
            "candidates",
            "image",
        ):  # generated ones are hardly ever valid
            case.body.pop(name, None)
        case.body |= {"text": "a red kite", "parts": [], "rerank": "codes"}
        if number % 2 and case.media_type == "application/json":
            case.body["image"] = TINY
        if case.path == "/v1/explain":
            case.body["id"] = some


def tiny_picture() -> str:
    """Return a red dot in base64."""
    kept = io.BytesIO()
    Image.new("RGB", (4, 4), "red").save(kept, "PNG")
    return base64.b64encode(kept.getvalue()).decode()


TINY = tiny_picture()


def fuzz(url: str, cases: int, start: int, headers: dict[str, str]) -> dict[str, object]:
    """Give every operation its share of the cases, half of them invalid on purpose."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=headers)
    operations = sorted(
        (found.ok() for found in schema.get_all_operations()), key=lambda one: len(modes(one))
    )
    known = Known(url, headers)
    counts: dict[str, Counter[int]] = {}
    failures: list[str] = []
    for place, operation in enumerate(operations):
        name = f"{operation.method.upper()} {operation.path}"
        seen = counts[name] = Counter()
        missing = cases - sum(other.total() for other in counts.values())
        most = -(-missing // (len(operations) - place)) if len(modes(operation)) > 1 else FEW

        def answer(case: Case, number: int) -> None:
            if number % REAL_SHARE == 0:
                make_real(case, known, number)
            response = case.call(headers=headers, timeout=60)
            seen[response.status_code] += 1  # noqa: B023  called before the next operation
            # No answer by the deadline that a request sets is what it asks for.
            checks = [
                check for check in CHECKS if check is not not_a_server_error or not is_late(case, response)
            ]
            try:
                case.validate_response(response, checks=checks)
            except BaseExceptionGroup as problem:
                failures.append(f"{name}: {problem}"[:2000])  # noqa: B023

        for mode in modes(operation):
            run(operation.as_strategy(mode), answer, most // len(modes(operation)), start)
        sys.stderr.write(f"{name}: {dict(sorted(seen.items()))}\n")
    return {
        "cases": sum(seen.total() for seen in counts.values()),
        "answers": {name: dict(sorted(seen.items())) for name, seen in counts.items()},
        "failures": failures[:20],
        "failed": len(failures),
    }


def is_late(case: Case, response: schemathesis.Response) -> bool:
    """Return whether a request set a deadline that passed."""
    return response.status_code == 504 and isinstance(case.body, dict) and "deadline_ms" in case.body


def modes(operation: schemathesis.APIOperation) -> list[GenerationMode]:
    """Return the kinds of cases of an operation; one without parameters has no invalid ones."""
    takes = list(operation.iter_parameters()) or list(operation.body)
    return [GenerationMode.POSITIVE, GenerationMode.NEGATIVE] if takes else [GenerationMode.POSITIVE]


def run(cases: st.SearchStrategy[Case], answer: Callable[[Case, int], None], count: int, start: int) -> None:
    """Send so many cases."""

    @seed(start)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        derandomize=False,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases, st.integers(0, 10**6))
    def send(case: Case, number: int) -> None:
        answer(case, number)

    send()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--key")
    parser.add_argument("--out", type=Path, help="where to keep the figures as JSON")
    arguments = parser.parse_args()
    began = time.monotonic()
    headers = {} if arguments.key is None else {"Authorization": f"Bearer {arguments.key}"}
    found = fuzz(arguments.url.rstrip("/"), arguments.cases, arguments.seed, headers)
    found["seconds"] = round(time.monotonic() - began, 1)
    text = json.dumps(found, indent=2)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    print(text)
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
