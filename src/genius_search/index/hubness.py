"""The weight of densities in an index, measured with queries whose answers are known.

The default is a weight that costs nothing beyond one standard error on any of our four kinds of data. Where
more of it finds more, as among captions, queries with known answers show that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Bool
from pydantic import ConfigDict

from genius_search.config import SearchConfig

USUAL: Final = SearchConfig.density_weight
WEIGHTS: Final = (0.0, USUAL, 0.2, 0.3, 0.5)
"""Weights that are compared."""
FIRST: Final = 5
"""Hits of a query that are looked at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hubness:
    """The weight of densities in an index, and the measurements that it was chosen by."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    weight: float
    recalls: dict[str, float]
    """Recall at 5 of the queries, by weight."""
    queries: int
    data: str
    """The queries."""

    @staticmethod
    def choose(is_found: Mapping[float, Bool[np.ndarray, " queries"]], data: str) -> Hubness:
        """Choose a weight: the default, unless another finds more by over a standard error of the difference.

        Parameters
        ----------
        is_found
            whether the first :data:`FIRST` hits of each query have a right answer, by weight; the same
            queries for each of :data:`WEIGHTS`.
        """
        usual = is_found[USUAL].astype(float)
        best, most = USUAL, 0.0
        for weight, found in is_found.items():
            gains = found - usual
            gain, error = float(gains.mean()), float(gains.std(ddof=1) / np.sqrt(len(gains)))
            if gain > max(most, error):
                best, most = weight, gain
        recalls = {f"{weight:g}": float(found.mean()) for weight, found in is_found.items()}
        return Hubness(weight=best, recalls=recalls, queries=len(usual), data=data)
