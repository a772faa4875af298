"""Running commands in the tests' own process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from genius_search.cli import main


def run(capsys, *words: str | Path, status: int = 0) -> tuple[str, str]:
    """Run a command; return its stdout and stderr."""
    assert main([str(word) for word in words]) == status
    printed = capsys.readouterr()
    return printed.out, printed.err


def run_json(capsys, *words: str | Path, status: int = 0) -> dict[str, Any]:
    """Run a command with --json; return the document, which is all of its stdout."""
    found = json.loads(run(capsys, *words, "--json", status=status)[0])
    assert isinstance(found, dict)
    return found
