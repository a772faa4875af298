"""The compiled search of cells finds what the plain one finds; fine codes and scales restore items."""

from __future__ import annotations

import ctypes
import dataclasses

import numpy as np
import pytest

from genius_search import Index
from genius_search.native import build
from genius_search.nn.codebooks import normalize
from genius_search.nn.fine import (
    divide_dimensions,
    fit_fine_codes,
    pack_fine_codes,
    round_to_bytes,
    to_blocks,
    unpack_fine_codes,
)
from genius_search.records import Modality
from genius_search.search import cells, kernel
from genius_search.search.cells import rank_cells
from genius_search.search.kernel import open_compiled_search
from genius_search.search.rank import SearchQuery
from genius_search.search.vectors import decode_lengths, dequantize, fit_scales, quantize

NUM_QUERIES = 8


@pytest.fixture(params=build.VARIANTS)
def library(request, monkeypatch):
    """A variant of the compiled library, which searches use."""
    build.main()
    path = build.library_path(request.param)
    if not path.exists():
        pytest.skip("there is no C compiler")
    opened = ctypes.CDLL(str(path))
    if not opened.is_supported():
        pytest.skip(f"this processor has no {request.param}")
    build._declare_functions(opened)
    monkeypatch.setattr(kernel, "open_library", lambda: opened)
    return opened


