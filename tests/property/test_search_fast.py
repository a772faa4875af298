"""The compiled search finds what the general one finds, hit for hit."""

from __future__ import annotations

import dataclasses
import functools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from genius_search.config import PAPER_SEARCH
from genius_search.errors import ArtifactMismatch
from genius_search.native import build
from genius_search.nn.generator import Generator
from genius_search.nn.packed import pack
from genius_search.nn.spread import NUM_MODALITY_STATISTICS, Residuals, Spread
from genius_search.recipe import GeneratorConfig
from genius_search.search import kernel
from genius_search.search.beam import GeometricDecoder, GuidedDecoder
from genius_search.search.kernel import CompiledSearch, open_compiled_search, search_segments
from genius_search.search.rank import CodeRanker, Evidence, SearchQuery
from genius_search.search.table import Allowed, IdTable, SearchSegment
from genius_search.search.vectors import Quantized, StoredVectors, quantize, stored_width


@pytest.fixture(scope="session")
def compiled():
    """The library, compiled from this source."""
    build.main()
    return build.open_library(build.FOLDER) or pytest.skip("there is no C compiler")


@pytest.fixture
def make(compiled, monkeypatch):
    """Make the compiled search of a generator, if there is one, and a ranker."""
    monkeypatch.setattr(kernel, "open_library", lambda: compiled)
    return quick


def quick(network: Generator | None, ranker: CodeRanker) -> CompiledSearch | None:
    """Return the compiled search of a generator, or of code vectors alone."""
    if network is None:
        return open_compiled_search(ranker)
    weights = {name: weight.numpy() for name, weight in network.state_dict().items()}
    return open_compiled_search(
        ranker, pack(network.config, network.prefix_projection.in_features, network.sizes, weights)
    )


def draw_spread(random, sizes: tuple[int, ...]) -> Spread:
    """Return drawn spreads, with the modality at the first level or without."""
    level = int(random.integers(0, 2)) if len(sizes) > 1 and sizes[0] > 1 else 0
    rows = sizes[0] if level else 1
    return Spread(
        random.random((rows, sizes[level])), random.random((rows, NUM_MODALITY_STATISTICS)) + 0.1
    )


class Drawn:
    """A case of the plain search with code vectors, stored embeddings, norms and densities."""

    def __init__(
        self,
        plain,
        seed: int,
        sizes: tuple[int, ...] | None = None,
        generator: GeneratorConfig | None = None,
    ) -> None:
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
            density_weight=float(random.choice([0, 0.5])),
        )
        # Small integers: sums are exact, and many are equal, so that the order of ties is compared too.
        draw = random.standard_normal if seed % 2 else lambda shape: random.integers(-2, 3, shape)
        self.tables = [
            torch.from_numpy(np.asarray(draw((size, plain.DIM)), np.float32)) for size in self.sizes
        ]
        self.is_exact = seed % 2 == 0 and generator is None
        spread = draw_spread(random, self.sizes)
        if self.is_exact:  # queries are not scaled then, which would round their sums
            spread = Spread(np.ones((1, self.sizes[0])), np.zeros((1, NUM_MODALITY_STATISTICS)))
        norm_weight = float(random.choice([1, 0.5]))
        self.decoder, self.network = GeometricDecoder(self.tables, spread, norm_weight), None
        if generator is not None:
            self.network = network_of(generator, plain.DIM, self.tables, seed)
            self.decoder = self.network
            if self.network.guide is not None:
                self.decoder = GuidedDecoder(self.network, spread)
        self.queries = torch.from_numpy(
            np.asarray(draw((len(self.case.queries), plain.DIM)), np.float32)
        )
        self.segments = self.case.pool.segments
        if random.random() < 0.5:
            self.is_exact = False
            powers = 7 ** np.arange(len(self.sizes))
            costs = [(codes @ powers)[:, None] * [1, 3] % 256 for codes in self.case.pool.codes]
            self.segments = [
                SearchSegment(table, None if alive is None else Allowed.of(table, alive))
                for table, alive in (
                    (
                        IdTable.build(
                            np.concatenate([codes, cost], axis=1), np.linspace(0, 1, len(codes))
                        ),
                        alive,
                    )
                    for codes, cost, alive in zip(
                        self.case.pool.codes, costs, self.case.pool.alive, strict=True
                    )
                )
            ]
        stored = [
            np.asarray(draw((len(codes), plain.DIM)), np.float32) for codes in self.case.pool.codes
        ]
        self.evidence = Evidence(
            CodeRanker(self.tables, spread, norm_weight),
            [lambda items, own=own: torch.from_numpy(own[items]) for own in stored],
            densities=[random.integers(0, 256, len(own)).astype(np.uint8) for own in stored],
        )
        self.limits = [
            {
                "beam": self.case.width(query),
                "k": int(random.integers(1, 30)),
                "level0": frozenset() if self.case.level0 is None else self.case.level0[query],
                "restriction": self._restriction(self.case.masks[query]),
            }
            for query in range(len(self.queries))
        ]

    def _restriction(self, masks):
        if masks is None:
            return None
        return tuple(
            None if mask is None else Allowed.of(segment.table, mask)
            for segment, mask in zip(self.segments, masks, strict=True)
        )

    def find(self, fast=None):
        queries = [
            SearchQuery(vector, vector, **limits)
            for vector, limits in zip(self.queries.numpy(), self.limits, strict=True)
        ]
        return search_segments(
            lambda: self.decoder, fast, self.segments, queries, self.case.config, self.evidence
        )


