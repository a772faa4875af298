from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from genius_search.errors import BadData, UsageError
from genius_search.nn.spread import normalize
from genius_search.progress import Silent
from research.bench.coded import Ours, encode, fit
from research.bench.given import Given, invent, nearest_cosines, read_given, share_found
from research.bench.rivals import EXACT, builders
from research.bench.settings import SearchSettings

DIM = 64
ITEMS = 600


def nearest(items, queries, count):
    """The slow and simple way."""
    return np.argsort(-(queries @ items.T), axis=1, kind="stable")[:, :count]


def draw(count, seed):
    """Unit vectors around forty centres."""
    random = np.random.default_rng(seed)
    centres = np.random.default_rng(99).standard_normal((40, DIM))
    vectors = centres[random.integers(0, 40, count)] + 0.5 * random.standard_normal((count, DIM))
    return normalize(vectors.astype(np.float32))


@pytest.fixture(scope="module")
def given():
    items = draw(ITEMS, 0)
    return Given(items, np.ones(ITEMS, dtype=np.int8), draw(30, 1), real=ITEMS)


@pytest.fixture(scope="module")
def quantizer(given, tmp_path_factory):
    return fit(given, tmp_path_factory.mktemp("fitted") / "q", levels=6, progress=Silent())


@pytest.fixture(scope="module")
def built(given):
    """Every rival that is installed."""
    return [build() for build in builders(given.items, graphs=True, seed=0)]


def test_every_rival_finds_most_of_what_is_nearest(given, built):
    truth = nearest(given.items, given.queries, 10)
    for rival in built:
        found = rival.find(given.queries, max(rival.efforts or (0,)), None)
        least = 1 if rival.name == EXACT else 0.4 if "1 bit" in rival.name or "RaBitQ" in rival.name else 0.6
        assert share_found(truth, found, 10) >= least, rival.name
        assert rival.item_bytes > 4, rival.name


def test_filters_let_through_what_they_allow_and_nothing_else(given, built):
    allowed = np.random.default_rng(2).random(ITEMS) < 0.3
    rows = np.flatnonzero(allowed)
    truth = rows[nearest(given.items[rows], given.queries, 10)]
    filtering = [rival for rival in built if rival.limit is not None]
    assert len(filtering) >= 4
    for rival in filtering:
        effort = max(rival.efforts or (0,)) if rival.has_lists else 512
        found = rival.find(given.queries, effort, rival.limit(allowed))
        assert allowed[found[found >= 0]].all(), rival.name
        assert share_found(truth, found, 10) >= 0.4, rival.name


def test_all_ways_of_our_search_find_the_same(given, quantizer):
    ours = Ours(encode(quantizer, given), given.items)
    usual = next(iter(ours.methods()))[1](given.queries)
    for name, search in ours.other_ways(None).items():
        assert share_found(usual, search(given.queries), 10) > 0.99, name
    allowed = np.arange(ITEMS) % 7 == 0
    for name, search, _ in ours.allowing(allowed).methods():
        found = search(given.queries)
        assert (found >= 0).all(), name
        assert allowed[found].all(), name


def test_invented_items_are_about_as_near_to_one_another_as_real_ones(given):
    more = invent(given, 3 * ITEMS, seed=0)
    assert np.array_equal(more.items[:ITEMS], given.items)
    assert np.allclose(np.linalg.norm(more.items, axis=1), 1, atol=1e-5)
    assert len(more.modality) == 3 * ITEMS
    real, invented = nearest_cosines(more, seed=0)
    scores = more.items[:ITEMS] @ more.items.T - 2 * np.eye(ITEMS, 3 * ITEMS)
    assert real == pytest.approx(scores.max(axis=1).mean(), abs=0.03)
    assert invented == pytest.approx(real, abs=0.1)


def test_an_array_gives_items_and_queries(tmp_path):
    vectors = 3 * draw(200, 5)
    np.save(tmp_path / "items.npy", vectors.astype(np.float16))
    np.save(tmp_path / "asked.npy", vectors[:7])
    settings = SearchSettings(queries=15)
    held_out = read_given(tmp_path / "items.npy", settings, None, tmp_path, progress=Silent())
    assert (len(held_out.items), len(held_out.queries), held_out.real) == (185, 15, 185)
    assert held_out.recall(np.zeros((15, 10), dtype=np.int64), 5) is None
    assert nearest(held_out.items, held_out.queries, 1).shape == (15, 1)
    assert (held_out.queries @ held_out.items.T).max() < 0.9999  # no query is among the items
    given = read_given(
        tmp_path / "items.npy",
        settings,
        None,
        tmp_path,
        query_vectors=tmp_path / "asked.npy",
        progress=Silent(),
    )
    assert (len(given.items), len(given.queries)) == (200, 7)
    assert np.array_equal(nearest(given.items, given.queries, 1)[:, 0], np.arange(7))


def test_answers_are_rows_of_items_and_those_without_one_do_not_count(tmp_path):
    items = draw(200, 5)
    np.save(tmp_path / "items.npy", items)
    np.save(tmp_path / "asked.npy", items[:3])
    read = partial(
        read_given,
        tmp_path / "items.npy",
        SearchSettings(),
        None,
        tmp_path,
        query_vectors=tmp_path / "asked.npy",
        answers=tmp_path / "answers.npy",
        progress=Silent(),
    )
    for rows, recall in (([0, 7, -1], 0.5), ([[0, -1], [7, 1], [-1, -1]], 1.0)):
        np.save(tmp_path / "answers.npy", np.array(rows))
        given = read()
        assert given.recall(nearest(given.items, given.queries, 10), 1) == recall
    for rows, problem in (([0, 1], "for each of 3 queries"), ([0, 1, 200], "expected 0 to 199")):
        np.save(tmp_path / "answers.npy", np.array(rows))
        with pytest.raises(BadData, match=problem):
            read()
    with pytest.raises(UsageError, match="give these with --query-vectors"):
        read(query_vectors=None)
