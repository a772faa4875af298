"""The codes of one ID among their alternatives, level by level."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from genius_search.search.decoder import Decoder
from genius_search.search.table import Children, Restriction, count_ids
from genius_search.search.tree import CodeTree, Ranges


class Target(NamedTuple):
    """An ID, and the query that it is compared with."""

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
        values = self.log_probabilities
        return 1 + int((values > values[self.own]).sum() + (values[: self.own] == values[self.own]).sum())


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
