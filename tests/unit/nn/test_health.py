"""The health report names what is wrong with IDs."""

from __future__ import annotations

import numpy as np
import pytest

from genius_search.config import CodebookConfig
from genius_search.nn.codebooks import Codebooks
from genius_search.nn.coder import EncodedItems
from genius_search.training.quantizer import majority_modalities, measure_health


def look(codes, *, sizes=(3, 4, 8)):
    codes = np.array(codes)
    weights = {f"codebooks.{level}.embed": np.zeros((size, 1)) for level, size in enumerate(sizes)}
    weights["level0_modality"] = np.arange(3)
    codebooks = Codebooks(1, CodebookConfig(levels=len(sizes) - 1), weights)
    no_fine_codes = np.zeros((len(codes), 0), np.uint8)
    items = EncodedItems(
        np.zeros((len(codes), 1)), codes, np.full(len(codes), 0.9), codes, no_fine_codes
    )
    return measure_health(codebooks, items, codes[:, 0])


def all_ids():
    return [[m, a, b] for m in range(3) for a in range(4) for b in range(8)]


def test_ids_that_use_every_code_alike_are_healthy():
    health = look(all_ids())
    assert health.problems == ()
    assert health.collision_rate == 0
    assert health.purity == 1
    assert health.used == (3, 4, 8)


def test_collapsed_codebooks_are_named_with_their_level():
    codes = [[m, 2, b] for m in range(3) for b in range(8)]
    health = look(codes, sizes=(3, 32, 8))
    assert health.used[1] == 1
    assert any("level 1 uses 1 of 32 codes" in problem for problem in health.problems)
    assert not any("level 2" in problem or "level 0" in problem for problem in health.problems)


def test_collisions_are_counted_by_candidate_and_named():
    codes = [*all_ids(), [0, 0, 0], [0, 0, 0], [1, 1, 1], [2, 2, 2], [2, 3, 3]]
    health = look(codes)
    # The bucket of three and three buckets of two.
    assert health.collision_rate == pytest.approx((3 + 2 + 2 + 2) / 101)
    assert "8.9% of the candidates share their ID" in health.problems[0]


def test_the_majority_decides_what_a_code_stands_for_whatever_the_permutation():
    level0 = np.array([2, 2, 2, 0, 0, 1, 1])
    modalities = np.array([0, 0, 1, 1, 1, 2, 2])
    assert majority_modalities(level0, modalities).tolist() == [1, 2, 0]
    assert majority_modalities(np.array([1]), np.array([1])).tolist() == [-1, 1, -1]
