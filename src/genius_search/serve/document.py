"""Print ``docs/openapi.json``: ``python -m genius_search.serve.document``. A test compares the two."""

from __future__ import annotations

import json
import sys

from genius_search.serve.app import build_api


def document() -> str:
    """Return the contents of ``docs/openapi.json``."""
    return json.dumps(build_api().openapi(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(document())
