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


BY_VECTOR = Limits(files=9, calls=23, types=4)
BY_TEXT = Limits(files=21, calls=146, types=8)
IN_TWO_MODALITIES = Limits(files=22, calls=300, types=9)
SMALL_ENCODER = Path(__file__).parents[2] / "model" / "encoder"


@pytest.fixture
def vector_index(tmp_path):
    vectors = np.random.default_rng(0).standard_normal((2_000, 16)).astype(np.float32)
    return Index.from_vectors(tmp_path / "index", vectors)


@pytest.fixture
def text_index(tmp_path):
    random = np.random.default_rng(0)
    texts = [" ".join(random.permutation(TEXT.split())[:5]) for _ in range(50)]
    return Index.create(tmp_path / "index", texts, encoder="text:wordllama")


@pytest.fixture
def mixed_index(tmp_path):
    random = np.random.default_rng(0)
    pictures = [random.integers(0, 256, (32, 32, 3), dtype=np.uint8) for _ in range(20)]
    texts = [" ".join(random.permutation(TEXT.split())[:5]) for _ in range(30)]
    return Index.create(tmp_path / "index", [*pictures, *texts], encoder=f"small:{SMALL_ENCODER}")


def test_the_script_finds_research_from_another_folder(tmp_path):
    program = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import ways, research"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)  # noqa: S603


def assert_within(trace: Trace, limits: Limits) -> None:
    assert {"index/query.py", "search/kernel.py"} <= trace.files
    assert len(trace.files) <= limits.files, sorted(trace.files)
    assert trace.calls <= limits.calls
    assert {"Candidates", "SearchHit", "Hits"} <= trace.types
    assert len(trace.types) <= limits.types, sorted(trace.types)


def test_a_warm_search_by_vector_enters_few_files_and_wears_few_types(vector_index):
    trace = trace_search(vector_index, vector=np.ones(16, dtype=np.float32), k=5)
    assert_within(trace, BY_VECTOR)


def test_a_warm_search_by_text_enters_few_files_and_wears_few_types(text_index):
    trace = trace_search(text_index, query="a kite above the beach", k=5)
    assert_within(trace, BY_TEXT)
    assert {"SearchRequest", "EncodedQuery", "WordMatches"} <= trace.types


def test_a_warm_search_of_two_modalities_merges_them_with_one_more_type(mixed_index):
    trace = trace_search(mixed_index, query="a kite above the beach", k=5)
    assert_within(trace, IN_TWO_MODALITIES)
    assert "ModalityHits" in trace.types
