"""Routing by geometry alone: the first codes whose vectors are nearest to the query, without a generator.

The simplest rival of the generator, which sees everything that this sees and so has to do better.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from genius_search.errors import UsageError
from genius_search.search.beam import Beams, topk
from genius_search.search.table import Part


class CodeRouter:
    """Finds the prefixes (modality code if there is one, first semantic code) nearest to a query.

    The distance is Euclidean, to the sum of a prefix's code vectors, as when the quantizer chose the codes.
    The items under the prefixes are ranked as those under beams are (``search/rank.py``).

    Parameters
    ----------
    parts
        tables to search; prefixes that are in none are never taken.
    tables
        code vectors of each level.
    has_modality_level
        whether the first code stands for the modality.
    """

    def __init__(
        self, parts: Sequence[Part], tables: list[Float[Tensor, "_ dim"]], *, has_modality_level: bool
    ) -> None:
        self._depth = 2 if has_modality_level else 1
        if len(tables) < self._depth:
            raise UsageError(f"an ID of {len(tables)} codes has no semantic level to route by")
        self._num_levels = len(tables)
        found = [_prefixes(part, self._depth) for part in parts]
        codes = np.unique(np.concatenate([prefixes for prefixes, _ in found]), axis=0)
        self._bounds = np.zeros((len(codes), len(parts), 2), dtype=np.int64)
        place = {tuple(row): number for number, row in enumerate(codes.tolist())}
        for part, (prefixes, bounds) in enumerate(found):
            self._bounds[[place[tuple(row)] for row in prefixes.tolist()], part] = bounds
        used = [table.detach().cpu().float() for table in tables[: self._depth]]
        self._vectors = torch.cat(used)
        self._rows = codes + np.cumsum([0, *map(len, used)])[:-1]
        centres = self._vectors[torch.from_numpy(self._rows)].sum(dim=1)
        self._half_norms = (centres.square().sum(dim=1) / 2).numpy()

    @torch.no_grad()
    def route(
        self,
        queries: Float[Tensor, "queries dim"],
        *,
        beam: int,
        level0: Sequence[frozenset[int]] | None = None,
    ) -> Beams:
        """Return the ``beam`` nearest prefixes of each query, as beams that were decoded that far.

        Minus half the squared distance takes the place of the log-probability of the first semantic level.

        Parameters
        ----------
        level0
            for each query the first codes it may begin with (a wanted modality); empty means any.
        """
        queries = queries.detach().cpu().float()
        products = (queries @ self._vectors.T).numpy()  # of codes, of which there are fewer than prefixes
        nearness = -self._half_norms - queries.square().sum(dim=1, keepdim=True).numpy() / 2
        for rows in self._rows.T:
            nearness += products[:, rows]
        if level0 is not None and any(level0):
            nearness = np.where(self._allowed(level0), nearness, np.float32(-np.inf))
        width = max(1, min(beam, nearness.shape[1]))
        bounds = np.zeros((len(nearness), width, *self._bounds.shape[1:]), dtype=np.int64)
        history = np.full((len(nearness), width, self._num_levels), -np.inf, dtype=np.float32)
        for query, values in enumerate(nearness):
            possible = np.flatnonzero(np.isfinite(values))
            best = possible[topk(values[possible], beam)]
            bounds[query, : len(best)] = self._bounds[best]
            history[query, : len(best)] = np.nan
            history[query, : len(best), : self._depth] = 0
            history[query, : len(best), self._depth - 1] = values[best]
        return Beams(bounds[..., 0], bounds[..., 1], history)

    def _allowed(self, level0: Sequence[frozenset[int]]) -> Bool[np.ndarray, "queries prefixes"]:
        first = self._rows[:, 0]  # the first level's codes are the first rows
        size = int(first.max(initial=0)) + 1
        mask = np.array([[not codes or code in codes for code in range(size)] for codes in level0])
        allowed: np.ndarray = mask[:, first]
        return allowed


def _prefixes(part: Part, depth: int) -> tuple[np.ndarray, np.ndarray]:
    """Return all prefixes of this many codes in a table, and their ranges of rows."""
    codes = np.zeros((1, 0), dtype=np.int64)
    low, high = np.zeros(1, dtype=np.int64), np.array([len(part.table)], dtype=np.int64)
    for level in range(depth):
        children = part.table.children(level, low, high)
        codes = np.concatenate([codes[children.parent], children.code[:, None]], axis=1)
        low, high = children.low, children.high
    return codes, np.stack([low, high], axis=1)
