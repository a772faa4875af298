"""The API's own description (OpenAPI 3.1); a copy of it is ``docs/openapi.json``, written by `make docs`."""

from __future__ import annotations

import copy
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from genius.serve.problems import ProblemBody
from genius.serve.schemas import ExplainBody, IdsBody, NewItemBody, NewItemsBody, SearchBody

_SENT: Final[tuple[type[BaseModel], ...]] = (
    SearchBody,
    ExplainBody,
    NewItemBody,
    NewItemsBody,
    IdsBody,
)
"""Bodies that routes read themselves, because they come in several forms."""
_FILE: Final = {"type": "string", "format": "binary"}
_OPEN: Final = ("/healthz", "/readyz")


def describe_api(app: FastAPI) -> None:
    """Let the application tell what it can, completely."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _described(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to extend it


def _described(app: FastAPI) -> dict[str, Any]:
    schema = get_openapi(
        title=app.title, version=app.version, summary=app.summary, routes=app.routes, openapi_version="3.1.0"
    )
    components = schema.setdefault("components", {})
    known = components.setdefault("schemas", {})
    template = "#/components/schemas/{model}"
    _, sent = models_json_schema([(kind, "validation") for kind in _SENT], ref_template=template)
    _, told = models_json_schema([(ProblemBody, "serialization")], ref_template=template)
    known.update(sent["$defs"])
    known.update(told["$defs"])
    for name in ("SearchBody", "ExplainBody"):
        known[f"{name}Form"] = _as_form(known[name])
    known["NewItemForm"] = _form_of_items(known["NewItemBody"])
    components["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    }
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            if path not in _OPEN:
                operation["security"] = [{"bearer": []}, {"key": []}, {}]
    return schema


def _as_form(body: dict[str, Any]) -> dict[str, Any]:
    """The same fields as a form: the picture is a file, and what is nested is JSON in a text."""
    form = copy.deepcopy(body)
    form["properties"]["image"] = _FILE
    form["properties"]["parts"] = {"type": "string", "description": "As in JSON."}
    form["title"] += "Form"
    return form


def _form_of_items(body: dict[str, Any]) -> dict[str, Any]:
    """Files that are an item each, or the fields of one item."""
    one = copy.deepcopy(body)
    one["properties"]["image"] = _FILE
    one["properties"]["fields"] = {"type": "string", "description": "A JSON object."}
    one["title"] = "NewItemForm"
    one["properties"]["files"] = {
        "type": "array",
        "items": _FILE,
        "description": "In place of the other fields: each file is an item by its name, picture or text.",
    }
    return one
