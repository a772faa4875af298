"""The health report names what is wrong with IDs."""

from __future__ import annotations

import numpy as np
import pytest

from genius_search.training.codebooks import examine, majority_modality


def look(codes, modalities=None, reconstruction=None, *, sizes=(3, 4, 8), modality_level=True):
    codes = np.array(codes)
    if modalities is None:
        modalities = codes[:, 0]
    if reconstruction is None:
        reconstruction = np.full(len(codes), 0.9)
    return examine(
        codes, np.array(modalities), reconstruction, sizes=sizes, has_modality_level=modality_level
    )


def all_ids():
    return [[m, a, b] for m in range(3) for a in range(4) for b in range(8)]


def test_ids_that_use_every_code_alike_are_healthy():
    health = look(all_ids())
    assert health.verdict == "healthy"
    assert health.problems == ()
    assert health.candidates == 96
    assert health.collision_rate == 0
    assert health.purity == 1
    assert health.level0_modality == ("image", "text", "image-text")
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
    assert "8.9% of the candidates share their ID" in health.verdict


def test_the_majority_decides_what_a_code_stands_for_whatever_the_permutation():
    level0 = np.array([2, 2, 2, 0, 0, 1, 1])
    modalities = np.array([0, 0, 1, 1, 1, 2, 2])
    assert majority_modality(level0, modalities).tolist() == [1, 2, 0]
    assert majority_modality(np.array([1]), np.array([1])).tolist() == [-1, 1, -1]
