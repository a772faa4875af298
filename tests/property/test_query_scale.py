"""Neither a query's length nor a part of it that is the same for every item changes what is found."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from genius_search.config import PAPER_SEARCH
from genius_search.nn.coder import Coder
from genius_search.nn.generator import Generator
from genius_search.nn.packed import pack
from genius_search.progress import Silent
from genius_search.recipe import GeneratorConfig
from genius_search.search.beam import GeometricDecoder, GuidedDecoder
from genius_search.search.kernel import open_compiled_search, search_segments
from genius_search.search.rank import CodeRanker, Evidence, SearchQuery
from genius_search.search.table import Allowed, IdTable, SearchSegment
from genius_search.search.vectors import Quantized, StoredVectors, quantize
from genius_search.training.codebooks import fit_codebooks

ITEMS, DIM, QUERIES, K = 700, 24, 40, 10
SAME = 0.99
"""Share of the hits that must be the same; rounding may exchange hits of equal scores."""


@pytest.fixture(scope="module", params=["axis", "rotated"])
def pool(request, tmp_path_factory):
    """Items in clusters, and a direction in which they do not differ: a dimension, or any."""
    random = np.random.default_rng(0)
    centres = random.standard_normal((30, DIM - 1))
    items = centres[random.integers(0, 30, ITEMS)] + 0.6 * random.standard_normal((ITEMS, DIM - 1))
    items = np.concatenate(
        [items / np.linalg.norm(items, axis=1)[:, None], np.zeros((ITEMS, 1))], axis=1
    )
    queries = np.concatenate(
        [random.standard_normal((QUERIES, DIM - 1)), np.zeros((QUERIES, 1))], axis=1
    )
    constant = np.eye(DIM)[-1]
    if request.param == "rotated":
        rotation = np.linalg.qr(random.standard_normal((DIM, DIM)))[0]
        items, queries, constant = items @ rotation, queries @ rotation, constant @ rotation
    return Pool(items, queries, constant, tmp_path_factory.mktemp("codebooks") / "quantizer")


class Pool:
    def __init__(self, items, queries, constant, folder) -> None:
        self.items, self.queries = items.astype(np.float32), unit(queries)
        self.constant = constant.astype(np.float32)
        modalities = (np.arange(ITEMS) % 2).astype(np.int8)
        self.quantizer = fit_codebooks(
            self.items,
            modalities,
            folder,
            items=ITEMS,
            inputs={},
            levels=4,
            progress=Silent(),
        ).codebooks
        self.coder = Coder(self.quantizer)
        encoded = self.coder.encode_items(self.items, modalities)
        self.table = IdTable.build(encoded.columns, encoded.code_cosine)
        self.densities = self.coder.norm_and_density.item_density(encoded.embeddings, encoded.codes)
        self.ranker = CodeRanker(self.quantizer.tables(), self.quantizer.spread)
        self.residuals = self.items - self.ranker.vectors(encoded.columns)

    def stored(self, bits):
        if bits == 16:
            return StoredVectors(quantize(self.items, 16), 16, self.ranker, self.table)
        if bits == "raw":
            return StoredVectors(
                Quantized(self.items.astype(np.float16), None), 16, self.ranker, self.table
            )
        return StoredVectors(quantize(self.residuals, bits), bits, self.ranker, self.table)

    def search(self, queries, bits, decoder, fast, *, level0=frozenset(), allowed=None, **settings):
        ranks = "codes" if bits is None else "embeddings"
        config = dataclasses.replace(
            PAPER_SEARCH,
            **{"beam": 5, "candidates": 60, "shortlist": 50, "density_weight": 0.3, **settings},
            rerank=ranks,
        )
        vectors = None if bits is None else [self.stored(bits)]
        restriction = None if allowed is None else (allowed,)
        encoded = [
            SearchQuery(query, query, K, beam=10, level0=level0, restriction=restriction)
            for query in queries
        ]
        found = search_segments(
            lambda: decoder,
            fast,
            [SearchSegment(self.table)],
            encoded,
            config,
            Evidence(self.ranker, vectors, bits == "raw", [self.densities]),
        )
        return [set(one.items.tolist()) for one in found]


def unit(vectors):
    return (vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)).astype(np.float32)


def assert_same(before, after):
    kept = np.mean([len(one & other) / len(one) for one, other in zip(before, after, strict=True)])
    assert kept >= SAME
    assert all(before)


@pytest.mark.parametrize("bits", [None, 1, 2, 4, 8, 16, "raw"])
@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("is_filtered", [True, False])
def test_no_ranking_depends_on_it(pool, bits, is_compiled, is_filtered):
    fast = open_compiled_search(pool.ranker) if is_compiled else None
    if is_compiled and fast is None:
        pytest.skip("the search is not compiled")
    router = GeometricDecoder([*map(torch.from_numpy, pool.quantizer.tables())], pool.ranker.spread)
    wishes = {}
    if is_filtered:
        mask = np.random.default_rng(1).random(ITEMS) < 0.5
        wishes = {"level0": frozenset([1]), "allowed": Allowed.of(pool.table, mask)}
    before = pool.search(pool.queries, bits, router, fast, **wishes)
    for other in (pool.queries * np.float32(0.01), unit(pool.queries + 3 * pool.constant)):
        assert_same(before, pool.search(other, bits, router, fast, **wishes))


@pytest.mark.parametrize("is_compiled", [True, False])
def test_nor_does_a_generator_with_a_guide(pool, is_compiled):
    """The network reads the query too, so here it does not see the direction in which nothing differs."""
    config = GeneratorConfig(
        layers=1, width=16, feedforward=16, heads=2, head_width=8, prefixes=2, guide="geometry"
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        network = Generator(DIM, pool.quantizer.sizes, config).eval()
        network.start_codes(
            [*map(torch.from_numpy, pool.quantizer.tables())],
            generator=torch.Generator().manual_seed(0),
        )
        network.prefix_projection.weight.zero_()
    weights = {name: weight.numpy() for name, weight in network.state_dict().items()}
    fast = None
    if is_compiled:
        fast = open_compiled_search(pool.ranker, pack(config, DIM, network.sizes, weights))
    decoder = GuidedDecoder(network, pool.ranker.spread)
    before = pool.search(pool.queries, None, decoder, fast)
    for other in (pool.queries * np.float32(7), unit(pool.queries + 2 * pool.constant)):
        assert_same(before, pool.search(other, None, decoder, fast))