def network_of(config: GeneratorConfig, dim: int, tables, seed: int) -> Generator:
    """A generator with drawn weights."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        generator = Generator(dim, tuple(map(len, tables)), config).eval()
        if generator.guide is not None:
            generator.guide.vectors.copy_(torch.cat(tables))
            for drawn in (generator.guide.log_scale, generator.guide.gate, generator.guide.bias):
                torch.nn.init.normal_(drawn)
    return generator


def assert_same(drawn: Drawn, found, expected, note: object) -> None:
    """The same hits in the same order; where products are rounded, hits of almost equal scores may change places."""
    error = 1e-5 if drawn.is_exact else 1e-3
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.scores, other.scores, rtol=1e-6, atol=error, err_msg=note)
        assert one.num_ranked == other.num_ranked, note
        if drawn.is_exact:
            for mine, theirs in zip((*one[:3], one.beams), (*other[:3], other.beams), strict=True):
                np.testing.assert_array_equal(mine, theirs, err_msg=note)
        mine, theirs = (
            {
                (segment, item): place
                for place, (segment, item) in enumerate(zip(*hits[:2], strict=True))
            }
            for hits in (one, other)
        )
        for hit in mine.keys() | theirs.keys():
            if hit in mine and hit in theirs:
                here, there = mine[hit], theirs[hit]
                assert one.id_rows[here] == other.id_rows[there], note
                np.testing.assert_allclose(
                    one.scores[here], other.scores[there], rtol=1e-6, atol=error
                )
                largest = np.nanmax(np.abs(other.log_probabilities[there]), initial=1)
                np.testing.assert_allclose(
                    one.log_probabilities[here],
                    other.log_probabilities[there],
                    rtol=1e-5,
                    atol=1e-5 + 1e-7 * largest,
                )
            else:
                score = one.scores[mine[hit]] if hit in mine else other.scores[theirs[hit]]
                assert abs(score - one.scores[-1]) < error, note


def test_hits_are_those_of_the_general_search(plain, make):
    for seed in range(plain.POOLS):
        drawn = Drawn(plain, seed)
        fast = make(drawn.network, drawn.evidence.codes)
        assert fast.supports(drawn.segments, drawn.case.config)
        assert_same(drawn, drawn.find(fast), drawn.find(), seed)


def test_levels_of_many_codes_are_searched_alike(plain, make):
    for seed in range(plain.SOME_POOLS):
        drawn = Drawn(
            plain, seed, (3, 256, 200, 256, 256, 256, 256)
        )  # more codes than the Gram matrix has
        assert_same(
            drawn, drawn.find(make(drawn.network, drawn.evidence.codes)), drawn.find(), seed
        )


def test_more_hits_than_there_are_items_take_no_memory(plain, make):
    drawn = Drawn(plain, 3)
    fast = make(drawn.network, drawn.evidence.codes)
    drawn.limits = [{**limits, "k": 10**9, "beam": 10**9} for limits in drawn.limits]
    assert_same(drawn, drawn.find(fast), drawn.find(), "all")


def test_a_query_without_direction_finds_as_many(plain, make):
    drawn = Drawn(plain, 101_804)
    drawn.queries = torch.zeros_like(drawn.queries)
    assert_same(drawn, drawn.find(make(drawn.network, drawn.evidence.codes)), drawn.find(), "zero")


def test_threads_search_at_the_same_time(plain, make):
    drawn = Drawn(plain, 3)
    fast = make(drawn.network, drawn.evidence.codes)
    expected = drawn.find()
    with ThreadPoolExecutor(4) as executor:
        for found in executor.map(lambda _: drawn.find(fast), range(24)):
            assert_same(drawn, found, expected, "threads")


def test_a_batch_is_searched_by_several_threads(plain, make, monkeypatch):
    drawn = Drawn(plain, 3)
    fast = make(drawn.network, drawn.evidence.codes)
    drawn.queries, drawn.limits = drawn.queries.repeat(30, 1), drawn.limits * 30
    expected = drawn.find(fast)
    monkeypatch.setattr(kernel, "MIN_QUERIES_PER_THREAD", 1)
    monkeypatch.setattr(kernel, "count_cores", lambda: 7)
    assert_same(drawn, drawn.find(fast), expected, "cores")
    assert_same(drawn, expected, drawn.find(), "general")


SMALL = GeneratorConfig(layers=1, width=8, feedforward=8, heads=2, head_width=4, prefixes=3)


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("guide", ["none", "geometry"])
@pytest.mark.parametrize("head", ["tied", "per-level"])
def test_a_generator_finds_the_same(plain, make, layers, guide, head):
    config = dataclasses.replace(SMALL, layers=layers, guide=guide, head=head)
    for seed in range(plain.SOME_POOLS // 3):
        drawn = Drawn(plain, seed, generator=config)
        fast = make(drawn.network, drawn.evidence.codes)
        assert fast.supports(drawn.segments, drawn.case.config)
        assert_same(drawn, drawn.find(fast), drawn.find(), seed)


@pytest.mark.parametrize(("layers", "prefixes"), [(1, 300), (3, 5)])
def test_a_generator_of_odd_widths_finds_the_same_in_fresh_memory(
    plain, make, layers, prefixes, monkeypatch
):
    config = GeneratorConfig(
        layers=layers,
        width=72,
        feedforward=100,
        heads=3,
        head_width=20,
        prefixes=prefixes,
        guide="geometry",
    )
    for seed in range(plain.SOME_POOLS // 3):
        monkeypatch.setattr(kernel, "_free_works", [])
        drawn = Drawn(plain, seed, (3, 100, 70, 9), config)
        assert_same(
            drawn, drawn.find(make(drawn.network, drawn.evidence.codes)), drawn.find(), seed
        )


def test_what_the_quick_search_does_not_know_is_left_to_the_general_one(plain):
    drawn = Drawn(plain, 1)
    ranker, config = drawn.evidence.codes, dataclasses.replace(drawn.case.config, rerank="codes")
    fast = quick(drawn.network, ranker)
    assert fast.supports(drawn.segments, config)
    assert not fast.supports(drawn.segments, dataclasses.replace(config, rerank="none"))
    wide = IdTable.build(np.array([[300]]), np.zeros(1))
    assert not fast.supports([*drawn.segments, SearchSegment(wide)], config)
    generated = quick(network_of(SMALL, plain.DIM, drawn.tables, 0), ranker)
    assert not generated.supports(drawn.segments, dataclasses.replace(config, scores="vocabulary"))
    others = CodeRanker([table + 1 for table in drawn.tables])
    guided = network_of(dataclasses.replace(SMALL, guide="geometry"), plain.DIM, drawn.tables, 0)
    assert quick(guided, ranker) is not None
    assert quick(guided, others) is None


def test_large_pools_are_searched_alike(make):
    random = np.random.default_rng(0)
    tables = [
        torch.from_numpy(random.integers(-9, 10, (64, 8)).astype(np.float32)) for _ in range(4)
    ]
    codes = np.concatenate(
        [random.integers(0, 64, (20_000, 4)), random.integers(0, 256, (20_000, 2))], axis=1
    )
    segments = [
        SearchSegment(IdTable.build(own, np.zeros(len(own))))
        for own in (codes[:15_000], codes[15_000:])
    ]
    ranker = CodeRanker(tables)
    for num_segments in (1, 2):
        drawn = Drawn.__new__(Drawn)
        drawn.decoder, drawn.network = GeometricDecoder(tables), None
        drawn.segments = segments[:num_segments]
        drawn.evidence, drawn.is_exact = Evidence(ranker), False
        drawn.queries = torch.from_numpy(random.integers(-9, 10, (16, 8)).astype(np.float32))
        drawn.limits = [{"beam": width, "k": 10} for width in (1, 5, 10, 50) * 4]
        drawn.case = type(
            "Case",
            (),
            {"config": dataclasses.replace(PAPER_SEARCH, rerank="codes", candidates=500)},
        )
        assert_same(drawn, drawn.find(make(drawn.network, ranker)), drawn.find(), num_segments)


def test_damaged_tables_are_refused(compiled):
    random = np.random.default_rng(1)
    tables = [
        torch.from_numpy(random.standard_normal((size, 3)).astype(np.float32)) for size in (3, 8, 8)
    ]
    fast = CompiledSearch(CodeRanker(tables), compiled)
    config = dataclasses.replace(PAPER_SEARCH, rerank="codes", candidates=4)
    refused = 0
    for seed in range(200):
        random = np.random.default_rng(seed)
        codes = np.stack([random.integers(0, size, 60) for size in (3, 8, 8)], axis=1)
        table = IdTable.build(codes, np.zeros(60))
        name = ("ids", "starts", "bucket_starts", "items")[seed % 4]
        array = getattr(table, name).ravel()
        limit = 2**31 if name != "ids" else 128
        array[random.integers(0, array.size, 5)] = random.integers(-limit, limit, 5).astype(
            array.dtype
        )
        query = random.standard_normal((1, 3)).astype(np.float32)
        try:
            encoded = SearchQuery(query[0], query[0], 30, beam=2)
            (found,) = fast.search([SearchSegment(table)], [encoded], config, Evidence())
        except (ArtifactMismatch, IndexError):  # NumPy finds starts that are out of range
            refused += 1
        else:
            assert set(found.id_rows.tolist()) <= set(range(len(table)))
            assert set(found.items.tolist()) <= set(range(60))
    assert refused > 50


@pytest.mark.parametrize(("shortlist", "density_weight"), [(0, 0.4), (20, 0.0), (400, 0.4)])
@pytest.mark.parametrize(
    ("bits", "dim"), [(1, 40), (1, 151), (2, 40), (4, 151), (8, 40), (8, 151), (16, 40), (16, 151)]
)
def test_stored_embeddings_are_compared_as_the_vectors_they_stand_for(
    make, shortlist, density_weight, bits, dim
):
    random = np.random.default_rng(shortlist)
    tables = [
        torch.from_numpy(random.standard_normal((size, dim)).astype(np.float32))
        for size in (3, 64, 64)
    ]
    codes = np.stack([random.integers(0, size, 5000) for size in (3, 64, 64)], axis=1)
    costs = random.integers(0, 256, (5000, 2))
    table = IdTable.build(
        np.concatenate([codes, costs * (codes[:, 1:2] % 2)], axis=1), np.zeros(5000)
    )
    segments = [
        SearchSegment(table),
        SearchSegment(table, Allowed.of(table, random.random(5000) < 0.5)),
    ]
    densities = [random.integers(0, 256, 5000).astype(np.uint8) for _ in segments]
    spread = draw_spread(random, (3, 64, 64))
    constant = np.linalg.qr(random.standard_normal((dim, 2)))[0].T.astype(np.float32)
    spread.residuals = Residuals(random.random((4, dim)).astype(np.float32), constant)
    ranker = CodeRanker(tables, spread, 0.5)
    fast = make(None, ranker)
    stored = [drawn_vectors(random, bits, (5000, dim), ranker, table) for _ in segments]
    queries = random.standard_normal((8, dim)).astype(np.float32)
    queries[3] = 0
    others = queries if bits < 16 else random.standard_normal((8, dim)).astype(np.float32)
    config = dataclasses.replace(
        PAPER_SEARCH,
        rerank="embeddings",
        candidates=900,
        shortlist=shortlist,
        density_weight=density_weight,
    )
    for is_raw, known in ((False, densities), (False, None), (True, densities)):
        evidence = Evidence(ranker, stored, is_raw, known)
        for k in (1, 100):
            encoded = [
                SearchQuery(fused, compared, k, beam=max(k, 10))
                for fused, compared in zip(queries, others, strict=True)
            ]
            expected = search_segments(
                lambda: GeometricDecoder(tables, spread, ranker.norm_weight),
                None,
                segments,
                encoded,
                config,
                evidence,
            )
            assert fast.supports(segments, config, stored)
            for own, other in zip(
                search_segments(lambda: None, fast, segments, encoded, config, evidence),
                expected,
                strict=True,
            ):
                error = 1e-4 if bits == 16 else 2e-1  # of scores up to 2,000
                np.testing.assert_allclose(own.scores, other.scores, rtol=1e-4, atol=error)
                same = set(zip(own.segments, own.items, strict=True)) & set(
                    zip(other.segments, other.items, strict=True)
                )
                assert len(same) > 0.97 * k - 1
                assert own.num_ranked == other.num_ranked


@pytest.fixture(params=[*build.VARIANTS, "none"])
def make_variant(request, compiled, monkeypatch):
    """Make the compiled search of one library; "none" leaves searching to PyTorch."""
    if request.param == "none":
        return lambda ranker: None
    monkeypatch.setattr(build, "VARIANTS", {request.param: build.VARIANTS[request.param]})
    opened = build.open_library.__wrapped__(build.FOLDER)
    if opened is None:
        pytest.skip("this processor has not what the library needs")
    monkeypatch.setattr(kernel, "open_library", lambda: opened)
    return open_compiled_search


def unit(vectors: np.ndarray) -> np.ndarray:
    return (vectors / np.linalg.norm(vectors, axis=1)[:, None]).astype(np.float32)


class NearQueries:
    """Unit vectors with densities that are as different as bytes allow, and queries among them.

    The first queries are items themselves, whose densities are the largest; the others are at
    growing distances from items, so that products are everywhere from 0 to 1.
    """

    ITEMS, ITSELF, OTHERS = 900, 10, 40

    def __init__(self, bits: int, dim: int) -> None:
        random = np.random.default_rng(bits)
        tables = [
            random.standard_normal((size, dim)).astype(np.float32) / 8 for size in (2, 40, 40)
        ]
        codes = np.stack([random.integers(0, size, self.ITEMS) for size in (2, 40, 40)], axis=1)
        sums = sum(table[codes[:, level]] for level, table in enumerate(tables))
        items = unit(sums + 0.1 * random.standard_normal(sums.shape) / dim**0.5)
        self.densities = random.integers(0, 256, self.ITEMS).astype(np.uint8)
        self.densities[: self.ITSELF] = 255
        self.table = IdTable.build(codes, np.zeros(self.ITEMS))
        self.ranker = CodeRanker(tables, Spread(np.ones((1, 2)), np.array([[0.1, 0, 0]])), 0.5)
        numbers = items if bits == 16 else items - sums
        self.stored = StoredVectors(quantize(numbers, bits), bits, self.ranker, self.table)
        self.vectors = np.asarray(self.stored(np.arange(self.ITEMS)), dtype=np.float64)
        near = items[: self.ITSELF + self.OTHERS].copy()
        noise = np.linspace(0, 1.5, self.OTHERS)[:, None]
        near[self.ITSELF :] += noise * unit(random.standard_normal((self.OTHERS, dim)))
        self.queries = unit(near)

    def find(self, fast, density_weight: float, shortlist: int = 0):
        config = dataclasses.replace(
            PAPER_SEARCH,
            rerank="embeddings",
            candidates=self.ITEMS,
            shortlist=shortlist,
            density_weight=density_weight,
        )
        queries = [SearchQuery(query, query, self.ITEMS, beam=self.ITEMS) for query in self.queries]
        return search_segments(
            lambda: GeometricDecoder(
                [torch.from_numpy(table) for table in self.ranker.tables()],
                self.ranker.spread,
                self.ranker.norm_weight,
            ),
            fast,
            [SearchSegment(self.table)],
            queries,
            config,
            Evidence(self.ranker, [self.stored], densities=[self.densities]),
        )

    def scale(self, query: np.ndarray) -> float:
        """Return .1, which is an item's spread of products, divided by that of a query."""
        products = np.array([float(vector @ query) for vector in self.ranker.tables()[0]])
        return 0.1 / products.std()


