"""Jupyter notebooks (``.ipynb``): the texts and the code of their cells, without outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from genius_search.data.limits import read_bytes, shorten
from genius_search.data.text_files import Document
from genius_search.errors import BadImage


def read_notebook(path: Path) -> Document:
    """Read a notebook: the sources of its cells, one after the other.

    Raises
    ------
    BadImage
        The file cannot be read, is too large, or is not a notebook.
    """
    try:
        notebook = json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise BadImage(path, f"is not a notebook in JSON: {error}") from None
    text, note = shorten("\n\n".join(_sources(notebook)))
    return Document(text, _language(notebook), note)


def _sources(notebook: Any) -> list[str]:
    """Return the sources of cells, in format 4 or 3, which has worksheets."""
    match notebook:
        case {"cells": list() as cells}:
            pass
        case {"worksheets": [{"cells": list() as cells}, *_]}:
            pass
        case _:
            cells = []
    sources = []
    for cell in cells:
        match cell:
            case {"source": source} | {"input": source}:
                lines = source if isinstance(source, list) else [source]
                sources.append("".join(line for line in lines if isinstance(line, str)))
    return [source for source in sources if source.strip()]


def _language(notebook: Any) -> dict[str, str]:
    match notebook:
        case {"metadata": {"kernelspec": {"language": str() as language}}}:
            return {"language": language}
    return {}
