"""Hits read their values when asked, and a search by a vector alone finds what a request finds."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genius_search.errors import ArtifactMismatch, BadData, UsageError
from genius_search.index.hits import SearchHit
from genius_search.index.index import Index
from genius_search.index.request import SearchRequest
from genius_search.index.store import read_manifest
from genius_search.index.writer import write_manifest

DIM = 8


def draw(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, DIM)).astype(np.float32)


@pytest.fixture
def index(tmp_path) -> Index:
    """Forty items, of which item 3 has a text and a field."""
    return Index.from_vectors(
        tmp_path / "own.index",
        draw(40),
        texts=[f"text {row}" for row in range(40)],
        fields=[{"price": row} for row in range(40)],
    )


def make_plain(folder) -> Index:
    """Items of one modality."""
    return Index.from_vectors(folder, draw(120))


def make_modalities(folder) -> Index:
    """Items of two modalities."""
    return Index.from_vectors(folder, draw(120), modalities=["image"] * 70 + ["text"] * 50)


def make_changed(folder) -> Index:
    """Three segments, with deleted items."""
    index = Index.from_vectors(folder, draw(100), texts=[f"number {row}" for row in range(100)])
    for seed in (1, 2):
        index.add_vectors(draw(9, seed), ids=[f"{seed}-{row}" for row in range(9)])
    index.delete([*range(0, 100, 7), "2-3"])
    return index


def make_learned(folder) -> Index:
    """Two choices were learned."""
    index = make_plain(folder)
    index.learn("7", vector=draw(1, seed=5)[0])
    index.learn("9", vector=draw(1, seed=6)[0])
    return index


def make_codes(folder) -> Index:
    """Items that are ranked by their codes alone."""
    return Index.from_vectors(folder, draw(120), embeddings="none")


@pytest.fixture(scope="module")
def indexes(tmp_path_factory) -> dict[str, Index]:
    makers = (make_plain, make_modalities, make_changed, make_learned, make_codes)
    return {
        make.__name__: make(tmp_path_factory.mktemp(make.__name__) / "index") for make in makers
    }


@settings(deadline=None)
@given(
    name=st.sampled_from(["plain", "modalities", "changed", "learned", "codes"]),
    k=st.sampled_from([1, 3, 10, 60, 200]),
    seed=st.integers(0, 9),
    dtype=st.sampled_from(["f2", "f4", "f8", "list"]),
)
def test_a_vector_alone_finds_what_a_request_finds(indexes, name, k, seed, dtype):
    index = indexes[f"make_{name}"]
    vectors = draw(3, seed) if dtype == "list" else draw(3, seed).astype(dtype)
    queries = vectors.tolist() if dtype == "list" else [*vectors]
    by_requests = [index.search(SearchRequest(vector=query, k=k)) for query in queries]
    by_vectors = [index.search(vector=query, k=k) for query in queries]
    in_a_batch = index.search_vectors(vectors, k=k)
    with_an_option = index.search_vectors(vectors, k=k, hybrid=True)
    assert by_vectors == by_requests == in_a_batch == with_an_option
    assert [hits.good_match for hits in by_vectors] == [hits.good_match for hits in by_requests]
    pages = index.search(vector=queries[0], k=2, offset=1)
    assert [hit.id for hit in pages] == [hit.id for hit in by_vectors[0][1:3]] or k < 3


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"vector": np.zeros(DIM)}, UsageError),
        ({"vector": np.full(DIM, 1e200)}, UsageError),
        ({"vector": np.ones(DIM + 1)}, UsageError),
        ({"vector": [np.nan] * DIM}, UsageError),
        ({"vector": np.ma.masked_less(np.arange(DIM), 3)}, BadData),
        ({"vector": ["a"] * DIM}, UsageError),
        ({"vector": np.ones(DIM), "k": 0}, UsageError),
        ({"vector": np.ones(DIM), "k": 10**10}, UsageError),
    ],
)
def test_a_vector_alone_is_refused_as_a_request_is(index, options, error):
    with pytest.raises(error) as of_request:
        index.search(SearchRequest(**options))
    with pytest.raises(error) as of_vector:
        index.search(**options)
    assert str(of_vector.value) == str(of_request.value)


def test_hits_keep_the_values_of_the_searched_state(index):
    hits = index.search(vector=draw(40)[3], k=1)
    index.add_vectors(draw(40)[3:4], ids=[3], texts=["another text"])
    index.delete("4")
    index.compact(min_deleted=0)
    [hit] = hits
    assert (hit.id, hit.text, hit.fields) == ("3", "text 3", {"price": 3})
    assert index.search(vector=draw(40)[3], k=1)[0].text == "another text"


def test_unread_hits_can_be_compared_copied_pickled_and_printed(index):
    def search() -> SearchHit:
        return index.search(vector=draw(40)[3], k=2)[0]

    read = search()
    values = dataclasses.asdict(read)
    assert (values["id"], values["text"]) == ("3", "text 3")
    assert SearchHit(**values) == read == search()
    assert repr(search()) == repr(read)
    assert copy.copy(search()) == copy.deepcopy(search()) == read
    assert pickle.loads(pickle.dumps(search())) == read  # noqa: S301
    assert json.dumps(dataclasses.asdict(search())) == json.dumps(values)
    assert dataclasses.replace(search(), rank=7) == SearchHit(**{**values, "rank": 7})
    assert "text 3" in str(index.search(vector=draw(40)[3], k=2))
    with pytest.raises(AttributeError, match="colour"):
        search().colour  # noqa: B018
    with pytest.raises(dataclasses.FrozenInstanceError):
        search().rank = 2


def test_ids_of_any_script_are_read_and_a_segment_without_them_is_refused(index):
    names = ["a kite", "крыша", "x", "🪁"]
    index.add_vectors(draw(4, seed=7), ids=names)
    hits = index.search_vectors(draw(4, seed=7), k=1)
    assert [hit.id for [hit] in hits] == names
    manifest = read_manifest(index.folder)
    segments = tuple(
        entry.model_copy(
            update={"files": {k: v for k, v in entry.files.items() if not k.startswith("item_id")}}
        )
        for entry in manifest.segments
    )
    write_manifest(index.folder, manifest.replace(segments=segments))
    with pytest.raises(ArtifactMismatch, match=r"item_ids\.npy.*create the index again"):
        Index.open(index.folder).search_vectors(draw(4, seed=7), k=1)
