"""Embedding search measured as GENIUS is: the same rows, runs and numbers as its exact search."""

from __future__ import annotations

import functools

import pytest

from genius_search.data.mbeir import MBeir
from genius_search.model import Genius
from genius_search.progress import Silent
from research.baselines.dense import DenseConfig, evaluate_dense
from research.evaluate import evaluate
from research.settings import EvaluationConfig

CONFIG = EvaluationConfig(split="val", max_queries=10)
LARGE = EvaluationConfig(split="test", pools=("global",), max_queries=10)
"""A pool of 1,000, which has 31 lists; the smallest local ones have a single list."""


@pytest.fixture(scope="module")
def searched(trained, tmp_path_factory):
    """Each kind's result and folder; everything is made once."""
    features = tmp_path_factory.mktemp("features")
    encoder = Genius.open(trained.model).encoder

    @functools.cache
    def search(dense, config=CONFIG):
        folder = tmp_path_factory.mktemp("-".join(dense.kinds))
        result = evaluate_dense(
            MBeir(trained.data), encoder, config, dense, folder, evaluation=features, progress=Silent()
        )
        return result, folder

    return search


def test_exact_search_measures_what_evaluate_calls_exact_raw(searched, trained, tmp_path):
    found, _ = searched(DenseConfig())
    config = EvaluationConfig(split="val", max_queries=10, methods=("exact-raw",))
    model = Genius.open(trained.model)
    expected = evaluate(MBeir(trained.data), model, config, tmp_path, progress=Silent())
    assert {(row.pool, row.name) for row in found.rows} == {(row.pool, row.name) for row in expected.rows}
    for row, other in zip(found.rows, expected.rows, strict=True):
        assert row.method == "dense-exact"
        assert (row.name, row.pool, row.queries) == (other.name, other.pool, other.queries)
        assert row.candidates_touched == row.pool_size == other.pool_size
        # Vectors are kept in 16 bits, so a near tie may fall the other way.
        assert row.measures["R@5"] == pytest.approx(other.measures["R@5"], abs=0.11)


@pytest.mark.parametrize("kind", ["hnsw", "ivf-pq", "ivf-rq"])
def test_approximate_search_compares_fewer_and_keeps_most(kind, searched):
    exact, _ = searched(DenseConfig(), LARGE)
    found, _ = searched(DenseConfig(kinds=(kind,), effort=4, code_bytes=24), LARGE)
    for row, best in zip(found.rows, exact.rows, strict=True):
        assert row.method == f"dense-{kind}"
        assert 0 < row.candidates_touched < best.candidates_touched
    mean = sum(row.measures["R@10"] for row in found.rows) / len(found.rows)
    assert mean > 0.5 * sum(row.measures["R@10"] for row in exact.rows) / len(exact.rows)
