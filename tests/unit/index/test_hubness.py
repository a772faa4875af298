"""The weight of densities is raised only where that finds more by over a standard error."""

from __future__ import annotations

import numpy as np
import pytest

from genius_search.index.hubness import USUAL, WEIGHTS, Hubness


def found(shares: dict[float, float], queries: int = 1000):
    return {weight: np.arange(queries) < shares.get(weight, 0.5) * queries for weight in WEIGHTS}


@pytest.mark.parametrize(
    ("shares", "weight"),
    [({}, USUAL), ({0.3: 0.55, 0.2: 0.53}, 0.3), ({0.3: 0.5005}, USUAL), ({0.0: 0.6, 0.5: 0.2}, 0.0)],
)
def test_the_best_weight_is_chosen(shares, weight):
    chosen = Hubness.choose(found(shares), "captions")
    assert chosen.weight == weight
    assert chosen.queries == 1000
    assert chosen.recalls[f"{USUAL:g}"] == 0.5
