"""Vectors of many kinds, not only of texts and pictures: the default search keeps the nearest ten."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from genius_search.index.index import Index

NEIGHBOURS = 10
NUM_QUERIES = 20
MIN_KEPT = 0.9
MIN_KEPT_UNCORRECTED = 0.97
CHANCE = 0.04
"""Twenty queries have a standard error of a point or two."""

Draw = Callable[[np.random.Generator, int, int], np.ndarray]


def draw_clusters(random: np.random.Generator, items: int, dim: int) -> np.ndarray:
    centres = random.standard_normal((max(1, items // 50), dim))
    return centres[random.integers(0, len(centres), items)] + 0.1 * random.standard_normal(
        (items, dim)
    )


def draw_rank_one(random: np.random.Generator, items: int, dim: int) -> np.ndarray:
    line = random.standard_normal((items, 1)) * random.standard_normal((1, dim))
    return line + 0.01 * random.standard_normal((items, dim))


def draw_two_regions(random: np.random.Generator, items: int, dim: int) -> np.ndarray:
    vectors = random.standard_normal((items, dim))
    vectors[: items // 2, 0] += 20
    return vectors


def draw_decaying(random: np.random.Generator, items: int, dim: int) -> np.ndarray:
    return random.standard_normal((items, dim)) / np.arange(1, dim + 1)


def draw_low_rank(random: np.random.Generator, items: int, dim: int) -> np.ndarray:
    rank = max(1, dim // 16)
    return random.standard_normal((items, rank)) @ random.standard_normal((rank, dim))


KINDS: dict[str, Draw] = {
    "normal": lambda random, items, dim: random.standard_normal((items, dim)),
    "common offset": lambda random, items, dim: random.standard_normal((items, dim)) + 5,
    "clusters": draw_clusters,
    "uniform": lambda random, items, dim: random.random((items, dim)) + 1e-3,
    "binary": lambda random, items, dim: (random.random((items, dim)) < 0.3) + 1e-3,
    "one-hot": lambda random, items, dim: np.eye(dim)[random.integers(0, dim, items)],
    "rank one": draw_rank_one,
    "all equal": lambda random, items, dim: np.ones((items, dim)),
    "copies": lambda random, items, dim: random.standard_normal((items, dim))[
        np.arange(items) // 50
    ],
    "norms of many sizes": lambda random, items, dim: (
        random.standard_normal((items, dim)) * 10 ** random.uniform(-3, 3, (items, 1))
    ),
    "heavy tails": lambda random, items, dim: random.standard_cauchy((items, dim)),
    "low rank": draw_low_rank,
    "two regions": draw_two_regions,
    "decaying spectrum": draw_decaying,
}

HARD_KINDS = {"norms of many sizes", "low rank", "two regions"}
"""The other kinds are slow tests."""


def scale(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def check_kind(folder, kind: str, items: int, dim: int, seed: int) -> None:
    """Assert that an index of such vectors keeps the nearest ten, and finds items by their vectors."""
    random = np.random.default_rng(seed)
    vectors = KINDS[kind](random, items, dim).astype(np.float32)
    units = scale(vectors.astype(np.float64))
    index = Index.from_vectors(folder / f"{kind}-{items}-{dim}-{seed}.index", vectors)
    rows = random.integers(0, items, NUM_QUERIES)
    noise = 0.3 * random.standard_normal((NUM_QUERIES, dim)) / dim**0.5
    queries = scale(units[rows] + noise).astype(np.float32)
    products = queries @ units.T
    wanted = min(NEIGHBOURS, items)
    least = -np.partition(-products, wanted - 1, axis=1)[:, wanted - 1] - 1e-5

    def share_of_nearest(**changes: float) -> float:
        config = replace(index.settings, **changes)
        hits = index.search_vectors(queries, k=NEIGHBOURS, config=config)
        assert all(len(found) == wanted for found in hits)
        found_rows = [[int(hit.id) for hit in found] for found in hits]
        return float(
            np.mean([products[n, found] >= least[n] for n, found in enumerate(found_rows)])
        )

    assert share_of_nearest() >= MIN_KEPT - CHANCE
    assert share_of_nearest(density_weight=0.0) >= MIN_KEPT_UNCORRECTED - CHANCE
    firsts = index.search_vectors(units[rows].astype(np.float32), k=1)
    cosines = [units[int(hit.id)] @ units[row] for (hit,), row in zip(firsts, rows, strict=True)]
    assert min(cosines) > 1 - 1e-5


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind in HARD_KINDS else [pytest.mark.slow]) for kind in KINDS],
)
def test_the_default_keeps_the_nearest_ten_of_any_kind_of_vectors(kind, tmp_path):
    check_kind(tmp_path, kind, items=1500, dim=48, seed=1)


@settings(max_examples=10)
@given(
    kind=st.sampled_from([*KINDS]),
    items=st.sampled_from([1, 2, 9, 60, 700]),
    dim=st.sampled_from([1, 2, 3, 5, 17, 130]),
    seed=st.integers(0, 99),
)
def test_the_default_keeps_the_nearest_ten_of_any_number_of_items_and_numbers(
    tmp_path_factory, kind, items, dim, seed
):
    check_kind(tmp_path_factory.mktemp("kinds"), kind, items, dim, seed)


@pytest.mark.slow
@pytest.mark.parametrize(("items", "dim"), [(100_000, 32), (20_000, 1024), (2_000, 4096)])
@pytest.mark.parametrize("kind", ["normal", "common offset", "clusters", "two regions"])
def test_codes_step_back_where_they_say_little(kind, items, dim, tmp_path):
    check_kind(tmp_path, kind, items, dim, seed=2)
