"""One ID on its way through a search: what the generator says of its codes, and where a beam drops it."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from genius_search.config import SearchConfig
from genius_search.search.beam import Beams, BeamSearch, Chosen, Frontier
from genius_search.search.decoder import Decoder
from genius_search.search.table import Children, Restriction, count_ids
from genius_search.search.tree import CodeTree, Ranges

MAX_TRIES: Final = 4
"""Wider beams that are tried to find one that keeps an ID."""
MAX_WIDTH: Final = 1000
"""No wider beam is tried."""


class Target(NamedTuple):
    """An ID, and a query that may find it."""

    decoder: Decoder
    tree: CodeTree
    embedding: Float[Tensor, "1 dim"]
    codes: tuple[int, ...]
    level0: frozenset[int] = frozenset()
    """Codes that the query begins with; empty: any."""
    restriction: Restriction | None = None
    """What the query may find; None: all items that are not deleted."""


class Step(NamedTuple):
    """One level of an ID: its code among all that continue the same prefix and may be found."""

    children: Children
    items: Int64[np.ndarray, " children"]
    """Number of items below each."""
    log_probabilities: Float32[np.ndarray, " children"]
    """What each would add to the score of a beam."""
    probabilities: Float32[np.ndarray, " children"]
    """The same, normalised among these codes: they sum to 1."""
    own: int
    """Position of the ID's code."""

    @property
    def rank(self) -> int:
        """Rank of the ID's code, from 1; equal ones keep the order of their codes."""
        return _rank(self.log_probabilities, self.own)


class Seen(NamedTuple):
    """What a beam did with the prefix of an ID at one level."""

    rank: int
    """Its rank among all prefixes that were scored, from 1."""
    scored: int
    is_kept: bool


class Trace(NamedTuple):
    """A search for one query, and what became of one ID in it."""

    beams: Beams
    seen: list[Seen]
    """Level by level, as far as it was decoded or the ID was lost."""

    @property
    def lost_at(self) -> int | None:
        """The level at which the beam dropped the ID; None: it was kept."""
        return len(self.seen) - 1 if self.seen and not self.seen[-1].is_kept else None


@torch.inference_mode()
def score_path(target: Target, scores: Literal["level", "vocabulary", "children"]) -> list[Step]:
    """Return what the generator says at each level of an ID; all levels are read in one pass.

    Log-probabilities are those of beam search with the same settings. The ID's own codes are among the
    children even where nothing below them may be found.
    """
    decoder, codes = target.decoder, target.codes
    read = torch.tensor([codes[:-1]], dtype=torch.int64, device=decoder.device)
    hidden = decoder.advance(decoder.start(target.embedding.to(decoder.device)), read).hidden[0]
    steps = []
    ranges = target.tree.root()
    for level, code in enumerate(codes):
        children, items = target.tree.children(ranges, level)
        may_be_found = np.ones(len(items), dtype=bool)
        if target.restriction is not None:
            owner = np.zeros(len(items), dtype=np.int64)
            may_be_found &= count_ids(children.low, children.high, [target.restriction], owner) > 0
        if level == 0 and target.level0:
            may_be_found &= np.isin(children.code, list(target.level0))
        kept = np.flatnonzero(may_be_found | (children.code == code))
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
    """Search, and note at each level where the prefix of the ID stands."""
    tracing = _TracingSearch(target, config, width)
    return Trace(tracing.run(target.embedding), tracing.seen)


def find_keeping_width(target: Target, config: SearchConfig, first: Trace) -> int | None:
    """Return a beam width that keeps an ID which ``first`` lost; None when none up to :data:`MAX_WIDTH` did.

    Where the beam dropped it, the ID's prefix had a rank. The beam has to be at least that wide, and with a
    wider one more prefixes are scored at later levels; so it is tried again, a few times.
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
    """A search that notes where one ID stands."""

    def __init__(self, target: Target, config: SearchConfig, width: int) -> None:
        super().__init__(
            target.decoder,
            target.tree.parts,
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
        """Choose as any search does, then look for the ID."""
        chosen = super().choose(frontier, children, scores)
        if self.seen and not self.seen[-1].is_kept:
            return chosen
        level = len(self.seen)
        written = frontier.codes.reshape(-1, self.num_levels)[children.parent]
        is_own = (written[:, :level] == self.codes[:level]).all(axis=1) & (children.code == self.codes[level])
        for place in np.flatnonzero(
            is_own
        ).tolist():  # one, or none where nothing that may be found lies there
            self.seen.append(Seen(_rank(scores, place), len(scores), bool((chosen.child == place).any())))
        return chosen


def _rank(scores: Float32[np.ndarray, " scores"], place: int) -> int:
    """Return the rank of one score, from 1; equal ones keep their order."""
    return 1 + int((scores > scores[place]).sum() + (scores[:place] == scores[place]).sum())
