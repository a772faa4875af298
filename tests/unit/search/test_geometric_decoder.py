"""The decoder by geometry follows the nearest code vectors."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from genius_search.config import SearchConfig
from genius_search.search.beam import search
from genius_search.search.decoder import GeometricDecoder
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


def test_no_queries_and_no_items_find_nothing():
    drawn = Drawn()
    assert len(search(drawn.decoder, [drawn.segment], drawn.queries[:0], SearchConfig()).low) == 0
    empty = part_of(np.zeros((0, 3), dtype=np.int64))
    assert not search(drawn.decoder, [empty], drawn.queries, SearchConfig()).filled().any()
