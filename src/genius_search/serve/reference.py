"""The page `/docs`: routes, parameters and fields, made of the OpenAPI description."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

HEAD = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>GENIUS: HTTP API</title>
<link rel="stylesheet" href="assets/page.css">
<main>
<h1>HTTP API</h1>
<p>The same as <a href="openapi.json">openapi.json</a>, for people.</p>
"""


def write_reference(openapi: Mapping[str, Any]) -> str:
    """Return an OpenAPI description as HTML."""
    schemas = openapi["components"]["schemas"]
    lines = [HEAD]
    bodies: dict[str, None] = {}
    for path, methods in openapi["paths"].items():
        for method, route in methods.items():
            lines.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2>")
            lines.append(f"<p>{escape(route.get('description', ''))}</p>")
            parameters = {entry["name"]: entry for entry in route.get("parameters", ())}
            lines += _table(parameters)
            content = route.get("requestBody", {}).get("content", {})
            if "application/json" in content:
                name = _type_of(content["application/json"]["schema"])
                bodies |= dict.fromkeys(_referenced(name, schemas))
                lines.append(f'<p>Body: <a href="#{name}"><code>{name}</code></a></p>')
    for name in bodies:
        lines.append(f'<h2 id="{name}"><code>{name}</code></h2>')
        lines.append(f"<p>{escape(schemas[name].get('description', ''))}</p>")
        lines += _table(schemas[name].get("properties", {}))
    return "\n".join([*lines, "</main>"])


def _table(fields: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a table of parameters or fields."""
    if not fields:
        return
    yield "<table><tr><th>name</th><th>type</th><th></th></tr>"
    for name, field in fields.items():
        field_type = _type_of(field.get("schema", field))
        text = field.get("description", "")
        if field.get("default") not in (None, []):
            text = f"{text} Default: {field['default']}."
        yield (
            f"<tr><td><code>{escape(name)}</code></td><td>{escape(field_type)}</td>"
            f"<td>{escape(text.strip())}</td></tr>"
        )
    yield "</table>"


def _type_of(schema: Mapping[str, Any]) -> str:
    """Return the type of a value in a few words."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        types = [_type_of(part) for part in schema["anyOf"]]
        return " or ".join(dict.fromkeys(name for name in types if name != "null"))
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    if schema.get("type") == "array":
        return f"list of {_type_of(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def _referenced(name: str, schemas: Mapping[str, Any]) -> Iterator[str]:
    """Yield a body, and the objects in its fields."""
    yield name
    for field in schemas[name].get("properties", {}).values():
        for part in _type_of(field).removeprefix("list of ").split(" or "):
            inner = part.removeprefix("list of ")
            if inner in schemas and inner != name and "properties" in schemas[inner]:
                yield from _referenced(inner, schemas)
