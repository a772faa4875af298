"""The quick searches find what the general one finds, hit for hit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from genius_search.config import SearchConfig
from genius_search.search.decoder import GeometricDecoder
from genius_search.search.fast import CompiledSearch, NumpySearch, Wanted, open_library
from genius_search.search.find import find
from genius_search.search.native.build import build, find_compilers
from genius_search.search.rank import CodeRanker, Evidence
from genius_search.search.table import Allowed, IdTable, Part


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """The library, compiled from this source."""
    if not list(find_compilers()):
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("native")
    assert build(folder)
    return open_library(folder)


@pytest.fixture(params=["numpy", "compiled"])
def make(request):
    """Make a quick search of a ranker."""
    if request.param == "numpy":
        return NumpySearch
    library = request.getfixturevalue("compiled")
    return lambda ranker: CompiledSearch(ranker, library)


class Drawn:
    """A case of the plain search with code vectors, stored embeddings, norms and densities."""

    def __init__(self, plain, seed: int, sizes: tuple[int, ...] | None = None) -> None:
        random = np.random.default_rng([seed, 2])
        self.sizes = sizes or plain.sizes_of(seed % plain.NUM_MODELS)
        rerank = str(random.choice(["codes", "embeddings"]))
        self.case = plain.draw_case(
            seed,
            self.sizes,
            scores="level",
            rerank=rerank,
            candidates=int(random.choice([0, 3, 10, 30, 1000])),
            shortlist=int(random.choice([0, 4])) if rerank == "embeddings" else 0,
            generator_weight=float(random.choice([0, 0.5])) if rerank == "codes" else 0.0,
            density_weight=float(random.choice([0, 0.5])),
        )
        # Small integers: sums are exact, and many are equal, so that the order of ties is compared too.
        draw = random.standard_normal if seed % 2 else lambda shape: random.integers(-2, 3, shape)
        self.tables = [torch.from_numpy(np.asarray(draw((size, 3)), np.float32)) for size in self.sizes]
        self.queries = torch.from_numpy(np.asarray(draw((len(self.case.queries), 3)), np.float32))
        self.parts = self.case.pool.parts
        if random.random() < 0.5:
            powers = 7 ** np.arange(len(self.sizes))
            costs = [(codes @ powers)[:, None] * [1, 3] % 256 for codes in self.case.pool.codes]
            self.parts = [
                Part(table, None if alive is None else Allowed.of(table, alive))
                for table, alive in (
                    (
                        IdTable.build(np.concatenate([codes, cost], axis=1), np.linspace(0, 1, len(codes))),
                        alive,
                    )
                    for codes, cost, alive in zip(
                        self.case.pool.codes, costs, self.case.pool.alive, strict=True
                    )
                )
            ]
        stored = [np.asarray(draw((len(codes), 3)), np.float32) for codes in self.case.pool.codes]
        self.evidence = Evidence(
            CodeRanker(self.tables), [lambda items, own=own: torch.from_numpy(own[items]) for own in stored]
        )
        self.wanted = [
            Wanted(
                self.case.width(query),
                int(random.integers(1, 30)),
                frozenset() if self.case.level0 is None else self.case.level0[query],
                self._restriction(self.case.masks[query]),
            )
            for query in range(len(self.queries))
        ]

    def _restriction(self, masks):
        if masks is None:
            return None
        return tuple(
            None if mask is None else Allowed.of(part.table, mask)
            for part, mask in zip(self.parts, masks, strict=True)
        )

    def find(self, fast=None):
        return find(
            GeometricDecoder(self.tables),
            fast,
            self.parts,
            self.queries,
            self.wanted,
            self.case.config,
            evidence=self.evidence,
            embeddings=list(self.queries),
        )


def assert_same(found, expected, note) -> None:
    for (one, decoded), (other, other_decoded) in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.scores, other.scores, rtol=1e-6, atol=1e-5, err_msg=note)
        np.testing.assert_array_equal(one.items, other.items, err_msg=note)
        np.testing.assert_array_equal(one.parts, other.parts, err_msg=note)
        np.testing.assert_array_equal(one.rows, other.rows, err_msg=note)
        np.testing.assert_array_equal(one.beams, other.beams, err_msg=note)
        np.testing.assert_allclose(decoded, other_decoded, rtol=1e-6, atol=1e-5, err_msg=note)
        assert one.touched == other.touched, note


def test_hits_are_those_of_the_general_search(plain, make):
    for seed in range(plain.POOLS):
        drawn = Drawn(plain, seed)
        fast = make(drawn.evidence.codes)
        assert fast.covers(drawn.parts, drawn.case.config)
        assert_same(drawn.find(fast), drawn.find(), str(seed))


def test_levels_of_many_codes_are_searched_alike(plain, make):
    for seed in range(plain.SOME_POOLS):
        drawn = Drawn(plain, seed, (3, 256, 200, 256, 256, 256, 256))  # more codes than the Gram matrix has
        assert_same(drawn.find(make(drawn.evidence.codes)), drawn.find(), str(seed))


def test_large_pools_are_searched_alike(make):
    random = np.random.default_rng(0)
    tables = [torch.from_numpy(random.integers(-9, 10, (64, 8)).astype(np.float32)) for _ in range(4)]
    codes = np.concatenate(
        [random.integers(0, 64, (20_000, 4)), random.integers(0, 256, (20_000, 2))], axis=1
    )
    parts = [Part(IdTable.build(own, np.zeros(len(own)))) for own in (codes[:15_000], codes[15_000:])]
    ranker = CodeRanker(tables)
    for number_of_parts in (1, 2):
        drawn = Drawn.__new__(Drawn)
        drawn.tables, drawn.parts, drawn.evidence = tables, parts[:number_of_parts], Evidence(ranker)
        drawn.queries = torch.from_numpy(random.integers(-9, 10, (20, 8)).astype(np.float32))
        drawn.wanted = [Wanted(width, 10) for width in (1, 5, 10, 50) * 5]
        drawn.case = type("Case", (), {"config": SearchConfig(rerank="codes", candidates=500)})
        assert_same(drawn.find(make(ranker)), drawn.find(), str(number_of_parts))


def test_damaged_tables_are_refused(compiled):
    random = np.random.default_rng(1)
    tables = [torch.from_numpy(random.standard_normal((size, 3)).astype(np.float32)) for size in (3, 8, 8)]
    fast = CompiledSearch(CodeRanker(tables), compiled)
    config = SearchConfig(rerank="codes", candidates=4)
    refused = 0
    for seed in range(200):
        random = np.random.default_rng(seed)
        codes = np.stack([random.integers(0, size, 60) for size in (3, 8, 8)], axis=1)
        table = IdTable.build(codes, np.zeros(60))
        name = ("ids", "starts", "bucket_starts", "items")[seed % 4]
        array = getattr(table, name).ravel()
        limit = 2**31 if name != "ids" else 128
        array[random.integers(0, array.size, 5)] = random.integers(-limit, limit, 5).astype(array.dtype)
        query = random.standard_normal((1, 3)).astype(np.float32)
        try:
            (found,) = fast.search([Part(table)], query, [Wanted(2, 30)], config)
        except LookupError:
            refused += 1
        else:
            assert set(found.ranking.rows.tolist()) <= set(range(len(table)))
            assert set(found.ranking.items.tolist()) <= set(range(60))
    assert refused > 50
