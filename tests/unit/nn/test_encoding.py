"""IDs by beam search, against a plain one and against all IDs there are."""

from __future__ import annotations

import itertools

import pytest
import torch

from genius_search.nn import sums
from genius_search.nn.quantizer import assign
from genius_search.nn.sums import nearest_sums


def drawn(seed: int, sizes: tuple[int, ...], items: int, dim: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    random = torch.Generator().manual_seed(seed)
    tables = [torch.randn(size, dim, generator=random) * 0.6**level for level, size in enumerate(sizes)]
    return torch.randn(items, dim, generator=random), tables


def squared_errors(residuals: torch.Tensor, tables: list[torch.Tensor], codes: torch.Tensor) -> torch.Tensor:
    vectors = sum((table[codes[:, level]] for level, table in enumerate(tables)), torch.zeros(()))
    return (residuals - vectors).square().sum(dim=1)


@pytest.mark.parametrize("seed", range(5))
def test_a_beam_of_one_is_the_greedy_choice(seed: int) -> None:
    residuals, tables = drawn(seed, (7, 5, 6), items=40, dim=5)
    greedy = []
    left = residuals
    for table in tables:
        chosen = assign(left, table)
        greedy.append(chosen)
        left = left - table[chosen]
    assert torch.equal(nearest_sums(residuals, tables, beam=1), torch.stack(greedy, dim=1))


@pytest.mark.parametrize("seed", range(5))
def test_a_beam_as_wide_as_all_ids_finds_the_nearest_of_all(seed: int) -> None:
    residuals, tables = drawn(seed, (4, 3, 5), items=30, dim=4)
    every = torch.tensor(list(itertools.product(range(4), range(3), range(5))))
    errors = torch.stack([squared_errors(residuals, tables, id_.expand(30, -1)) for id_ in every], dim=1)
    found = nearest_sums(residuals, tables, beam=1000)
    torch.testing.assert_close(squared_errors(residuals, tables, found), errors.min(dim=1).values)


def test_items_are_encoded_alike_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    residuals, tables = drawn(3, (8, 8, 8), items=50, dim=8)
    whole = nearest_sums(residuals, tables, beam=4)
    monkeypatch.setattr("genius_search.nn.sums.DISTANCES_AT_ONCE", 7 * 4 * 8)
    assert torch.equal(nearest_sums(residuals, tables, beam=4), whole)


@pytest.mark.parametrize("seed", range(20))
def test_compiled_sums_are_as_near_as_plain_ones(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    library = sums.open_library()
    if library is None:
        pytest.skip("the library is not compiled")
    size, levels, beam = 1 << (2 + seed % 7), 1 + seed % 5, (2, 3, 8, 40)[seed % 4]
    residuals, tables = drawn(seed, (size,) * levels, items=150, dim=3 + seed % 7)
    monkeypatch.setattr(sums, "count_cores", lambda: 1 + seed % 3)
    monkeypatch.setattr(sums, "ITEMS_AT_ONCE", 64)
    monkeypatch.setattr(sums, "_find", None)
    found = nearest_sums(residuals, tables, beam=beam)
    monkeypatch.undo()
    monkeypatch.setattr(sums, "open_library", lambda: None)
    plain = nearest_sums(residuals, tables, beam=beam)
    assert (found == plain).all(dim=1).float().mean() > 0.95  # rounding decides between sums that are as near
    errors, plain_errors = (squared_errors(residuals, tables, codes).mean() for codes in (found, plain))
    torch.testing.assert_close(errors, plain_errors, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("size", [(6, 4), (300, 300)])
def test_other_codebooks_than_compiled_ones_are_searched_too(size: tuple[int, int], monkeypatch) -> None:
    residuals, tables = drawn(1, size, items=100, dim=6)
    monkeypatch.setattr(sums, "_find_compiled", None)
    found = nearest_sums(residuals, tables, beam=8)
    assert found.shape == (100, 2)
    assert all(found.amax(dim=0) < torch.tensor(size))
