"""An index of a user's own vectors: made, searched, added to, and refused where a vector cannot be used."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import sys
import tracemalloc

import numpy as np
import pytest

from genius_search import config
from genius_search.cli import main
from genius_search.config import PAPER_SEARCH, SearchConfig
from genius_search.encoders.base import VectorEncoder
from genius_search.errors import BadData, UsageError
from genius_search.index import candidates
from genius_search.index.build import find_changes
from genius_search.index.index import Index
from genius_search.index.pool import pool_from_vectors
from genius_search.index.query import SnapshotSearcher
from genius_search.index.request import SearchPart

DIM, ITEMS = 12, 90


def draw(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)


@pytest.fixture(scope="module")
def shared_index(tmp_path_factory) -> Index:
    index = Index.from_vectors(
        tmp_path_factory.mktemp("vectors") / "own.index",
        draw(ITEMS),
        ids=[f"item {row}" for row in range(ITEMS)],
        modalities=["image"] * 60 + ["text"] * 30,
        texts=[f"number {row}" for row in range(ITEMS)],
        fields=[{"price": row} for row in range(ITEMS)],
    )
    added = index.last_change
    assert added.added == ITEMS
    return index


@pytest.fixture
def index(shared_index, tmp_path) -> Index:
    return Index.open(shutil.copytree(shared_index.folder, tmp_path / "own.index"))


def test_the_nearest_vectors_are_found(shared_index):
    vectors, queries = draw(ITEMS), draw(20, seed=1)
    units = vectors / np.linalg.norm(vectors, axis=1)[:, None]
    expected = (queries @ units[:60].T).argsort(axis=1)[:, ::-1][:, :5]
    config = dataclasses.replace(shared_index.settings, density_weight=0.0)
    found = shared_index.search_vectors(queries, k=5, modality="image", config=config)
    shares = [
        len({hit.id for hit in hits} & {f"item {row}" for row in rows}) / 5
        for hits, rows in zip(found, expected.tolist(), strict=True)
    ]
    assert np.mean(shares) > 0.9
    assert {hit.modality for hits in found for hit in hits} == {"image"}


def test_the_first_hits_of_a_vector_do_not_depend_on_how_many_are_asked_for(tmp_path):
    index = Index.from_vectors(
        tmp_path / "i.index", np.random.default_rng(0).normal(size=(900, 24))
    )
    search = {"vector": np.ones(24), "config": SearchConfig(shortlist=20)}
    whole = [hit.id for hit in index.search(**search, k=900)]
    for k in (5, 20, 21, 400):
        assert [hit.id for hit in index.search(**search, k=k)] == whole[:k]
        assert [hit.id for hit in index.search(**search, k=5, offset=k)] == whole[k : k + 5]


def test_nor_do_they_under_conditions_that_narrow_the_search_of_a_large_pool(tmp_path, monkeypatch):
    vectors = np.random.default_rng(0).normal(size=(900, 24))
    fields = [{"third": number % 3} for number in range(900)]
    index = Index.from_vectors(tmp_path / "i.index", vectors, fields=fields)
    monkeypatch.setattr(config, "_largeness", lambda items: float(items >= 900))
    monkeypatch.setattr(candidates, "decades_above_small", lambda items: float(items >= 900))
    search = {"vector": np.ones(24), "where": ["third=1"], "config": SearchConfig(shortlist=40)}
    whole = [hit.id for hit in index.search(**search, k=300)]
    assert len(whole) == 300
    for k in (5, 20, 30, 40, 90):
        assert [hit.id for hit in index.search(**search, k=k)] == whole[:k]


@pytest.mark.parametrize("options", [{}, {"beam": 20}, {"candidates": 20, "rerank": "codes"}])
def test_options_change_only_the_settings_they_name_and_need_no_torch(index, options, monkeypatch):
    if index.model.compiled_search_for(index.settings) is not None:  # the compiled library is there
        monkeypatch.setitem(sys.modules, "torch", None)  # importing it is an error
    asked = {"vector": draw(1, seed=1)[0], "k": 9}
    settings = dataclasses.replace(index.settings, **options)
    hits = index.search(**asked, config=SearchConfig(**options))
    assert hits
    assert hits == index.search(**asked, config=settings)
    assert (hits == index.search(**asked)) == ("rerank" not in options)
    searcher = SnapshotSearcher(*index._current_state(), SearchConfig(**options))
    assert searcher.config == settings


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (SearchConfig(beam=0), "SearchConfig: setting beam = 0"),
        (SearchConfig(router="generator"), "router: this model has no generator"),
        (SearchConfig(rerank="none"), "rerank: this model has no generator"),
        (PAPER_SEARCH, "no generator"),
    ],
)
def test_options_that_cannot_be_are_refused_and_named(shared_index, config, named):
    with pytest.raises(UsageError, match=named):
        shared_index.search(vector=draw(1)[0], config=config)


def test_a_vector_finds_itself_whatever_its_length(shared_index):
    for length in (0.001, 1, 500):
        (hit,) = shared_index.search(vector=draw(ITEMS)[7] * length, k=1, modality="image")
        assert hit.id == "item 7"
    assert hit.fields == {"price": 7}
    assert hit.text == "number 7"


def test_modalities_are_merged_by_how_far_a_hit_stands_out_from_its_own(tmp_path):
    # As CLIP's: texts and images lie in two cones, so any two texts are nearer than a text and its image.
    random = np.random.default_rng(0)
    meanings = random.standard_normal((500, 32)) / 32**0.5
    images = np.hstack([meanings[:400], np.tile([3.0, 0.0], (400, 1))])
    texts = np.hstack([meanings[400:], np.tile([0.0, 3.0], (100, 1))])
    mixed = Index.from_vectors(
        tmp_path / "mixed.index",
        np.vstack([images, texts]).astype(np.float32),
        modalities=["image"] * 400 + ["text"] * 100,
    )
    asked = np.hstack([meanings[:50], np.tile([0.0, 3.0], (50, 1))])
    found = mixed.search_vectors(asked, k=5)
    assert np.mean([hits[0].id == str(row) for row, hits in enumerate(found)]) > 0.9
    own = mixed.search_vectors(np.vstack([images[:50], texts[:50]]).astype(np.float32), k=1)
    assert [hits[0].id for hits in own] == [*map(str, range(50)), *map(str, range(400, 450))]
    alone = mixed.search_vectors(asked[:1], k=5, modality="image")
    assert {hit.excess for hit in alone[0]} == {None}
    mixed.add_vectors(asked.astype(np.float32), ids=[f"late {row}" for row in range(50)])
    of_two_segments = [hit.excess for hit in mixed.search_vectors(asked[:1], k=5)[0]]
    mixed.compact(min_deleted=0)
    of_one = [hit.excess for hit in mixed.search_vectors(asked[:1], k=5)[0]]
    assert of_one == pytest.approx(of_two_segments, rel=1e-4)


def test_queries_about_nothing_in_the_index_have_no_good_match(tmp_path):
    vectors, noise = draw(400), draw(400, seed=5)
    asked, others = vectors + 0.4 * noise, draw(100, seed=6)
    about = lambda index, queries: [hits.good_match for hits in index.search_vectors(queries, k=3)]  # noqa: E731
    plain = Index.from_vectors(tmp_path / "plain.index", vectors)
    assert about(plain, asked[:1]) == [None]
    index = Index.from_vectors(tmp_path / "asked.index", vectors, query_vectors=asked[:200])
    assert about(index, asked[200:]).count(False) <= 15
    assert about(index, others).count(False) > 50
    index.refit()
    assert about(index, asked[200:]).count(False) <= 15
    assert index.search(parts=[SearchPart(vector=others[0])]).good_match is None
    lines = {
        one.__doc__.partition(".")[0]
        for module in (str, os, math)
        for one in vars(module).values()
        if one.__doc__
    }
    texts = Index.create(tmp_path / "texts.index", sorted(lines), encoder="text:wordllama")
    assert texts.search("return the square root of a number").good_match
    assert texts.search("two dogs play with a ball in the snow").good_match is False


def test_filters_words_and_parts_go_with_vectors(shared_index):
    query = draw(1, seed=2)[0]
    assert all(
        hit.fields["price"] < 9 for hit in shared_index.search(vector=query, where=["price<9"], k=5)
    )
    assert [hit.id for hit in shared_index.search(vector=query, match="number 33")] == ["item 33"]
    sums = shared_index.search(
        parts=[SearchPart(vector=query), SearchPart(id="item 5", weight=2.0)], k=3, modality="image"
    )
    assert "item 5" in [hit.id for hit in sums]


def test_vectors_are_added_replaced_and_deleted(index):
    more = draw(3, seed=3)
    assert index.add_vectors(more, ids=["a", "b", "item 1"], modalities="image").added == 3
    assert index.add_vectors(more, ids=["a", "b", "item 1"], modalities="image").unchanged == 3
    assert index.search(vector=more[2], k=1, modality="image")[0].id == "item 1"
    index.delete("a")
    assert "a" not in [hit.id for hit in index.search(vector=more[0], k=50)]
    assert index.info().items == ITEMS + 1


def bad_rows(kind: str) -> np.ndarray:
    vectors = draw(6, seed=4)
    vectors[4] = {"zero": 0, "nan": np.nan, "infinite": np.inf}[kind]
    return vectors


@pytest.mark.parametrize("kind", ["zero", "nan", "infinite"])
def test_a_row_without_direction_is_named_and_nothing_changes(index, kind, tmp_path):
    with pytest.raises(BadData, match="row 4 "):
        index.add_vectors(bad_rows(kind), ids=list("abcdef"))
    with pytest.raises(BadData, match="row 4 "):
        Index.from_vectors(tmp_path / "new.index", bad_rows(kind))
    assert index.info().items == ITEMS
    assert not (tmp_path / "new.index").exists()


def test_vectors_may_be_long_beyond_single_precision(index):
    longest = (draw(1, seed=5) * np.float64(1e150)).astype(np.float64)
    assert index.add_vectors(longest, ids=["far"]).added == 1
    assert index.search(vector=draw(1, seed=5)[0], k=1)[0].id == "far"


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (["a", "b", "c", "b"], "rows 1 and 3 have the id 'b'"),
        (["a", "b", "", "d"], "the id of row 2 has 0 characters"),
    ],
)
def test_bad_ids_are_named_by_their_rows(index, ids, words):
    with pytest.raises(BadData, match=words):
        index.add_vectors(draw(4), ids=ids)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"vectors": draw(2)[:, :5], "ids": ["x", "y"]}, "have 5 numbers, those of this index 12"),
        ({"vectors": draw(2), "ids": ["x"]}, "2 vectors and 1 ids"),
        ({"vectors": draw(1)[0], "ids": ["x"]}, r"of shape \(12,\)"),
    ],
)
def test_other_shapes_are_refused(index, given, words):
    with pytest.raises(UsageError, match=words):
        index.add_vectors(**given)


@pytest.mark.parametrize(
    "query", [np.zeros(DIM), np.full(DIM, np.nan), np.ones(DIM + 1), np.ones((2, DIM))]
)
def test_a_query_without_direction_or_of_another_width_is_refused(shared_index, query):
    with pytest.raises(UsageError, match="the query's vector"):
        shared_index.search(vector=query)


def test_words_are_refused_because_nobody_knows_the_encoder(shared_index):
    with pytest.raises(UsageError, match="search with vector="):
        shared_index.search("a dog")


def test_a_matrix_is_not_a_pool(index, tmp_path):
    with pytest.raises(UsageError, match="from_vectors"):
        Index.create(tmp_path / "x.index", draw(3))
    with pytest.raises(UsageError, match="add_vectors"):
        index.add(draw(3))


def test_a_new_index_keeps_few_bytes_in_memory_for_each_vector(tmp_path):
    vectors = draw(20_000)
    tracemalloc.start()
    try:
        pool = pool_from_vectors(vectors, None, modalities="image", texts=None, fields=None)
        changes = find_changes(tmp_path, pool, VectorEncoder(str(DIM)), None, divides=True).changes
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [change.stamp for change in changes] == [item.stamp for item in pool.items()]
    assert num_bytes < 100 * len(vectors)


def test_the_command_line_takes_files(tmp_path, capsys):
    np.save(tmp_path / "x.npy", draw(40).astype(np.float16))
    np.save(tmp_path / "q.npy", draw(40)[3])
    (tmp_path / "ids.txt").write_text("\n".join(f"n{row}" for row in range(40)))
    words = ["--vectors", str(tmp_path / "x.npy"), "--ids", str(tmp_path / "ids.txt")]
    place = str(tmp_path / "x.index")
    assert main(["index", "create", place, *words]) == 0
    capsys.readouterr()
    assert main(["search", place, "--vector", str(tmp_path / "q.npy"), "-k", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["hits"][0]["id"] == "n3"
    assert main(["index", "add", place, *words]) == 0
    (tmp_path / "bad.npy").write_text("no array")
    assert main(["index", "add", place, "--vectors", str(tmp_path / "bad.npy"), *words[2:]]) == 6
    assert "cannot be read as a .npy file" in capsys.readouterr().err


def test_codes_keep_what_queries_ask_for(tmp_path):
    # Queries ask about a few of the directions in which items differ.
    random = np.random.default_rng(0)
    scales = np.where(np.arange(32) < 6, 1.0, 0.1)
    items, asked = random.standard_normal((2000, 32)), random.standard_normal((300, 32)) * scales
    exact = (asked[200:] @ (items / np.linalg.norm(items, axis=1)[:, None]).T).argsort(axis=1)[
        :, ::-1
    ][:, :10]

    def share(index: Index) -> float:
        config = dataclasses.replace(index.settings, rerank="codes", density_weight=0.0)
        found = index.search_vectors(asked[200:], k=10, config=config)
        pairs = zip(found, exact.tolist(), strict=True)
        return np.mean([len({int(hit.id) for hit in hits} & {*rows}) / 10 for hits, rows in pairs])

    plain = Index.from_vectors(tmp_path / "plain.index", items, levels=2)
    aware = Index.from_vectors(tmp_path / "aware.index", items, levels=2, query_vectors=asked[:200])
    assert share(aware) > 1.2 * share(plain)
    assert (aware.info().knows_queries, plain.info().knows_queries) == (True, False)
    aware.refit(levels=5)  # keeps what is known of queries
    plain.refit(levels=5, query_vectors=asked[:200])
    assert share(aware) == pytest.approx(share(plain), abs=0.05)
    for bad in (asked[:9], asked[:, :5], asked.ravel()):
        with pytest.raises(
            UsageError, match=r"expected 32 numbers in each row, and at least 100 rows"
        ):
            plain.refit(query_vectors=bad)


def test_the_most_levels_keep_all(tmp_path):
    items = np.random.default_rng(0).standard_normal((60, 8))
    index = Index.from_vectors(tmp_path / "x.index", items, levels=32)
    config = dataclasses.replace(index.settings, rerank="codes")
    found = index.search_vectors(items, k=1, config=config)
    assert [hits[0].id for hits in found] == [str(row) for row in range(60)]
