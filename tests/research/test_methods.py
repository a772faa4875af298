from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from genius_search.config import PAPER_SEARCH
from genius_search.data.features import Features
from genius_search.index.writer import ItemArrays
from research.methods import BEAM_METHODS, MethodHits, PoolCandidates, RowQueries, find

QUERIES = 12


@pytest.fixture(scope="module")
def pool(model, trained) -> PoolCandidates:
    """The first training candidates, encoded by the model."""
    features = Features.open(trained.model / "features" / "candidates")
    batch = features.gather(np.arange(150))
    encoded = model.encode(batch, features.modality[:150])
    arrays = ItemArrays(
        encoded.columns,
        np.zeros(150, dtype=np.float16),
        model.embed_features(batch).astype(np.float16),
        model.coder.norm_and_density.item_density(encoded.embeddings, encoded.codes),
    )
    return PoolCandidates(features, arrays, np.arange(150))


@pytest.fixture(scope="module")
def varied_pool(pool) -> PoolCandidates:
    """The candidates with random densities."""
    densities = np.random.default_rng(2).integers(64, 192, 150).astype(np.uint8)
    arrays = pool._encoded._replace(densities=densities)
    return PoolCandidates(pool._features, arrays, np.arange(150))


@pytest.fixture(scope="module")
def queries(model) -> RowQueries:
    vectors = torch.randn(QUERIES, model.dim, generator=torch.Generator().manual_seed(1))
    vectors = torch.nn.functional.normalize(vectors, dim=-1)
    return RowQueries([f"1:{number}" for number in range(QUERIES)], vectors, vectors)


def find_hits(
    model, pool, queries, methods=tuple(BEAM_METHODS), **settings
) -> dict[str, MethodHits]:
    config = dataclasses.replace(PAPER_SEARCH, **settings)
    (method_hits,) = find(model, [queries], pool, methods, config)
    return {hits.method: hits for hits in method_hits}


def dids(results: MethodHits) -> list[list[str]]:
    return [[hit.did for hit in hits] for hits in results.hits]


def sorted_dids(results: MethodHits) -> list[list[str]]:
    """Return the hits of each query by score; equal scores by did."""
    return [
        [did for _, did in sorted((-hit.score, hit.did) for hit in hits)] for hits in results.hits
    ]


def scores(results: MethodHits) -> list[float]:
    return [hit.score for hits in results.hits for hit in hits]


def test_hits_of_beams_over_the_whole_pool_do_not_depend_on_the_router(model, pool, queries):
    results = find_hits(model, pool, queries, beam=500)
    for rerank in ("codes", "embeddings"):
        routed, generated = (results[f"{router}+{rerank}"] for router in ("routing", "generative"))
        assert sorted_dids(routed) == sorted_dids(generated)
    assert {hits.num_ranked for hits in results.values()} == {150.0}


def test_routing_follows_the_code_vectors_and_not_the_generator(model, pool, queries):
    results = find_hits(model, pool, queries, beam=4, candidates=20)
    assert dids(results["routing+codes"]) != dids(results["generative+codes"])
    vectors = torch.from_numpy(model.ranker.vectors(pool.codes))
    nearest = (queries.fused[:, None] - vectors[None]).square().sum(dim=2).argmin(dim=1)
    wide = find_hits(model, pool, queries, ("routing+codes",), beam=80)["routing+codes"]
    for query, hits in enumerate(wide.hits):
        assert pool.did(int(nearest[query])) in {hit.did for hit in hits}


@pytest.mark.parametrize("density_weight", [0.0, 0.5])
def test_a_beam_over_the_whole_pool_orders_it_like_exact_search(
    model, pool, queries, density_weight
):
    methods = ("exact-fused+hubness", "exact-codes", "generative+embeddings", "generative+codes")
    results = find_hits(model, pool, queries, methods, beam=500, density_weight=density_weight)
    for exact, generative in (methods[::2], methods[1::2]):
        assert scores(results[exact]) == pytest.approx(scores(results[generative]), abs=1e-5)


def test_densities_fade_near_a_query_in_exact_search_and_in_beam_search(
    model, pool, varied_pool, monkeypatch
):
    monkeypatch.setattr("research.methods.CANDIDATE_BLOCK", 40)  # several blocks
    items = pool.fused(slice(0, QUERIES))
    queries = RowQueries([f"1:{number}" for number in range(QUERIES)], items, items)
    methods = ("exact-fused+hubness", "generative+embeddings")
    results = find_hits(model, varied_pool, queries, methods, beam=500, density_weight=0.5)
    exact, generative = (results[method] for method in methods)
    assert scores(exact) == pytest.approx(scores(generative), abs=1e-5)
    vectors = pool.fused(slice(0, 150)).numpy()
    densities = (varied_pool.densities.astype(float) - 128) / 800
    spread = model.ranker.spread.target_spread()
    tables = model.ranker.tables()[model.ranker.spread.level]
    for query, hits in zip(items.numpy(), exact.hits, strict=True):
        products = vectors @ query
        fading = np.clip((1 - products) / 0.25, 0, 1) ** 3
        scale = float(spread.scale((tables @ query)[None])[0])
        expected = np.sort(products - 0.5 * fading * densities / scale)[::-1]
        assert [hit.score for hit in hits] == pytest.approx(expected[: len(hits)], abs=1e-5)
        assert hits[0].score == pytest.approx(1, abs=2e-3)  # the item itself, or a copy of it


def test_only_methods_that_say_so_are_corrected_for_hubness(model, pool, queries):
    methods = ("exact-raw", "exact-fused", "exact-fused+hubness", "exact-codes", *BEAM_METHODS)
    plain, corrected = (
        find_hits(model, pool, queries, methods, beam=6, density_weight=density_weight)
        for density_weight in (0.0, 5.0)
    )
    equal = {method for method in methods if plain[method].hits == corrected[method].hits}
    assert equal == {"exact-raw", "exact-fused", "generative", "generative+raw"}
    uncorrected = scores(plain["exact-fused"])
    assert scores(plain["exact-fused+hubness"]) == pytest.approx(uncorrected, abs=1e-6)


def test_hits_of_a_method_do_not_depend_on_other_methods(model, pool, queries):
    together = find_hits(model, pool, queries, beam=6, candidates=10)
    for method in BEAM_METHODS:
        alone = find_hits(model, pool, queries, (method,), beam=6, candidates=10)
        assert alone == {method: together[method]}
