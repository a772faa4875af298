"""faiss beside ours: as many bytes, and about as many candidates."""

from __future__ import annotations

import numpy as np
import pytest

from genius_search.lab.bench.faiss_index import FaissIndex
from genius_search.lab.bench.quality import FaissRival

RANDOM = np.random.default_rng(0)
VECTORS = RANDOM.standard_normal((1_000, 8)).astype(np.float32)
VECTORS /= np.linalg.norm(VECTORS, axis=1, keepdims=True)
QUERIES = VECTORS[:20]


@pytest.mark.parametrize(
    "factory", ["IVF20,PQ4x4fs", "IVF20,PQ4x6np", "IVF20,RQ4x4fs_32_Nrq2x4", "IVF20,RQ2x6_Nqint8"]
)
def test_candidates_are_counted_whatever_the_index(factory):
    index = FaissIndex(factory, VECTORS)
    assert index.search(QUERIES, 10, effort=20).compared == 20 * 1_000
    assert 0 < index.search(QUERIES, 10, effort=1).compared < 20 * 200
    assert all(len(items) == 10 for items in index.search(QUERIES, 10, effort=20).items)
    everything = index.search(QUERIES, 10, effort=50)  # more lists than there are
    assert [row.tolist() for row in everything.items] == [
        row.tolist() for row in index.search(QUERIES, 10, effort=20).items
    ]


@pytest.mark.parametrize("factory", ["Flat", "SQ8", "HNSW32", "IVF20,PQ4x8np,Refine(SQfp16)"])
def test_whole_vectors_find_themselves(factory):
    found = FaissIndex(factory, VECTORS).search(QUERIES, 10, effort=64)
    assert [row[0] for row in found.items] == list(range(20))


def test_codes_in_four_bits_find_as_much_as_codes_in_six():
    def share(factory: str) -> float:
        found = FaissIndex(factory, VECTORS, width=4).search(QUERIES, 10, effort=20)
        return float(np.mean([number in row for number, row in enumerate(found.items)]))

    assert share("IVF20,RQ4x4fs_32_Nrq2x4") > 0.9
    assert share("IVF20,RQ2x6_Nqint8") > 0.9


def test_bytes_are_those_of_an_item_and_those_that_do_not_grow():
    exact = FaissIndex("Flat", VECTORS)
    assert exact.item_bytes == 4 * 8
    assert exact.fixed_bytes < 100
    codes = FaissIndex("IVF20,PQ4x8np", VECTORS)
    assert 12 <= codes.item_bytes < 13  # a code, and the item's number
    assert codes.fixed_bytes > 4 * 8 * (20 + 256)


@pytest.mark.parametrize("wanted", [1, 130, 400, 5_000])
def test_as_many_lists_are_looked_through_as_hold_about_so_many_candidates(wanted):
    index = FaissIndex("IVF20,PQ4x4fs", VECTORS)
    rival = FaissRival("faiss", "IVF-PQ", index, 2.0, 10.0)
    chosen = rival.touching(QUERIES, float(wanted)).lists
    touched = {lists: index.search(QUERIES, 10, effort=lists).compared / 20 for lists in range(1, 21)}
    best = min(touched, key=lambda lists: abs(touched[lists] - wanted))
    assert touched[chosen] == touched[best]
