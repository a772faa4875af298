"""Beam search over the IDs that exist (paper, section 4.4)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from genius.config import SearchConfig
from genius.models.generator import Generator
from genius.search.table import IdTable

NOTHING = -1
"""Row of a place in a beam that no ID fills, when a pool has fewer IDs than the beam is wide."""


class Beams(NamedTuple):
    """The best IDs of each query, best first."""

    rows: Int64[np.ndarray, "queries beams"]
    """Rows of the ID table; −1 where there were fewer IDs than beams."""
    log_probabilities: Float32[np.ndarray, "queries beams levels"]
    """What each code added to the score; −inf in unfilled places."""

    def scores(self) -> Float32[np.ndarray, "queries beams"]:
        """Log-probability of each ID: the sum over its levels."""
        total: np.ndarray = self.log_probabilities.sum(axis=2, dtype=np.float32)
        return total


@torch.no_grad()
def search(
    generator: Generator,
    table: IdTable,
    queries: Float[Tensor, "queries dim"],
    config: SearchConfig,
    *,
    level0: list[frozenset[int]] | None = None,
) -> Beams:
    """The ``config.beam`` most probable IDs of the table for each query.

    Fewer are returned when fewer exist, never duplicates (deviation 16). Equal scores keep the order of the
    table, so the result does not depend on the batch.

    Parameters
    ----------
    level0
        for each query the level-0 codes it may begin with (a wanted modality); empty means any.
    """
    device = generator.embedding.weight.device
    num_queries = len(queries)
    state = generator.start(queries.to(device))
    width = 1
    low = np.zeros((num_queries, 1), dtype=np.int64)
    high = np.full((num_queries, 1), len(table), dtype=np.int64)
    history = np.zeros((num_queries, 1, table.num_levels), dtype=np.float32)
    total = np.zeros((num_queries, 1), dtype=np.float32)
    codes: Tensor | None = None
    for level in range(table.num_levels):
        step = generator.step(state, codes)
        probabilities = generator.log_probabilities(step.hidden, level, config.scores).cpu().numpy()
        children = table.children(level, low.ravel(), high.ravel())
        query = children.parent // width
        gained = probabilities[children.parent, children.code]
        if level == 0 and level0 is not None:
            gained = np.where(_allowed(level0, query, children.code), gained, -np.inf)
        scores = total.ravel()[children.parent] + gained
        kept = _best(query, scores, num_queries, config.beam)
        new_width = max(1, int(kept.counts.max(initial=0)))
        shape = (num_queries, new_width)
        parent = np.repeat((np.arange(num_queries) * width)[:, None], new_width, axis=1)
        parent[kept.query, kept.place] = children.parent[kept.child]
        low, high = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        low[kept.query, kept.place] = children.low[kept.child]
        high[kept.query, kept.place] = children.high[kept.child]
        chosen = np.zeros(shape, dtype=np.int64)
        chosen[kept.query, kept.place] = children.code[kept.child]
        total = np.full(shape, -np.inf, dtype=np.float32)
        total[kept.query, kept.place] = scores[kept.child]
        history = history.reshape(num_queries * width, -1)[parent.ravel()].reshape(*shape, -1)
        history[:, :, level] = -np.inf
        history[kept.query, kept.place, level] = gained[kept.child]
        state = step.state.select(torch.from_numpy(parent.ravel()).to(device))
        codes = torch.from_numpy(chosen.ravel()).to(device)
        width = new_width
    rows = np.where(np.isfinite(total), low, NOTHING)
    return Beams(rows=rows, log_probabilities=history)


class _Kept(NamedTuple):
    """Children that stay in the beams: which one takes which place of which query."""

    query: np.ndarray
    place: np.ndarray
    child: np.ndarray
    counts: np.ndarray


def _best(query: np.ndarray, scores: np.ndarray, num_queries: int, beam: int) -> _Kept:
    """The best ``beam`` children of each query, best first; children of probability 0 are dropped."""
    possible = np.flatnonzero(np.isfinite(scores))
    order = possible[np.lexsort([possible, -scores[possible], query[possible]])]
    owner = query[order]
    starts = np.searchsorted(owner, np.arange(num_queries))
    place = np.arange(len(order)) - starts[owner]
    inside = place < beam
    order, owner, place = order[inside], owner[inside], place[inside]
    return _Kept(owner, place, order, np.bincount(owner, minlength=num_queries))


def _allowed(level0: list[frozenset[int]], query: np.ndarray, code: np.ndarray) -> np.ndarray:
    size = int(code.max(initial=0)) + 1
    mask = np.array([[not codes or c in codes for c in range(size)] for codes in level0])
    allowed: np.ndarray = mask[query, code]
    return allowed
