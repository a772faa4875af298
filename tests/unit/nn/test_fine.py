"""Fine codes: the library and NumPy find the same ones, and each is the nearest."""

from __future__ import annotations

import numpy as np
import pytest

from genius_search.native.build import open_library
from genius_search.nn import fine
from genius_search.nn.codebooks import normalize
from genius_search.nn.fine import fit_fine_codes, relative_half_norms

NORM_WEIGHT = 0.5


def draw(dim: int, items: int = 2_500) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors, and the vectors of their cells."""
    random = np.random.default_rng(dim)
    embeddings = normalize(random.standard_normal((items, dim)).astype(np.float32))
    noise = random.standard_normal((items, dim)).astype(np.float32)
    return embeddings, embeddings * np.float32(0.6) + noise * np.float32(0.2 / np.sqrt(dim))


@pytest.mark.parametrize(("dim", "num_codes"), [(16, 8), (20, 24), (37, 16), (256, 40)])
def test_the_library_and_numpy_find_the_same_fine_codes(dim, num_codes, monkeypatch):
    if open_library() is None:
        pytest.skip("needs the compiled library")
    embeddings, cells = draw(dim)
    codes = fit_fine_codes(embeddings, cells, num_codes, NORM_WEIGHT)
    encoded = codes.encode(embeddings, cells, NORM_WEIGHT)
    sums = codes.sum(encoded)
    monkeypatch.setattr(fine, "open_library", lambda: None)
    plain = codes.encode(embeddings, cells, NORM_WEIGHT)
    assert (encoded != plain).mean() < 1e-4  # products are rounded differently
    np.testing.assert_array_equal(sums, codes.sum(encoded))


def test_each_fine_code_is_that_of_the_nearest_vector():
    embeddings, cells = draw(24, items=300)
    codes = fit_fine_codes(embeddings, cells, 8, NORM_WEIGHT)
    encoded = codes.encode(embeddings, cells, NORM_WEIGHT)
    low = 0
    for number, high in enumerate(codes.ends.tolist()):
        part = (embeddings - cells)[:, low:high]
        distances = np.square(part[:, None] - codes.vectors[low:high].T).sum(axis=2)
        nearest = distances[np.arange(300), encoded[:, number]]
        np.testing.assert_allclose(nearest, distances.min(axis=1), atol=1e-6)
        low = high
    half_norms = relative_half_norms(cells, codes.sum(encoded), NORM_WEIGHT)
    errors = np.abs(half_norms[:, None] - codes.half_norms)
    np.testing.assert_allclose(
        errors[np.arange(300), encoded[:, -1]], errors.min(axis=1), atol=1e-6
    )
    squares = np.square(cells + codes.sum(encoded)).sum(axis=1) - np.square(cells).sum(axis=1)
    np.testing.assert_allclose(half_norms, NORM_WEIGHT / 2 * squares, atol=1e-5)
