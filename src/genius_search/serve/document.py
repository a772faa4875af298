"""Prints what ``docs/openapi.json`` holds: ``python -m genius_search.serve.document``; a test compares the two."""

from __future__ import annotations

import json
import sys

from genius_search.serve.app import api


def document() -> str:
    """The API's description as it is kept."""
    return json.dumps(api().openapi(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(document())
