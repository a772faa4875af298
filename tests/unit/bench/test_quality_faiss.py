"""faiss beside ours: as many bytes, and about as many candidates."""

from __future__ import annotations

import numpy as np
import pytest

from genius_search.lab.baselines.dense import IvfPq, Residual, build
from genius_search.lab.bench.quality import Rival, answered

RANDOM = np.random.default_rng(0)
VECTORS = RANDOM.standard_normal((1_000, 8)).astype(np.float32)
QUERIES = RANDOM.standard_normal((20, 8)).astype(np.float32)


@pytest.mark.parametrize(
    "kind",
    [
        IvfPq(lists=20, parts=4, bits=4),
        IvfPq(lists=20, parts=4, bits=6),
        Residual(codebooks=4, bits=4, lists=20),
        Residual(codebooks=2, bits=6, lists=20),
    ],
)
def test_candidates_are_counted_whatever_the_index(kind):
    index = build(VECTORS, kind)
    assert answered(index, QUERIES, 20).touched == 20 * 1_000
    assert 0 < answered(index, QUERIES, 1).touched < 20 * 200
    assert all(len(items) == 10 for items in answered(index, QUERIES, 20).items)


@pytest.mark.parametrize("wanted", [1, 130, 400, 5_000])
def test_as_many_lists_are_looked_through_as_hold_about_so_many_candidates(wanted):
    index = build(VECTORS, IvfPq(lists=20, parts=4, bits=4))
    rival = Rival("faiss", "IVF-PQ", index, 20, 2.0, 10.0, 0.0)
    chosen = rival.touching(QUERIES, float(wanted)).lists
    touched = {lists: answered(index, QUERIES, lists).touched / 20 for lists in range(1, 21)}
    best = min(touched, key=lambda lists: abs(touched[lists] - wanted))
    assert touched[chosen] == touched[best]