@pytest.fixture(scope="module")
def score_plainly(plain):
    """A function that returns the plain scores of all items of a case for each of its queries."""

    @functools.cache
    def score(bits: int, dim: int, weight: float) -> np.ndarray:
        case = NearQueries(bits, dim)
        return np.array(
            [
                [
                    plain.plain_score(query, item, int(density), weight=weight, scale=scale)
                    for item, density in zip(case.vectors, case.densities, strict=True)
                ]
                for query, scale in zip(case.queries, map(case.scale, case.queries), strict=True)
            ]
        )

    return score


@pytest.mark.parametrize(
    ("bits", "dim", "error"),
    [
        (16, 40, 1e-5),
        (4, 100, 1e-3),
        *(
            pytest.param(*sizes, marks=pytest.mark.slow)
            for sizes in [(16, 100, 1e-5), (8, 40, 1e-3), (1, 40, 1e-3)]
        ),
    ],
)
@pytest.mark.parametrize("shortlist", [0, pytest.param(10**6, marks=pytest.mark.slow)])
def test_densities_fade_near_a_query_whatever_searches(
    score_plainly, make_variant, bits, dim, error, shortlist
):
    case, weight = NearQueries(bits, dim), 0.3
    fast = make_variant(case.ranker)
    rankings = case.find(fast, weight, shortlist)
    near = 0
    scores = score_plainly(bits, dim, weight)
    for query, expected, found in zip(case.queries, scores, rankings, strict=True):
        assert sorted(found.items.tolist()) == list(range(case.ITEMS))
        scale = case.scale(query)
        # A density costs at most .3 × .16 / scale, 1.2 % of it more if a product errs by 1e-3.
        np.testing.assert_allclose(
            found.scores, expected[found.items], atol=error * (1 + 1 / scale)
        )
        assert (np.diff(found.scores) <= 0).all()
        products = case.vectors @ query
        near += int(((products > 0.75) & (products < 1)).sum())
    assert near > 40


