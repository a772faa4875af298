"""Explanations: the tree of codes, items that share codes, and why a search finds an item or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from genius_search.errors import UsageError
from genius_search.index.items import Item
from genius_search.index.query import EncodedQuery, SnapshotSearcher
from genius_search.index.snapshot import Snapshot
from genius_search.model import Genius
from genius_search.search.tree import Ranges, Step, score_path

MOST_CHILDREN: Final = 64
EXAMPLES: Final = 4
SIBLINGS: Final = 8
SHARING: Final = 20
"""Default maximum number of children, examples, siblings and items of a group."""


@dataclass(frozen=True, slots=True)
class CodeChild:
    """A code that continues a prefix."""

    code: int
    items: int
    """Number of items below it."""
    share: float
    """Relative to the items below the prefix."""
    examples: list[Item]


@dataclass(frozen=True, slots=True)
class CodeNode:
    """A prefix of IDs and the items below it, without deleted ones."""

    prefix: tuple[int, ...]
    level: int
    """Number of codes in the prefix, which is the level of its children."""
    items: int
    share: float
    """Relative to all items."""
    entropy: float
    """Entropy of the next code in bits."""
    num_children: int
    children: list[CodeChild]
    """Sorted by descending number of items."""
    examples: list[Item]
    """Evenly spaced items below the prefix."""
    truncated: bool
    """True if not all children are listed."""


@dataclass(frozen=True, slots=True)
class SharedGroup:
    """Items whose IDs begin with the same codes."""

    codes: tuple[int, ...]
    """The codes they share."""
    items: int
    examples: list[Item]
    """At most twenty of them."""


@dataclass(frozen=True, slots=True)
class SharedPage:
    """A page of groups, largest first."""

    total: int
    """Number of groups in the index."""
    items: int
    """Items in all of them."""
    groups: list[SharedGroup]


@dataclass(frozen=True, slots=True)
class Sibling:
    """An alternative to an item's code."""

    code: int
    log_probability: float | None
    probability: float | None
    """Probability among the allowed codes after this prefix; None if distances lead the search."""
    items: int
    examples: list[Item]


@dataclass(frozen=True, slots=True)
class LevelStep:
    """One code of an item's ID among those that a search could choose instead."""

    level: int
    name: str
    code: int
    log_probability: float | None
    """The code's contribution to the score of a beam; None if distances lead the search."""
    probability: float | None
    """Probability among the allowed codes after this prefix; None if distances lead the search."""
    rank: int
    """Among them, from 1: by probability, or by distance from the query."""
    num_siblings: int
    """Number of these codes, its own included."""
    items: int
    """Number of items whose IDs share the codes up to this one."""
    siblings: list[Sibling]
    """The most probable, or nearest, codes, which may include the item's own."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a search finds an item, or does not."""

    item: Item
    codes: tuple[int, ...]
    is_allowed: bool
    """True if the modality and conditions of the request allow the item."""
    rank: int | None
    """Rank among all items under the beams; None if the item was not reached."""
    score: float | None
    touched: int
    """Number of items under the beams."""
    beam: int
    """Beam width."""
    levels: list[LevelStep]


def code_node(
    snapshot: Snapshot,
    num_levels: int,
    prefix: Sequence[int] = (),
    *,
    examples: int = EXAMPLES,
    most_children: int = MOST_CHILDREN,
) -> CodeNode:
    """Describe a prefix and its children.

    Raises
    ------
    UnknownPrefix
        No ID begins with the prefix.
    UsageError
        The prefix is longer than an ID.
    """
    if len(prefix) > num_levels:
        raise UsageError(f"{len(prefix)} codes are given; the IDs of this index have {num_levels}")
    tree = snapshot.tree
    ranges = tree.find(prefix)
    items, total = (int(tree.count(one)[0]) for one in (ranges, tree.root()))
    is_whole = len(prefix) == num_levels  # the columns after a whole ID are no codes
    none = Ranges(ranges.low[:0], ranges.high[:0])
    children, counts = tree.children(none, 0) if is_whole else tree.children(ranges, len(prefix))
    shares = counts / max(1, items)
    largest = np.argsort(-counts, kind="stable")[:most_children]
    below = children.take(largest)
    shown = _examples(snapshot, Ranges(below.low, below.high), examples)
    return CodeNode(
        prefix=tuple(prefix),
        level=len(prefix),
        items=items,
        share=items / max(1, total),
        entropy=float(-(shares * np.log2(shares)).sum()) + 0.0,  # no −0
        num_children=len(counts),
        children=[
            CodeChild(*child)
            for child in zip(
                below.code.tolist(), counts[largest].tolist(), shares[largest].tolist(), shown, strict=True
            )
        ],
        examples=_examples(snapshot, ranges, examples)[0],
        truncated=len(counts) > len(largest),
    )


