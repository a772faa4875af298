"""Equal leaves: what is compared is which leaves a router chooses, never how many."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from genius_search.lab.bench.quality import Prefixes, cut_to_budget
from genius_search.search.beams import Beams
from genius_search.search.decoder import GeometricDecoder
from genius_search.search.table import IdTable

SIZES = (2, 5, 4, 3)


def drawn(seed: int, items: int) -> tuple[IdTable, list[torch.Tensor], torch.Tensor]:
    """A pool, code vectors, and queries."""
    random = np.random.default_rng(seed)
    codes = np.stack([random.integers(size, size=items) for size in SIZES], axis=1).astype(np.int16)
    torch.manual_seed(seed)
    tables = [torch.randn(size, 6) * 0.7**level for level, size in enumerate(SIZES)]
    return IdTable.build(codes, np.zeros(items, dtype=np.float16)), tables, torch.randn(3, 6)


@given(st.integers(0, 10_000), st.integers(1, 60), st.integers(1, 3), st.integers(1, 80))
def test_leaves_are_those_of_the_nearest_prefixes_and_exactly_as_many(seed, items, levels, budget):
    table, tables, queries = drawn(seed, items)
    beams = cut_to_budget(Prefixes(table, levels).best(GeometricDecoder(tables), queries, 100), budget)
    for number, query in enumerate(queries):
        taken = [
            row
            for low, high in zip(beams.low[number, :, 0], beams.high[number, :, 0], strict=True)
            for row in range(low, high)
        ]
        assert len(taken) == len(set(taken)) == min(budget, len(table))
        centres = sum(tables[level][table.ids[:, level].astype(np.int64)] for level in range(levels))
        distance = (query - centres).square().sum(dim=1).numpy()
        left = np.setdiff1d(np.arange(len(table)), taken)
        assert not len(left) or distance[taken].max() <= distance[left].min() + 1e-4


def test_the_last_prefix_is_cut_where_the_budget_ends():
    low = np.array([[[4], [0], [7]]])
    high = np.array([[[7], [4], [9]]])
    beams = Beams(low, high, np.zeros((1, 3, 2), dtype=np.float32))
    cut = cut_to_budget(beams, 5)
    assert (cut.high - cut.low)[0, :, 0].tolist() == [3, 2, 0]
    assert cut.filled().tolist() == [[True, True, False]]
    assert np.isneginf(cut.log_probabilities[0, 2]).all()
