"""IDs by beam search, against a plain one and against all IDs there are."""

from __future__ import annotations

import itertools

import pytest
import torch

from genius_search.nn.quantizer import assign, nearest_sums, nearest_sums_plain


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
    monkeypatch.setattr("genius_search.nn.quantizer.ERRORS_AT_ONCE", 7 * 4 * 8)
    monkeypatch.setattr("genius_search.nn.quantizer.AT_ONCE", 7)
    assert torch.equal(nearest_sums(residuals, tables, beam=4), whole)
    assert torch.equal(nearest_sums_plain(residuals, tables, beam=4), whole)
    assert nearest_sums(residuals[:0], tables, beam=4).shape == (0, 3)


@pytest.mark.parametrize("beam", [1, 3, 8, 300])
@pytest.mark.parametrize("sizes", [(256,), (4, 256, 100, 17), (8,) * 20])
def test_the_library_finds_what_the_plain_search_finds(sizes: tuple[int, ...], beam: int) -> None:
    residuals, tables = drawn(beam, sizes, items=300, dim=24)
    plain, found = (search(residuals, tables, beam=beam) for search in (nearest_sums_plain, nearest_sums))
    assert (plain == found).all(dim=1).float().mean() > 0.99  # rounding may decide between two sums
    errors = squared_errors(residuals, tables, found)
    torch.testing.assert_close(errors, squared_errors(residuals, tables, plain), rtol=1e-3, atol=1e-4)


def test_training_in_bfloat16_encodes_in_full_precision() -> None:
    residuals, tables = drawn(4, (16, 16), items=200, dim=8)
    with torch.autocast("cpu", torch.bfloat16):
        found = nearest_sums(residuals, tables, beam=4)
    assert torch.equal(found, nearest_sums(residuals, tables, beam=4))
