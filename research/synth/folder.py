"""Folders of synthetic data: drawn once, under their name when they are complete."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from genius_search.errors import UsageError
from genius_search.writing import write_json


def draw_once(
    out: Path, kind: str, plan: dict[str, Any], draw: Callable[[Path], dict[str, Any]]
) -> dict[str, Any]:
    """Draw into a folder beside ``out`` and rename it, unless ``out`` was drawn by the same plan before.

    Raises UsageError: ``out`` holds anything else.

    Returns
    -------
    dict
        the counts that ``draw`` returned, which ``<kind>.json`` keeps, and ``drawn``: False when ``out`` was
        there already.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; give a folder that does not exist yet")
    if out.exists() and any(out.iterdir()):
        with suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads((out / f"{kind}.json").read_text())
            if found["plan"] == plan:
                return {**found["counts"], "drawn": False}
        settings = ", ".join(f"{name} {value}" for name, value in plan.items() if name != kind)
        raise UsageError(
            f"{out} is not empty and does not hold this {kind} ({settings}); give another folder, or remove "
            "this one"
        )
    # Not `writing.new_folder`, which waits for the disk at every file: these can be drawn again.
    partial = out.parent / f".{out.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    counts = draw(partial)
    write_json(partial / f"{kind}.json", {"plan": plan, "counts": counts})
    if out.exists():
        out.rmdir()
    partial.rename(out)
    return {**counts, "drawn": True}


def concatenate(path: Path, parts: Iterable[Path]) -> None:
    """Write the contents of some files into one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as joined:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, joined, 1 << 20)


def copy_instructions(name: str, root: Path) -> None:
    """Copy the packaged instructions of this name into a data set."""
    target = root / "instructions" / "query_instructions.tsv"
    target.parent.mkdir(parents=True)
    shutil.copyfile(Path(__file__).with_name(f"{name}_instructions.tsv"), target)
