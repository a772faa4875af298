"""The way of one ID through the levels: what the generator says of its codes, and whether a beam keeps it."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from genius.config import SearchConfig
from genius.search.beam import Beams, Run
from genius.search.decoding import Decoding
from genius.search.frontier import Chosen, Frontier
from genius.search.prefixes import Continuations, Restriction, count_ids
from genius.search.tree import CodeTree, Ranges

MOST_TRIES: Final = 4
"""Wider beams that are tried to find one that keeps an ID."""
WIDEST: Final = 1000
"""No wider beam is tried."""


class Step(NamedTuple):
    """One level of an ID: its code among all that continue the same prefix and may be found."""

    children: Continuations
    items: Int64[np.ndarray, " children"]
    """How many lie below each."""
    log_probabilities: Float32[np.ndarray, " children"]
    """What each would add to the score of a beam."""
    probabilities: Float32[np.ndarray, " children"]
    """The same among the codes here: they sum to 1."""
    own: int
    """Which of them is the ID's."""

    @property
    def rank(self) -> int:
        """Of its code, from 1; equal ones keep the order of their codes."""
        before = self.log_probabilities > self.log_probabilities[self.own]
        before[: self.own] |= self.log_probabilities[: self.own] == self.log_probabilities[self.own]
        return 1 + int(before.sum())


class Sought(NamedTuple):
    """An ID, and a query that looks for it or for others."""

    decoder: Decoding
    tree: CodeTree
    embedding: Float[Tensor, "1 dim"]
    codes: tuple[int, ...]
    level0: frozenset[int] = frozenset()
    """Codes that the query begins with; empty: any."""
    restriction: Restriction | None = None
    """What it may find; None: all that is alive."""


@torch.inference_mode()
def path_of(sought: Sought, scores: Literal["level", "vocabulary", "children"]) -> list[Step]:
    """What the generator says at each level of an ID, all levels read in one pass.

    Log-probabilities are those of beam search with the same settings. The ID's own codes are among the
    siblings even where nothing below them may be found.
    """
    decoder, tree, codes = sought.decoder, sought.tree, sought.codes
    read = torch.tensor([codes[:-1]], dtype=torch.int64, device=decoder.device)
    hidden = decoder.advance(decoder.start(sought.embedding.to(decoder.device)), read).hidden[0]
    steps = []
    ranges = tree.root()
    for level, code in enumerate(codes):
        children, items = tree.children(ranges, level)
        kept = _is_findable(children, level, sought) | (children.code == code)
        children, items = children.take(np.flatnonzero(kept)), items[kept]
        said = decoder.log_probabilities(
            hidden[level : level + 1], level, "level" if scores == "children" else scores
        )[0]
        here = said.float().cpu()[torch.from_numpy(children.code)]
        among = torch.log_softmax(here, dim=0)
        own = int(np.flatnonzero(children.code == code)[0])
        steps.append(
            Step(
                children,
                items,
                (among if scores == "children" else here).numpy(),
                among.exp().numpy(),
                own,
            )
        )
        ranges = Ranges(children.low[own : own + 1], children.high[own : own + 1])
    return steps


def _is_findable(children: Continuations, level: int, sought: Sought) -> Bool[np.ndarray, " children"]:
    """Whether the query lets anything below a code be found."""
    found = np.ones(len(children.code), dtype=bool)
    if sought.restriction is not None:
        owner = np.zeros(len(found), dtype=np.int64)
        found &= count_ids(children.low, children.high, [sought.restriction], owner) > 0
    if level == 0 and sought.level0:
        found &= np.isin(children.code, list(sought.level0))
    return found


class Seen(NamedTuple):
    """What a beam did with an ID at one level."""

    rank: int
    """Of its prefix among all that the beam weighed, from 1."""
    weighed: int
    is_kept: bool


class Watched(NamedTuple):
    """A search for one query, and what became of one ID in it."""

    beams: Beams
    seen: list[Seen]
    """Level by level, as far as it was decoded or the ID was lost."""

    @property
    def lost_at(self) -> int | None:
        """The level at which the beam dropped it; None: it was kept."""
        return len(self.seen) - 1 if self.seen and not self.seen[-1].is_kept else None


@torch.inference_mode()
def watch(sought: Sought, config: SearchConfig, width: int) -> Watched:
    """Search, and look at each level where the prefix of the ID stands."""
    run = _WatchedRun(sought, config, width)
    run.decode(sought.embedding)
    return Watched(run.beams(), run.seen)


def keeping_width(sought: Sought, config: SearchConfig, first: Watched) -> int | None:
    """A beam width that keeps an ID which ``first`` lost; None when none up to :data:`WIDEST` was found.

    Where the beam dropped it the ID's prefix had a rank. So wide has the beam to be at least, and with a
    wider one more prefixes are weighed at later levels; so it is asked again, a few times.
    """
    last, width = first, 0
    for _ in range(MOST_TRIES):
        if last.lost_at is None:
            return width
        width = max(last.seen[-1].rank, width + 1)
        if width > WIDEST:
            return None
        last = watch(sought, config, width)
    return width if last.lost_at is None else None


class _WatchedRun(Run):
    """A search that notes where one ID stands."""

    def __init__(self, sought: Sought, config: SearchConfig, width: int) -> None:
        super().__init__(
            sought.decoder,
            sought.tree.parts,
            config,
            [sought.level0],
            [sought.restriction],
            np.array([width]),
        )
        self.codes = sought.codes
        self.seen: list[Seen] = []

    def choose(
        self, frontier: Frontier, children: Continuations, scores: Float32[np.ndarray, " children"]
    ) -> Chosen:
        """As any search; then look for the ID."""
        chosen = super().choose(frontier, children, scores)
        if self.seen and not self.seen[-1].is_kept:
            return chosen
        level = len(self.seen)
        written = frontier.codes.reshape(-1, self.num_levels)[children.parent]
        is_own = (written[:, :level] == self.codes[:level]).all(axis=1) & (children.code == self.codes[level])
        place = np.flatnonzero(is_own)
        if not len(place):
            return chosen  # nothing that may be found lies there
        score = scores[place[0]]
        rank = 1 + int((scores > score).sum() + (scores[: place[0]] == score).sum())
        self.seen.append(Seen(rank, len(scores), bool((chosen.child == place[0]).any())))
        return chosen
