"""Benchmarks that no other test runs still run, at the smallest sizes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from genius_search.data.mbeir import Layout
from genius_search.nn.codebooks import normalize
from genius_search.records import Candidate, Modality, Query
from research.mbeir_files import query_file, write_candidates, write_queries

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ITEMS, QUERIES = 400, 64


@pytest.fixture
def captions(tmp_path) -> Path:
    """A data set of texts with features; each query is near the caption that answers it."""
    layout = Layout(tmp_path / "captions")
    write_candidates(
        layout.union_pool("test"),
        [Candidate(f"9:{n}", Modality.TEXT, text=f"caption {n}") for n in range(1, ITEMS + 1)],
    )
    queries = [
        Query(f"9:{ITEMS + n}", Modality.TEXT, text="a query", positives=(f"9:{n}",), task_id=1)
        for n in range(1, QUERIES + 1)
    ]
    write_candidates(layout.local_pool("captions_task1_test"), [])
    write_queries(query_file(layout.root, "test", "captions_task1_test"), queries)
    random = np.random.default_rng(0)
    items = random.standard_normal((ITEMS, 32))
    vectors = np.concatenate([items, items[:QUERIES] + random.standard_normal((QUERIES, 32))])
    (layout.root / "features").mkdir()
    np.save(layout.root / "features" / "text_features.npy", normalize(vectors.astype("f4")))
    return layout.root


def test_clusters_find_nearly_all_of_exact_searchs_hits(captions):
    command = [sys.executable, BENCHMARKS / "cluster.py", captions, "2"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    assert process.returncode == 0, process.stderr
    shares = re.findall(r"^\| (?:one index|2 shards) \| ([0-9.]+)", process.stdout, re.MULTILINE)
    assert len(shares) == 2, process.stdout
    assert all(float(share) > 0.9 for share in shares), process.stdout