@pytest.fixture(scope="module", params=range(6))
def segments_and_queries(request, tmp_path_factory):
    """An index of two segments with deleted items, and queries with conditions."""
    random = np.random.default_rng(request.param)
    items, dim = [(400, 20), (90, 17), (700, 33), (60, 16), (300, 64), (500, 16)][request.param]
    bits = [4, 2, 1, 8, 16, 2][request.param]
    vectors = random.standard_normal((items, dim)).astype(np.float32)
    modalities = random.choice([Modality.IMAGE, Modality.TEXT], items).tolist()
    index = Index.from_vectors(
        tmp_path_factory.mktemp("cells") / "i",
        vectors,
        modalities=modalities,
        fields=[{"n": number} for number in range(items)],
        embedding_bits=bits,
    )
    more = random.standard_normal((items // 5, dim)).astype(np.float32)
    index.add_vectors(more, ids=[f"more {number}" for number in range(len(more))])
    index.delete([str(number) for number in range(0, items, 7)])
    searcher = index._current_searcher()
    index.search(vector=vectors[1])  # fills the caches that the queries use
    restrictions = [None, searcher.snapshot.restrict(masks(searcher.snapshot, random))]
    level0 = [frozenset(), *searcher._encoder._level0.values()]
    queries = [
        SearchQuery(
            normalize(vector),
            normalize(vector),
            10,
            level0=level0[number % len(level0)],
            restriction=restrictions[number % 3 == 0],
        )
        for number, vector in enumerate(
            random.standard_normal((NUM_QUERIES, dim)).astype(np.float32)
        )
    ]
    return searcher, queries


def masks(snapshot, random):
    """Return a drawn mask of the items of each segment."""
    return [random.random(segment.num_items) < 0.2 for segment in snapshot.segments]


@pytest.mark.parametrize("changes", [{"shortlist": 0}, {"shortlist": 60}, {"rerank": "codes"}])
def test_the_library_finds_the_items_and_scores_of_the_plain_search(
    library, segments_and_queries, changes
):
    searcher, queries = segments_and_queries
    settings = dataclasses.replace(searcher.config, candidates=10**6, **changes)
    ranker, evidence = searcher.model.ranker, searcher.snapshot.evidence(searcher.model.ranker)
    evidence.packed_allowed = evidence.packed_all = None
    segments = searcher.snapshot.searched_segments
    found = open_compiled_search(ranker).search(segments, queries, settings, evidence)
    evidence.packed_allowed = evidence.packed_all = None
    for query, ranking in zip(queries, found, strict=True):
        everything = dataclasses.replace(settings, shortlist=0)
        plain = rank_cells(
            ranker, segments, dataclasses.replace(query, k=10**6), everything, evidence
        )
        assert ranking.num_ranked == plain.num_ranked == len(plain.items)
        np.testing.assert_allclose(ranking.scores, plain.scores[: query.k], atol=1e-3)
        scores = dict(zip(locations(plain), plain.scores, strict=True))
        plain_scores = [scores[location] for location in locations(ranking)]
        np.testing.assert_allclose(ranking.scores, plain_scores, atol=1e-3)
        assert len(set(locations(ranking))) == len(ranking.items)


def locations(ranking):
    """Return segment, row and row of the ID of each item."""
    return [
        *zip(
            ranking.segments.tolist(), ranking.items.tolist(), ranking.id_rows.tolist(), strict=True
        )
    ]


def test_the_cells_of_few_allowed_items_are_searched_as_all_cells(
    library, segments_and_queries, monkeypatch
):
    searcher, queries = segments_and_queries
    queries = [query for query in queries if query.restriction is not None]
    settings = dataclasses.replace(searcher.config, candidates=10**6, rerank="codes")
    ranker, evidence = searcher.model.ranker, searcher.snapshot.evidence(searcher.model.ranker)
    segments = searcher.snapshot.searched_segments
    rankings = []
    for cells_per_item in (1e-6, 1e6):
        monkeypatch.setattr(cells, "MIN_CELLS_PER_ITEM", cells_per_item)
        evidence.packed_allowed = evidence.packed_all = None
        search = open_compiled_search(ranker).search
        rankings.append(search(segments, queries, settings, evidence))
    evidence.packed_allowed = evidence.packed_all = None
    for listed, every in zip(*rankings, strict=True):
        assert locations(listed) == locations(every)
        np.testing.assert_array_equal(listed.scores, every.scores)
        assert listed.num_ranked == every.num_ranked


def test_cells_that_are_left_out_lose_little(library, segments_and_queries, monkeypatch):
    monkeypatch.setattr(kernel, "FIRST_ROWS", 40)
    searcher, queries = segments_and_queries
    settings = dataclasses.replace(searcher.config, shortlist=30, margin=3.0)
    ranker, evidence = searcher.model.ranker, searcher.snapshot.evidence(searcher.model.ranker)
    evidence.packed_allowed = evidence.packed_all = None
    segments = searcher.snapshot.searched_segments
    found = open_compiled_search(ranker).search(segments, queries, settings, evidence)
    evidence.packed_allowed = evidence.packed_all = None
    shares = []
    for query, ranking in zip(queries, found, strict=True):
        plain = rank_cells(ranker, segments, query, settings, evidence)
        assert ranking.num_ranked <= plain.num_ranked
        if len(plain.items):
            shares.append(np.mean(ranking.scores >= plain.scores[: len(ranking.scores)] - 1e-3))
    assert np.mean(shares) > 0.8


@pytest.mark.parametrize(("dim", "num_codes"), [(1, 8), (3, 8), (20, 16), (100, 64)])
def test_fine_codes_are_packed_and_approximate_residuals(dim, num_codes):
    random = np.random.default_rng(dim)
    embeddings = normalize(random.standard_normal((600, dim)).astype(np.float32))
    cells = round_to_bytes(embeddings[random.integers(0, 8, 600)])
    fine = fit_fine_codes(embeddings, cells, num_codes, 0.5)
    assert fine.is_consistent()
    codes = fine.encode(embeddings, cells, 0.5)
    before = np.square(embeddings - cells).sum()
    assert np.square(embeddings - cells - fine.sum(codes)).sum() < before / 2
    packed = pack_fine_codes(codes)
    np.testing.assert_array_equal(unpack_fine_codes(packed), codes)
    order = random.permutation(600)
    blocks = to_blocks(packed, order, 16)
    np.testing.assert_array_equal(blocks[5, :, 3], packed[order[5 * 16 + 3]])
    query = random.standard_normal(dim).astype(np.float32)
    products = sum(table[codes[:, number]] for number, table in enumerate(fine.products(query)))
    np.testing.assert_allclose(products, fine.sum(codes) @ query, atol=1e-4)


def test_dimensions_are_divided_by_their_deviations():
    np.testing.assert_array_equal(
        divide_dimensions(np.array([4.0, 4.0, 1.0, 1.0, 1.0, 1.0]), 4), [1, 2, 4, 6]
    )
    assert divide_dimensions(np.ones(3), 7).tolist() == [1, 2, 3, 3, 3, 3, 3]


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_the_stored_vector_of_an_item_has_a_product_of_1_with_it(bits):
    random = np.random.default_rng(bits)
    vectors = normalize(random.standard_normal((200, 48)).astype(np.float32))
    coded = 0.6 * vectors + 0.08 * random.standard_normal((200, 48)).astype(np.float32)
    values = quantize(vectors - coded, bits)
    rounded = dequantize(values._replace(scales=None), bits, 48)
    lengths, scales = fit_scales(vectors, coded, rounded)
    restored = decode_lengths(lengths)[:, None] * coded + scales[:, None] * rounded
    np.testing.assert_allclose(np.vecdot(restored, vectors), 1, atol=2e-3)
    exact = quantize(coded - coded, bits)
    rounded = dequantize(exact._replace(scales=None), bits, 48)
    lengths, scales = fit_scales(normalize(coded), normalize(coded), rounded)
    np.testing.assert_allclose(decode_lengths(lengths), 1, atol=0.1)
