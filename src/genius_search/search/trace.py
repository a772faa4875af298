"""Trace of one ID through a search: probabilities of its codes, and the level at which a beam drops it."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from genius_search.config import SearchConfig
from genius_search.search.beam import BeamSearch, Chosen, Frontier
from genius_search.search.beams import Beams
from genius_search.search.decoder import Decoder
from genius_search.search.table import Children, Restriction, count_ids
from genius_search.search.tree import CodeTree, Ranges

MAX_TRIES: Final = 4
"""Most attempts to find a beam width that keeps an ID."""
MAX_WIDTH: Final = 1000
"""Largest beam width to try."""


class Target(NamedTuple):
    """An ID, and the query to trace it for."""

    decoder: Decoder
    tree: CodeTree
    embedding: Float[Tensor, "1 dim"]
    codes: tuple[int, ...]
    level0: frozenset[int] = frozenset()
    """Allowed level-0 codes; empty means any."""
    restriction: Restriction | None = None
    """Allowed items; None means all that are not deleted."""


class Step(NamedTuple):
    """One level of an ID: its code among the allowed codes after the same prefix."""

    children: Children
    items: Int64[np.ndarray, " children"]
    """Number of items below each child."""
    log_probabilities: Float32[np.ndarray, " children"]
    """Log-probability of each child, as added to the score of a beam."""
    probabilities: Float32[np.ndarray, " children"]
    """Probabilities normalised over the children; they sum to 1."""
    own: int
    """Position of the ID's code among the children."""

    @property
    def rank(self) -> int:
        """Rank of the ID's code, from 1. Ties are sorted by code."""
        return _rank(self.log_probabilities, self.own)


class Seen(NamedTuple):
    """Outcome for the ID's prefix at one level of a beam search."""

    rank: int
    """Rank of the prefix among all scored ones, from 1."""
    scored: int
    is_kept: bool


class Trace(NamedTuple):
    """A beam search for one query, and its outcome for one ID."""

    beams: Beams
    seen: list[Seen]
    """One entry per level, until decoding stopped or the ID was dropped."""

    @property
    def lost_at(self) -> int | None:
        """Level at which the beam dropped the ID; None if it was kept."""
        return len(self.seen) - 1 if self.seen and not self.seen[-1].is_kept else None


@torch.inference_mode()
def score_path(target: Target, scores: Literal["level", "vocabulary", "children"]) -> list[Step]:
    """Return the probabilities of an ID's codes and their alternatives at each level, in one pass.

    Log-probabilities equal those of beam search with the same settings. The ID's own codes are included even
    if no item below them is allowed.
    """
    decoder, codes = target.decoder, target.codes
    read = torch.tensor([codes[:-1]], dtype=torch.int64, device=decoder.device)
    start = decoder.start(target.embedding.to(decoder.device), [target.level0])
    hidden = decoder.advance(start, read).hidden[0]
    steps = []
    ranges = target.tree.root()
    for level, code in enumerate(codes):
        children, items = target.tree.children(ranges, level)
        is_allowed = np.ones(len(items), dtype=bool)
        if target.restriction is not None:
            owner = np.zeros(len(items), dtype=np.int64)
            is_allowed &= count_ids(children.low, children.high, [target.restriction], owner) > 0
        if level == 0 and target.level0:
            is_allowed &= np.isin(children.code, list(target.level0))
        kept = np.flatnonzero(is_allowed | (children.code == code))
        children, items = children.take(kept), items[kept]
        values = decoder.log_probabilities(
            hidden[level : level + 1], level, "level" if scores == "children" else scores
        )[0]
        of_children = values.float().cpu()[torch.from_numpy(children.code)]
        normalised = torch.log_softmax(of_children, dim=0)
        own = int(np.flatnonzero(children.code == code)[0])
        gained = normalised if scores == "children" else of_children
        steps.append(Step(children, items, gained.numpy(), normalised.exp().numpy(), own))
        ranges = Ranges(children.low[own : own + 1], children.high[own : own + 1])
    return steps


@torch.inference_mode()
def trace(target: Target, config: SearchConfig, width: int) -> Trace:
    """Run a beam search and record the rank of the ID's prefix at each level."""
    tracing = _TracingSearch(target, config, width)
    return Trace(tracing.run(target.embedding), tracing.seen)


def find_keeping_width(target: Target, config: SearchConfig, first: Trace) -> int | None:
    """Return a beam width that keeps an ID which ``first`` dropped, or None if none was found.

    The beam must be at least as wide as the rank at which the ID was dropped. A wider beam scores more
    prefixes at later levels, so the search is repeated, at most :data:`MAX_TRIES` times.
    """
    last, width = first, 0
    for _ in range(MAX_TRIES):
        if last.lost_at is None:
            return width
        width = max(last.seen[-1].rank, width + 1)
        if width > MAX_WIDTH:
            return None
        last = trace(target, config, width)
    return width if last.lost_at is None else None


class _TracingSearch(BeamSearch):
    """Beam search that records the rank of one ID's prefix."""

    def __init__(self, target: Target, config: SearchConfig, width: int) -> None:
        super().__init__(
            target.decoder,
            target.tree.segments,
            config,
            [target.level0],
            [target.restriction],
            np.array([width]),
        )
        self.codes = target.codes
        self.seen: list[Seen] = []

    def choose(
        self, frontier: Frontier, children: Children, scores: Float32[np.ndarray, " children"]
    ) -> Chosen:
        """Choose the best children, then record the rank of the ID's prefix."""
        chosen = super().choose(frontier, children, scores)
        if self.seen and not self.seen[-1].is_kept:
            return chosen
        level = len(self.seen)
        written = frontier.codes.reshape(-1, self.num_levels)[children.parent]
        is_own = (written[:, :level] == self.codes[:level]).all(axis=1) & (children.code == self.codes[level])
        for position in np.flatnonzero(is_own).tolist():  # one, or none if no item below it is allowed
            self.seen.append(
                Seen(_rank(scores, position), len(scores), bool((chosen.child == position).any()))
            )
        return chosen


def _rank(scores: Float32[np.ndarray, " scores"], position: int) -> int:
    """Return the rank of one score, from 1; earlier ones win ties."""
    return 1 + int((scores > scores[position]).sum() + (scores[:position] == scores[position]).sum())
