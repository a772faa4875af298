"""Whether two ways of searching rank alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float32, Int64

from genius.baselines.hf_generate import Generated
from genius.search.beam import Beams
from genius.search.table import IdTable

TOLERANCE: Final = 1e-4
"""Scores that differ by no more may stand in either order: the two sum in different orders."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Rankings of some queries, compared place by place."""

    compared: int
    identical: int
    """Queries with the same IDs in the same order."""
    tied: int
    """Others whose rankings differ only among IDs of equal score."""

    @property
    def share(self) -> float:
        """Of the queries: identical, ties excused."""
        return (self.identical + self.tied) / self.compared


class Ranking(NamedTuple):
    """What one query found, best first."""

    ids: Int64[np.ndarray, "beams levels"]
    scores: Float32[np.ndarray, " beams"]


def rankings_of(table: IdTable, beams: Beams) -> list[Ranking]:
    """What our search found in one table, all levels decoded."""
    filled, scores = beams.filled(), beams.scores()
    return [
        Ranking(table.ids[low[places, 0]].astype(np.int64), values[places])
        for low, values, places in zip(beams.low, scores, filled, strict=True)
    ]


def rankings_of_generated(generated: Generated) -> list[Ranking]:
    """What Hugging Face's ``generate`` found."""
    return [
        Ranking(codes[np.isfinite(scores)], scores[np.isfinite(scores)])
        for codes, scores in zip(generated.codes, generated.scores, strict=True)
    ]


def agreement(ours: list[Ranking], theirs: list[Ranking]) -> Agreement:
    """Compare the rankings of the same queries."""
    identical = tied = 0
    for left, right in zip(ours, theirs, strict=True):
        if np.array_equal(left.ids, right.ids):
            identical += 1
        elif _differ_in_ties_only(left, right):
            tied += 1
    return Agreement(compared=len(ours), identical=identical, tied=tied)


def _differ_in_ties_only(left: Ranking, right: Ranking) -> bool:
    """Scores agree place by place and ID by ID; an ID that only one side has ties with the other's last."""
    if len(left.scores) != len(right.scores):
        return False
    if np.abs(left.scores - right.scores).max(initial=0) > TOLERANCE:
        return False
    for one, other in ((left, right), (right, left)):
        known = dict(zip(map(tuple, other.ids.tolist()), other.scores.tolist(), strict=True))
        last = float(other.scores[-1])
        for codes, score in zip(map(tuple, one.ids.tolist()), one.scores.tolist(), strict=True):
            if abs(score - known.get(codes, last)) > TOLERANCE:
                return False
    return True
