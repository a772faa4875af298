from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from genius_search.search.rank import CodeRanker

SIZES = (2, 40, 30)
DIM = 6


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.fixture
def tables(random) -> list[torch.Tensor]:
    return [torch.randn(size, DIM, generator=random) for size in SIZES]


@pytest.mark.parametrize("count", [0, 1, 3, 200])
def test_the_score_by_codes_is_the_inner_product_with_the_sum_of_the_code_vectors(tables, random, count):
    """Few IDs and many take different ways."""
    query = torch.randn(DIM, generator=random)
    drawn = np.random.default_rng(count)
    ids = np.stack([drawn.integers(0, size, count) for size in SIZES], axis=1).astype(np.int16)
    expected = [
        float(query @ sum(tables[level][code] for level, code in enumerate(id_))) for id_ in ids.tolist()
    ]
    ranker = CodeRanker(tables)
    np.testing.assert_allclose(ranker.scores(query, ids), expected, rtol=1e-5, atol=1e-5)


def test_code_vectors_that_are_being_trained_may_rank(tables):
    ranker = CodeRanker([table.double().requires_grad_() for table in tables])
    assert ranker.scores(torch.ones(DIM), np.zeros((1, 3), dtype=np.int16)).dtype == np.float32


SCORE_OFTEN = """
import time
import numpy as np
from genius_search.search.rank import CodeRanker
ranker = CodeRanker(np.ones((12, 256, 256), dtype=np.float32))
ids, query = np.zeros((1000, 12), dtype=np.int16), np.ones(256, dtype=np.float32)
began = time.process_time(), time.thread_time()
for _ in range(300):
    ranker.scores(query, ids)
print((time.process_time() - began[0]) / (time.thread_time() - began[1]))
"""


def test_scoring_starts_no_threads_whose_waiting_costs_more():
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    run = [sys.executable, "-c", SCORE_OFTEN]
    all_to_one = subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout  # noqa: S603
    assert float(all_to_one) < 1.2
