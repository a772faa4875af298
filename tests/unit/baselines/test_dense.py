import importlib

import numpy as np
import pytest
import torch

from genius_search.errors import MissingExtra, UsageError
from genius_search.lab.baselines.dense import (
    NOTHING,
    SMALL_BITS,
    Flat,
    Hnsw,
    Ivf,
    IvfPq,
    Refined,
    Residual,
    build,
    use_threads,
)
from genius_search.search.rank import Nearest, exact_search

DIM, NUM_ITEMS, K = 16, 2_000, 10
ROUGH = IvfPq(lists=20, effort=20, parts=2)
ALL = NUM_ITEMS


def unit(vectors):
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    use_threads(1)


@pytest.fixture(scope="module")
def vectors():
    random = np.random.default_rng(3)
    centres = random.standard_normal((40, DIM))
    return unit(centres[random.integers(0, 40, NUM_ITEMS)] + 0.5 * random.standard_normal((NUM_ITEMS, DIM)))


@pytest.fixture(scope="module")
def queries(vectors):
    random = np.random.default_rng(4)
    return unit(vectors[:50] + 0.05 * random.standard_normal((50, DIM)))


@pytest.fixture(scope="module")
def exact(vectors, queries):
    return exact_search(
        torch.from_numpy(queries), lambda rows: torch.from_numpy(vectors[rows]), NUM_ITEMS, k=K
    )


def recall(found, exact):
    hits = [
        set(row.tolist()) & set(wanted.tolist()) for row, wanted in zip(found.items, exact.items, strict=True)
    ]
    return sum(map(len, hits)) / exact.items.size


def test_a_flat_index_finds_what_exact_search_finds(vectors, queries, exact):
    found = build(vectors, Flat()).search(queries, K)
    assert found.items.tolist() == exact.items.tolist()
    np.testing.assert_allclose(found.scores, exact.scores, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "least"),
    [
        (Hnsw(effort=500), 0.99),
        (Hnsw(effort=500, stored="float16"), 0.99),
        (Hnsw(effort=500, stored="int8"), 0.9),
        (Ivf(lists=20, effort=20), 1.0),
        (Ivf(lists=20, effort=20, stored="float16"), 0.99),
        (Ivf(lists=20, effort=20, stored="int8"), 0.9),
        (IvfPq(lists=20, effort=20, parts=16), 0.9),
        (IvfPq(lists=20, effort=20, parts=16, bits=4), 0.6),
        (Flat(stored="float16"), 0.99),
        (Flat(stored="int8"), 0.9),
        (Refined(base=ROUGH, factor=50), 0.99),
        (Refined(base=ROUGH, factor=50, stored="int8"), 0.9),
        (Residual(), 0.75),
        (Residual(width=4), 0.75),
        (Residual(codebooks=12, bits=8), 0.9),
        (Residual(lists=20, effort=20), 0.8),
        (Residual(lists=20, effort=20, codebooks=12, bits=8), 0.9),
    ],
)
def test_with_generous_settings_recall_is_high_and_scores_never_rise(kind, least, vectors, queries, exact):
    found = build(vectors, kind).search(queries, K)
    assert recall(found, exact) >= least
    assert (np.diff(found.scores, axis=1) <= 0).all()


RESIDUALS = [
    Residual(lists=lists, effort=20, codebooks=codebooks, bits=bits, width=4)
    for lists in (None, 20)
    for codebooks, bits in ((3, 8), (6, 4))
]
CODED = [
    *RESIDUALS,
    IvfPq(lists=20, effort=20, parts=4),
    IvfPq(lists=20, effort=20, parts=8, bits=4),
]


@pytest.mark.parametrize("kind", [*CODED, Refined(base=ROUGH, factor=50)])
def test_scores_are_about_the_inner_products_of_what_was_found(kind, vectors, queries):
    found = build(vectors, kind).search(queries, K)
    products = np.einsum("qd,qkd->qk", queries, vectors[found.items])
    assert np.abs((found.scores - products).mean()) < 0.1


@pytest.mark.parametrize("kind", CODED)
def test_in_a_cone_distance_finds_more_than_inner_products_at_as_many_bytes(kind):
    random = np.random.default_rng(5)
    axis, centres = random.standard_normal(DIM), 0.6 * random.standard_normal((40, DIM))
    noise = 0.4 * random.standard_normal((NUM_ITEMS, DIM))
    items = unit(axis + centres[random.integers(0, 40, NUM_ITEMS)] + noise)
    asked = unit(items[:100] + 0.05 * random.standard_normal((100, DIM)))
    exact = exact_search(torch.from_numpy(asked), lambda rows: torch.from_numpy(items[rows]), NUM_ITEMS, k=K)
    by_distance = recall(build(items, kind).search(asked, K), exact)
    by_product = recall(_by_product(items, kind, asked), exact)
    assert by_distance > by_product


def _by_product(items, kind, asked):
    """What faiss finds by inner products, with more codes for the byte that a norm takes."""
    import faiss  # noqa: PLC0415

    dim, metric, plain = DIM, faiss.METRIC_INNER_PRODUCT, faiss.AdditiveQuantizer.ST_LUT_nonorm
    small = "FastScan" if kind.bits == SMALL_BITS else ""
    centroids = faiss.IndexFlatIP(dim)
    if isinstance(kind, IvfPq):
        make = getattr(faiss, f"IndexIVFPQ{small}")
        index = make(centroids, dim, kind.lists, kind.parts, kind.bits, metric)
    else:
        books = kind.codebooks + 8 // kind.bits
        if kind.lists is None:
            index = getattr(faiss, f"IndexResidualQuantizer{small}")(dim, books, kind.bits, metric, plain)
        else:
            make = getattr(faiss, f"IndexIVFResidualQuantizer{small}")
            index = make(centroids, dim, kind.lists, books, kind.bits, metric, plain)
        index.rq.max_beam_size, index.rq.use_beam_LUT = kind.width, 1
        index.rq.train_type = faiss.ResidualQuantizer.Train_default
    index.train(items)
    index.add(items)
    if kind.lists:
        index.nprobe = kind.effort
    scores, found = index.search(asked, K)
    return Nearest(found, scores)


