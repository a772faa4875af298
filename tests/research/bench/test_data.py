from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from genius_search.errors import BadData, UsageError
from genius_search.nn.codebooks import normalize
from genius_search.progress import Silent
from research.bench.data import BenchData, invent_items, measure_tenth_distance, read_data

DIM = 64


def nearest(items, queries, count):
    """The slow and simple way."""
    return np.argsort(-(queries @ items.T), axis=1, kind="stable")[:, :count]


def draw(count, seed):
    """Unit vectors around forty centres."""
    random = np.random.default_rng(seed)
    centres = np.random.default_rng(99).standard_normal((40, DIM))
    vectors = centres[random.integers(0, 40, count)] + 0.5 * random.standard_normal((count, DIM))
    return normalize(vectors.astype(np.float32))


def test_an_array_gives_items_and_queries(tmp_path):
    vectors = 3 * draw(200, 5)
    np.save(tmp_path / "items.npy", vectors.astype(np.float16))
    np.save(tmp_path / "asked.npy", vectors[:7])
    read = partial(read_data, tmp_path / "items.npy", tmp_path, max_queries=15, progress=Silent())
    held_out = read()
    assert (len(held_out.items), len(held_out.queries)) == (185, 15)
    assert held_out.recall(np.zeros((15, 10), dtype=np.int64), 5) is None
    assert nearest(held_out.items, held_out.queries, 1).shape == (15, 1)
    assert (held_out.queries @ held_out.items.T).max() < 0.9999  # no query is among the items
    data = read(query_vectors=tmp_path / "asked.npy")
    assert (len(data.items), len(data.queries)) == (200, 7)
    assert np.array_equal(nearest(data.items, data.queries, 1)[:, 0], np.arange(7))


def test_a_folder_of_texts_without_queries_turns_some_texts_into_queries(tmp_path):
    np.save(tmp_path / "items.npy", draw(200, 5))
    np.save(tmp_path / "sources.npy", np.arange(200))
    data = read_data(tmp_path, tmp_path, max_queries=15, progress=Silent())
    assert (len(data.items), len(data.queries)) == (185, 15)
    assert np.allclose(data.items, draw(200, 5)[data.sources])


def test_answers_are_rows_of_items_and_those_without_one_do_not_count(tmp_path):
    items = draw(200, 5)
    np.save(tmp_path / "items.npy", items)
    np.save(tmp_path / "asked.npy", items[:3])
    read = partial(
        read_data,
        tmp_path / "items.npy",
        tmp_path,
        max_queries=1000,
        query_vectors=tmp_path / "asked.npy",
        answers=tmp_path / "answers.npy",
        progress=Silent(),
    )
    for rows, recall in (([0, 7, -1], 0.5), ([[0, -1], [7, 1], [-1, -1]], 1.0)):
        np.save(tmp_path / "answers.npy", np.array(rows))
        data = read()
        assert data.recall(nearest(data.items, data.queries, 10), 1) == recall
    for rows, problem in (([0, 1], "for each of 3 queries"), ([0, 1, 200], "expected 0 to 199")):
        np.save(tmp_path / "answers.npy", np.array(rows))
        with pytest.raises(BadData, match=problem):
            read()
    with pytest.raises(UsageError, match="give these with --query-vectors"):
        read(query_vectors=None)


def test_invented_items_come_after_the_real_ones_and_lie_as_near_to_one_another():
    items = draw(2000, 5)
    real = BenchData(items, np.zeros(2000, dtype=np.int8), items[:5])
    data, distances = invent_items(real, 5000)
    assert np.array_equal(data.items[:2000], items)
    assert data.items.shape == (5000, DIM)
    assert np.allclose(np.linalg.norm(data.items, axis=1), 1, atol=1e-5)
    assert measure_tenth_distance(data.items[2000:], 2000) == pytest.approx(
        measure_tenth_distance(items, 2000), rel=0.1
    )
    assert [row["items"] for row in distances] == [500, 1000, 2000, 5000]
