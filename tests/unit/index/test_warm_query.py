"""A warm query enters few files and functions, and wears few types on its way to hits."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import genius_search
from genius_search import Index

MAX_FILES = 11
MAX_CALLS = 55
MAX_TYPES = 6
PACKAGE = Path(genius_search.__file__).parent
CONSTRUCTORS = ("__init__", "__new__", "_make", "<lambda>")
"""Code of dataclasses' and classes' constructors, and of named tuples' (a lambda)."""


class Trace:
    """Files of the package that are entered, its types that are constructed, and its calls."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.types: set[str] = set()
        self.calls = 0

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code.co_filename.startswith(str(PACKAGE)):
            self.calls += 1
            self.files.add(Path(code.co_filename).relative_to(PACKAGE).as_posix())
        if code.co_name in CONSTRUCTORS and code.co_argcount:
            first = frame.f_locals[code.co_varnames[0]]
            constructed = first if isinstance(first, type) else type(first)
            if constructed.__module__.startswith("genius_search."):
                self.types.add(constructed.__qualname__)


@pytest.fixture
def index(tmp_path):
    vectors = np.random.default_rng(0).standard_normal((2_000, 16)).astype(np.float32)
    return Index.from_vectors(tmp_path / "index", vectors)


def test_a_warm_query_enters_few_files_and_wears_few_types(index):
    query = np.ones(16, dtype=np.float32)
    for _ in range(3):
        index.search(vector=query, k=5)
    trace = Trace()
    sys.setprofile(trace)
    try:
        hits = index.search(vector=query, k=5)
    finally:
        sys.setprofile(None)
    assert len(hits) == 5
    assert {"index/query.py", "search/kernel.py"} <= trace.files
    assert len(trace.files) <= MAX_FILES, sorted(trace.files)
    assert trace.calls <= MAX_CALLS
    assert {"EncodedQuery", "Ranking", "Hits"} <= trace.types
    assert len(trace.types) <= MAX_TYPES, sorted(trace.types)