def shared_groups(
    snapshot: Snapshot, depth: int, *, offset: int = 0, limit: int = 50, most: int = SHARING
) -> SharedPage:
    """Return a page of the groups of items that share their first ``depth`` codes.

    Raises
    ------
    UsageError
        The page is invalid, or the depth is zero.
    """
    if offset < 0 or limit < 0:
        raise UsageError(f"offset is {offset} and limit is {limit}; both must be at least 0")
    found = snapshot.shared(depth)
    page = np.arange(len(found.items))[offset : offset + limit]
    ranges = found.ranges.take(page)
    codes = snapshot.tree.first_codes(ranges, depth).tolist()
    groups = zip(
        map(tuple, codes), found.items[page].tolist(), _examples(snapshot, ranges, most), strict=True
    )
    return SharedPage(len(found.items), int(found.items.sum()), [SharedGroup(*group) for group in groups])


def explain(searcher: SnapshotSearcher, query: EncodedQuery, item_id: str) -> Explanation:
    """Follow an item's ID through the levels of a search.

    Raises
    ------
    UnknownItem
        The item is not in the index.
    """
    model, snapshot, config = searcher.model, searcher.snapshot, searcher.config
    place = snapshot.locate(item_id)
    codes = tuple(snapshot.id_at(place)[: model.num_levels].tolist())
    allowed = None if query.restriction is None else query.restriction[place.segment]
    steps = score_path(
        snapshot.tree,
        model.decoder_for(config),
        torch.from_numpy(query.embedding[None]),
        codes,
        config.scores,
        level0=query.level0,
        restriction=query.restriction,
    )
    ((found, _),) = searcher.rank([query], at_least=max(1, snapshot.num_alive))
    there = np.flatnonzero((found.segments == place.segment) & (found.items == place.row))
    return Explanation(
        item=snapshot.item_at(place),
        codes=codes,
        is_allowed=(allowed is None or bool(allowed.items[place.row]))
        and (not query.level0 or codes[0] in query.level0),
        rank=1 + int(there[0]) if len(there) else None,
        score=float(found.scores[there[0]]) if len(there) else None,
        touched=found.touched,
        beam=max(query.beam or config.beam, query.k),
        levels=_describe_steps(model, snapshot, steps, is_generated=model.uses_generator(config)),
    )


def _describe_steps(
    model: Genius, snapshot: Snapshot, steps: Sequence[Step], *, is_generated: bool
) -> list[LevelStep]:
    """Return each level with its best siblings; all example items are looked up at once."""
    best = [np.argsort(-step.log_probabilities, kind="stable")[:SIBLINGS] for step in steps]
    chosen = [step.children.take(places) for step, places in zip(steps, best, strict=True)]
    low, high = (np.concatenate(ends) for ends in zip(*((one.low, one.high) for one in chosen), strict=True))
    shown = iter(_examples(snapshot, Ranges(low, high), EXAMPLES))
    levels = []
    for level, (step, places) in enumerate(zip(steps, best, strict=True)):
        log_probabilities = step.log_probabilities.tolist() if is_generated else [None] * len(step.items)
        probabilities = step.probabilities.tolist() if is_generated else [None] * len(step.items)
        codes, items = step.children.code.tolist(), step.items.tolist()
        levels.append(
            LevelStep(
                level=level,
                name="modality" if model.codebooks.has_modality_level and level == 0 else f"level {level}",
                code=codes[step.own],
                log_probability=log_probabilities[step.own],
                probability=probabilities[step.own],
                rank=step.rank,
                num_siblings=len(items),
                items=items[step.own],
                siblings=[
                    Sibling(codes[at], log_probabilities[at], probabilities[at], items[at], next(shown))
                    for at in places.tolist()
                ],
            )
        )
    return levels


def _examples(snapshot: Snapshot, ranges: Ranges, most: int) -> list[list[Item]]:
    """Return some items below each prefix."""
    picked = snapshot.tree.pick(ranges, most)
    found: list[list[Item]] = [[] for _ in range(len(ranges.low))]
    for owner, item in zip(picked.owner.tolist(), snapshot.items(picked.segments, picked.rows), strict=True):
        found[owner].append(item)
    return found
