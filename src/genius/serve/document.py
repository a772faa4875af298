"""Writes ``docs/openapi.json``: ``python -m genius.serve.document`` prints it; a test compares it with the file."""

from __future__ import annotations

import json
import sys

from genius.serve.app import api


def document() -> str:
    """The API's description as it is kept."""
    return json.dumps(api().openapi(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(document())