@pytest.mark.parametrize("bits", [16, 8])
def test_an_items_own_vector_finds_it_first_although_its_density_is_the_largest(make_variant, bits):
    case = NearQueries(bits, 40)
    for item, found in enumerate(case.find(make_variant(case.ranker), 0.5)[: case.ITSELF]):
        assert found.items[0] == item
        assert found.scores[0] == pytest.approx(1, abs=5e-3)


def drawn_vectors(random, bits, shape, ranker=None, table=None) -> StoredVectors:
    if bits == 16:
        values = random.standard_normal(shape) * 10.0 ** random.integers(
            -7, 2, shape
        )  # subnormal ones too
        return StoredVectors(Quantized(values.astype(np.float16), None), 16, ranker, table)
    scales = random.random(shape[0]).astype(np.float16)
    packed = random.integers(0, 256, (shape[0], stored_width(shape[1], bits))).astype(np.uint8)
    return StoredVectors(Quantized(packed, scales), bits, ranker, table)


def test_stored_embeddings_of_other_widths_and_counts_are_refused(compiled):
    random = np.random.default_rng(0)
    table = IdTable.build(np.zeros((9, 1), dtype=np.int64), np.zeros(9))
    fast = CompiledSearch(CodeRanker([torch.zeros(1, 8)]), compiled)
    config, query = (
        dataclasses.replace(PAPER_SEARCH, rerank="embeddings"),
        np.zeros((1, 8), dtype=np.float32),
    )

    def search(bits: int, shape: tuple[int, int]) -> None:
        stored = [drawn_vectors(random, bits, shape)]
        segments, given = [SearchSegment(table)], Evidence(embeddings=stored)
        assert fast.supports(segments, config, stored)
        encoded = SearchQuery(query[0], query[0], 3, beam=3)
        fast.search(segments, [encoded], config, given)

    for bits in (1, 2, 4, 8, 16):
        search(bits, (9, 8))
        for shape in ((8, 8), (9, 24)):
            with pytest.raises(ArtifactMismatch, match="do not exist"):
                search(bits, shape)
