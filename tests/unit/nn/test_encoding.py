"""IDs by beam search, against a plain one and against all IDs there are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from genius_search.nn.codebooks import sum_codes
from genius_search.nn.coder import NearestSums
from genius_search.nn.kmeans import assign


def draw_codebooks(
    seed: int, sizes: tuple[int, ...], items: int, dim: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    random = np.random.default_rng(seed)
    tables = [
        random.standard_normal((size, dim), dtype=np.float32) * np.float32(0.6**level)
        for level, size in enumerate(sizes)
    ]
    return random.standard_normal((items, dim), dtype=np.float32), tables


def squared_errors(
    residuals: np.ndarray, tables: list[np.ndarray], codes: np.ndarray
) -> np.ndarray:
    return np.square(residuals - sum_codes(tables, codes)).sum(axis=1)


@pytest.fixture(params=[True, False], ids=["compiled", "numpy"], autouse=True)
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr("genius_search.nn.coder.open_library", lambda: None)


@pytest.mark.parametrize("seed", range(5))
def test_a_beam_of_one_is_the_greedy_choice(seed: int) -> None:
    residuals, tables = draw_codebooks(seed, (7, 5, 6), items=40, dim=5)
    greedy = []
    left = residuals
    for table in tables:
        greedy.append(assign(left, table))
        left = left - table[greedy[-1]]
    assert np.array_equal(NearestSums(tables, beam=1)(residuals), np.stack(greedy, axis=1))


@pytest.mark.parametrize("seed", range(5))
def test_a_beam_as_wide_as_all_ids_finds_the_nearest_of_all(seed: int) -> None:
    residuals, tables = draw_codebooks(seed, (4, 3, 5), items=30, dim=4)
    every = np.array(list(itertools.product(range(4), range(3), range(5))))
    errors = np.stack(
        [squared_errors(residuals, tables, np.tile(one, (30, 1))) for one in every], axis=1
    )
    found = NearestSums(tables, beam=1000)(residuals)
    np.testing.assert_allclose(
        squared_errors(residuals, tables, found), errors.min(axis=1), rtol=1e-4
    )


def test_items_are_encoded_alike_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    residuals, tables = draw_codebooks(3, (8, 8, 8), items=50, dim=8)
    encode = NearestSums(tables, beam=4)
    whole = encode(residuals)
    monkeypatch.setattr("genius_search.nn.coder.ERRORS_PER_BLOCK", 7 * 4 * 8)
    monkeypatch.setattr("genius_search.nn.coder.VECTORS_PER_BLOCK", 7)
    assert np.array_equal(encode(residuals), whole)
    assert np.array_equal(encode.in_numpy(residuals), whole)
    assert encode(residuals[:0]).shape == (0, 3)


@pytest.mark.parametrize("beam", [1, 3, 8, 300])
@pytest.mark.parametrize("sizes", [(256,), (4, 256, 100, 17), (8,) * 20])
def test_the_library_finds_what_the_plain_search_finds(sizes: tuple[int, ...], beam: int) -> None:
    residuals, tables = draw_codebooks(beam, sizes, items=300, dim=24)
    encode = NearestSums(tables, beam=beam)
    plain, found = encode.in_numpy(residuals), encode(residuals)
    assert (plain == found).all(axis=1).mean() > 0.99  # rounding may decide between two sums
    errors = squared_errors(residuals, tables, found)
    np.testing.assert_allclose(
        errors, squared_errors(residuals, tables, plain), rtol=1e-3, atol=1e-4
    )
