"""A warm query enters few files and functions, and wears few types on its way to hits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from benchmarks.ways import Trace, trace_search
from genius_search import Index

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
TEXT = "a red kite flies above the beach where two dogs run in the sun"


class Limits(NamedTuple):
    """Limits of a search, as `benchmarks/ways.py` counts."""

    files: int
    calls: int
    types: int


BY_VECTOR = Limits(files=10, calls=34, types=5)
BY_TEXT = Limits(files=21, calls=146, types=8)


@pytest.fixture
def vector_index(tmp_path):
    vectors = np.random.default_rng(0).standard_normal((2_000, 16)).astype(np.float32)
    return Index.from_vectors(tmp_path / "index", vectors)


@pytest.fixture
def text_index(tmp_path):
    random = np.random.default_rng(0)
    texts = [" ".join(random.permutation(TEXT.split())[:5]) for _ in range(50)]
    return Index.create(tmp_path / "index", texts, encoder="text:wordllama")


def test_the_script_finds_research_from_another_folder(tmp_path):
    program = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import ways, research"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)  # noqa: S603


def assert_within(trace: Trace, limits: Limits) -> None:
    assert {"index/query.py", "search/kernel.py"} <= trace.files
    assert len(trace.files) <= limits.files, sorted(trace.files)
    assert trace.calls <= limits.calls
    assert {"EncodedQuery", "Candidates", "SearchHit", "Hits"} <= trace.types
    assert len(trace.types) <= limits.types, sorted(trace.types)


def test_a_warm_search_by_vector_enters_few_files_and_wears_few_types(vector_index):
    trace = trace_search(vector_index, vector=np.ones(16, dtype=np.float32), k=5)
    assert_within(trace, BY_VECTOR)


def test_a_warm_search_by_text_enters_few_files_and_wears_few_types(text_index):
    trace = trace_search(text_index, query="a kite above the beach", k=5)
    assert_within(trace, BY_TEXT)
    assert {"SearchRequest", "WordMatches"} <= trace.types