REFINED = Refined(base=IvfPq(lists=50, effort=1, parts=8))


@pytest.mark.parametrize("kind", [Hnsw(effort=K, links=4), Ivf(lists=50, effort=1), REFINED])
def test_more_effort_finds_more(kind, vectors, queries, exact):
    index = build(vectors, kind)
    before = recall(index.search(queries, K), exact)
    index.set_effort(50)
    assert recall(index.search(queries, K), exact) > before


def test_more_items_ranked_by_their_vectors_find_more(vectors, queries, exact):
    plain = recall(build(vectors, ROUGH).search(queries, K), exact)
    some, many = (
        recall(build(vectors, Refined(base=ROUGH, factor=factor)).search(queries, K), exact)
        for factor in (2, 20)
    )
    assert plain < some < many


@pytest.mark.parametrize("kind", [Flat(), Residual()])
def test_an_index_that_looks_at_everything_has_no_effort(kind, vectors):
    with pytest.raises(UsageError, match="every item"):
        build(vectors, kind).set_effort(3)


def test_places_that_an_approximate_index_does_not_fill_say_so(vectors, queries):
    found = build(vectors, Ivf(lists=200, effort=1)).search(queries, NUM_ITEMS)
    is_empty = found.items == NOTHING
    assert is_empty.any()
    assert np.isneginf(found.scores[is_empty]).all()
    assert np.isfinite(found.scores[~is_empty]).all()


def test_an_index_of_nothing_finds_nothing(queries):
    found = build(np.zeros((0, DIM), dtype=np.float32), Flat()).search(queries, K)
    assert found.items.shape == (len(queries), 0)


@pytest.mark.parametrize(
    ("kind", "each", "once"),
    [
        (Flat(), 4 * DIM, 0),
        (Ivf(lists=20), 4 * DIM + 8, 20 * DIM * 4),
        (Ivf(lists=20, stored="float16"), 2 * DIM + 8, 20 * DIM * 4),
        (IvfPq(lists=20, parts=8), 8 + 8, (20 + 256) * DIM * 4),
        (Flat(stored="int8"), DIM, 2 * DIM * 4),
        (Ivf(lists=20, stored="int8"), DIM + 8, (20 + 2) * DIM * 4),
        (Refined(base=IvfPq(lists=20, parts=8)), 8 + 8 + 2 * DIM, (20 + 256) * DIM * 4),
        (Refined(base=IvfPq(lists=20, parts=8), stored="int8"), 8 + 8 + DIM, (20 + 256 + 2) * DIM * 4),
        (Residual(), 13, 24 * 16 * DIM * 4),
        (Residual(codebooks=12, bits=8), 13, 12 * 256 * DIM * 4),
    ],
)
def test_bytes_are_those_of_vectors_or_codes_item_numbers_and_tables(kind, each, once, vectors):
    index = build(vectors, kind)
    assert index.num_bytes() == pytest.approx(each * NUM_ITEMS + once, abs=4_000)
    assert index.bytes_per_item() == index.num_bytes() / NUM_ITEMS


def test_bytes_are_those_of_the_file_faiss_writes(vectors, tmp_path):
    import faiss  # noqa: PLC0415

    index = build(vectors, Hnsw(links=8))
    faiss.write_index(index._index, str(tmp_path / "index"))
    assert index.num_bytes() == (tmp_path / "index").stat().st_size


def test_half_precision_vectors_are_as_good(vectors, queries, exact, monkeypatch):
    monkeypatch.setattr("genius_search.lab.baselines.dense.ADDED_AT_ONCE", 300)
    assert recall(build(vectors.astype(np.float16), Flat()).search(queries, K), exact) > 0.98


def test_the_same_seed_trains_the_same_index(vectors, queries):
    kind = Ivf(lists=20, effort=2)
    one, two, other = (
        build(vectors, kind, training_items=500, seed=seed).search(queries, 50).items.tolist()
        for seed in (1, 1, 2)
    )
    assert one == two
    assert one != other


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        (IvfPq(parts=5, lists=4), {}, "parts=5 does not divide vectors of 16"),
        (Refined(base=IvfPq(parts=5, lists=4)), {}, "parts=5 does not divide vectors of 16"),
        (Ivf(lists=3_000), {}, "3000 vectors or more to train on, these are 2000"),
        (Ivf(lists=50), {"training_items": 40}, "50 vectors or more to train on, these are 40"),
        (Residual(bits=8), {"training_items": 100}, "256 vectors or more"),
    ],
)
def test_settings_that_do_not_fit_the_vectors_are_refused(kind, settings, says, vectors):
    with pytest.raises(UsageError, match=says):
        build(vectors, kind, **settings)


def test_without_faiss_the_extra_is_named(vectors, monkeypatch):
    real = importlib.import_module

    def missing(name):
        if name == "faiss":
            raise ImportError("No module named 'faiss'")
        return real(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(MissingExtra, match=r"pip install 'genius-retrieval\[bench\]'"):
        build(vectors, Flat())
