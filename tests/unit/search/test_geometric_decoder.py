"""The decoder by geometry follows the nearest code vectors."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genius_search.config import RANK_ALL, SearchConfig
from genius_search.search.beam import search
from genius_search.search.decoder import GeometricDecoder
from genius_search.search.rank import Beams
from genius_search.search.table import IdTable, SearchSegment

SIZES = (3, 5, 4)
DIM = 6


class Drawn:
    """Code vectors, the IDs of some items, and queries."""

    def __init__(
        self, seed: int = 0, sizes: tuple[int, ...] = SIZES, items: int = 30, queries: int = 4
    ) -> None:
        random = np.random.default_rng(seed)
        self.tables = [
            torch.from_numpy(random.standard_normal((size, DIM)).astype(np.float32)) for size in sizes
        ]
        self.codes = np.stack([random.integers(0, size, items) for size in sizes], axis=1)
        self.queries = torch.from_numpy(random.standard_normal((queries, DIM)).astype(np.float32))
        self.decoder = GeometricDecoder(self.tables)
        self.segment = part_of(self.codes)

    def vector(self, prefix: tuple[int, ...]) -> torch.Tensor:
        return sum(table[code] for table, code in zip(self.tables, prefix, strict=False))

    def nearness(self, query: int, prefix: tuple[int, ...]) -> float:
        """Minus half the squared distance, and half the query's norm, which makes nothing nearer."""
        asked = self.queries[query]
        return float((asked.square().sum() - (asked - self.vector(prefix)).square().sum()) / 2)


def part_of(codes: np.ndarray) -> SearchSegment:
    return SearchSegment(IdTable.build(codes, np.zeros(len(codes), dtype=np.float32)))


def found(segments: list[SearchSegment], beams: Beams, query: int) -> list[tuple[int, ...]]:
    """The IDs under the beams of a query, beam after beam."""
    rows = [
        (segment.table.ids[low:high].tolist(), beam)
        for beam in range(beams.low.shape[1])
        for segment, low, high in zip(segments, beams.low[query, beam], beams.high[query, beam], strict=True)
    ]
    ids = [tuple(row) for under, _ in rows for row in under]
    return list(dict.fromkeys(ids))


def test_a_code_gains_what_brings_the_prefix_nearer_to_the_query():
    drawn = Drawn()
    for query, prefix in itertools.product(range(4), itertools.product(range(3), range(5))):
        state = drawn.decoder.start(drawn.queries[query : query + 1])
        step = drawn.decoder.advance(state, torch.tensor([prefix]))
        for level in range(3):
            gains = drawn.decoder.log_probabilities(step.hidden[:, level], level, "level")[0]
            for code in range(SIZES[level]):
                before = prefix[:level]
                nearer = drawn.nearness(query, (*before, code))
                if before:
                    nearer -= drawn.nearness(query, before)
                assert float(gains[code]) == pytest.approx(nearer, abs=1e-4)


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple),
    items=st.integers(1, 40),
    cut=st.integers(0, 40),
    seed=st.integers(0, 10_000),
)
def test_a_beam_without_limit_orders_all_ids_by_their_distance(sizes, items, cut, seed):
    drawn = Drawn(seed, sizes, items)
    segments = [part_of(codes) for codes in (drawn.codes[:cut], drawn.codes[cut:])]
    everything = {tuple(row) for row in drawn.codes.tolist()}
    # Too narrow to be settled, so that level after level is decoded; then wide enough to be settled at once.
    for beam in (len(everything), 1000):
        beams = search(drawn.decoder, segments, drawn.queries, SearchConfig(beam=beam))
        for query in range(len(drawn.queries)):
            ids = found(segments, beams, query)
            scores = beams.scores()[query][beams.filled()[query]]
            assert set(ids) == everything
            expected = [drawn.nearness(query, id_) for id_ in ids]
            np.testing.assert_allclose(scores, expected, atol=1e-4)
            assert (np.diff(scores) <= 0).all()


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(2, 6), min_size=2, max_size=4).map(tuple),
    beam=st.integers(1, 12),
    seed=st.integers(0, 10_000),
    leaves=st.integers(0, 20),
)
def test_a_narrow_beam_keeps_the_nearest_continuations_of_what_it_kept(sizes, beam, seed, leaves):
    drawn = Drawn(seed, sizes, items=60)
    everything = {tuple(row) for row in drawn.codes.tolist()}
    beams = search(
        drawn.decoder,
        [drawn.segment],
        drawn.queries,
        SearchConfig(beam=beam, rerank="codes", candidates=leaves),
    )
    for query in range(len(drawn.queries)):
        kept: set[tuple[int, ...]] = {()}
        left = everything
        for level in range(len(sizes)):
            if len(left) <= max(beam, leaves if level else RANK_ALL * leaves):
                break
            longer = sorted(
                {id_[: level + 1] for id_ in left}, key=lambda prefix: -drawn.nearness(query, prefix)
            )
            leaves_under = Counter(id_[: level + 1] for id_ in left)
            paid = np.cumsum([leaves_under[prefix] for prefix in longer]) <= max(beam, leaves)
            kept = set(longer[: max(beam, int(paid.sum()))])
            left = {id_ for id_ in left if id_[: level + 1] in kept}
        assert set(found([drawn.segment], beams, query)) == left


def test_no_queries_and_no_items_find_nothing():
    drawn = Drawn()
    assert len(search(drawn.decoder, [drawn.segment], drawn.queries[:0], SearchConfig()).low) == 0
    empty = part_of(np.zeros((0, 3), dtype=np.int64))
    assert not search(drawn.decoder, [empty], drawn.queries, SearchConfig()).filled().any()
