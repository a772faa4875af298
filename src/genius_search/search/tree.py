"""The way of one ID through the levels: what the generator says of its codes, and whether a beam keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int16, Int64
from torch import Tensor

from genius_search.config import SearchConfig
from genius_search.errors import UsageError
from genius_search.search.beam import Beams, Chosen, Frontier, Run
from genius_search.search.decoder import Decoding
from genius_search.search.table import Children, IdTable, Part, Restriction, children_in_parts, count_ids


class UnknownPrefix(UsageError, LookupError):
    """No ID begins with these codes."""


class Ranges(NamedTuple):
    """Prefixes, each a range of rows in the table of every part."""

    low: Int64[np.ndarray, "prefixes parts"]
    high: Int64[np.ndarray, "prefixes parts"]


class Picked(NamedTuple):
    """Some items below prefixes, prefix after prefix."""

    owner: Int64[np.ndarray, " picked"]
    """Which of the prefixes."""
    parts: Int64[np.ndarray, " picked"]
    rows: Int64[np.ndarray, " picked"]
    """Item rows there."""


class CodeTree:
    """Walks the ID tables of a pool; nothing is built for it but where the deleted items stand.

    Items are numbered as they stand behind the sorted IDs, the deleted ones left out: below a prefix lies a
    range of them, so to count and to pick is to subtract and to look up.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts

    def root(self) -> Ranges:
        """The prefix of no codes."""
        high = np.array([[len(part.table) for part in self.parts]], dtype=np.int64)
        return Ranges(np.zeros_like(high), high)

    def find(self, prefix: Sequence[int]) -> Ranges:
        """Where the IDs are that begin with these codes.

        Raises
        ------
        UnknownPrefix
            there is none.
        """
        ranges = self.root()
        for level, code in enumerate(prefix):
            children = children_in_parts(self.parts, level, *ranges)
            here = np.flatnonzero(children.code == code)
            ranges = Ranges(children.low[here], children.high[here])
            if not len(here) or not self.count(ranges)[0]:
                shown = " ".join(map(str, prefix[: level + 1]))
                raise UnknownPrefix(f"no item of this index has an ID that begins with {shown}")
        return ranges

    def children(self, ranges: Ranges, level: int) -> tuple[Children, Int64[np.ndarray, " children"]]:
        """All codes that continue prefixes at a level, and how many items lie below each: at least one."""
        if not self.parts:
            nothing, no_ranges = np.zeros(0, dtype=np.int64), np.zeros((0, 0), dtype=np.int64)
            return Children(nothing, nothing, no_ranges, no_ranges), nothing
        children = children_in_parts(self.parts, level, *ranges)
        counts = self.count(Ranges(children.low, children.high))
        alive = np.flatnonzero(counts)
        return children.take(alive), counts[alive]

    def count(self, ranges: Ranges) -> Int64[np.ndarray, " prefixes"]:
        """Items below prefixes that are not deleted."""
        first, last = self._places(ranges)
        return np.asarray((last - first).sum(axis=1))

    def pick(self, ranges: Ranges, most: int) -> Picked:
        """At most so many items below each prefix, spread evenly over it."""
        first, last = self._places(ranges)
        below = (last - first).cumsum(axis=1)  # by part: so many items up to and with it
        total = below[:, -1] if below.shape[1] else np.zeros(len(below), dtype=np.int64)
        taken = np.minimum(total, most)
        owner = np.arange(len(taken)).repeat(taken)
        turn = np.arange(len(owner)) - (taken.cumsum() - taken)[owner]
        place = (2 * turn + 1) * total[owner] // (2 * taken[owner])
        part = (below[owner] <= place[:, None]).sum(axis=1)
        start = np.where(part > 0, below[owner, part - 1], 0) if len(owner) else place
        place = place - start + first[owner, part]
        rows = np.empty_like(place)
        for number, own in enumerate(self.parts):
            here = np.flatnonzero(part == number)
            rows[here] = own.table.items[self._with_deleted(number, place[here])]
        return Picked(owner, part, rows)

    @cached_property
    def _deleted(self) -> list[Int64[np.ndarray, " deleted"]]:
        """Of each part: where its deleted items stand behind the sorted IDs."""
        return [
            np.zeros(0, dtype=np.int64)
            if part.alive is None
            else np.flatnonzero(~part.alive.items[part.table.items])
            for part in self.parts
        ]

    def _places(
        self, ranges: Ranges
    ) -> tuple[Int64[np.ndarray, "prefixes parts"], Int64[np.ndarray, "prefixes parts"]]:
        """The range of items below each prefix, numbered without the deleted ones."""
        found = []
        for rows in ranges:
            places = np.empty_like(rows)
            for number, part in enumerate(self.parts):
                behind = part.table.bucket_starts[rows[:, number]].astype(np.int64)
                places[:, number] = behind - self._deleted[number].searchsorted(behind)
            found.append(places)
        return found[0], found[1]

    def _with_deleted(
        self, number: int, places: Int64[np.ndarray, " places"]
    ) -> Int64[np.ndarray, " places"]:
        """Where items stand that were numbered without the deleted ones."""
        deleted = self._deleted[number]
        before = deleted - np.arange(len(deleted))  # living items before each deleted one
        return np.asarray(places + before.searchsorted(places, "right"))


class Shared(NamedTuple):
    """Prefixes that several items share, those of most items first."""

    ranges: Ranges
    items: Int64[np.ndarray, " prefixes"]
    """How many share each."""


def shared(tree: CodeTree, depth: int) -> Shared:
    """All prefixes of so many codes with at least two items; equally large ones in order of their codes.

    Inside a part they are read off the table, which knows where prefixes begin. Only those that are in
    several parts are looked for level by level; where one part is large and the others are what was added
    lately, they are few.

    Raises
    ------
    UsageError
        a prefix needs a code at least.
    """
    if depth < 1:
        raise UsageError(f"prefixes of {depth} codes are asked for; they need one at least")
    several = _in_several_parts(tree, depth)
    found = [several, *(_in_one_part(tree, number, depth, several) for number in range(len(tree.parts)))]
    ranges = Ranges(*(np.concatenate(columns) for columns in zip(*found, strict=True)))
    counts = tree.count(ranges)
    kept = np.flatnonzero(counts > 1)
    ranges, counts = Ranges(ranges.low[kept], ranges.high[kept]), counts[kept]
    codes = first_codes(tree, ranges, depth)
    order = np.lexsort([*codes.T[::-1], -counts])
    return Shared(Ranges(ranges.low[order], ranges.high[order]), counts[order])


def first_codes(tree: CodeTree, ranges: Ranges, depth: int) -> Int16[np.ndarray, "prefixes depth"]:
    """The codes of prefixes, none of which is empty in all parts."""
    codes = np.zeros((len(ranges.low), depth), dtype=np.int16)
    for number, part in enumerate(tree.parts):
        here = np.flatnonzero(ranges.high[:, number] > ranges.low[:, number])
        codes[here] = part.table.ids[ranges.low[here, number], :depth]
    return codes


def _in_several_parts(tree: CodeTree, depth: int) -> Ranges:
    """Prefixes that more than one part has."""
    ranges = tree.root()
    if len(tree.parts) < 2:
        return Ranges(ranges.low[:0], ranges.high[:0])
    for level in range(depth):
        children = children_in_parts(tree.parts, level, *ranges)
        chosen = np.flatnonzero((children.high > children.low).sum(axis=1) > 1)
        ranges = Ranges(children.low[chosen], children.high[chosen])
    return ranges


def _in_one_part(tree: CodeTree, number: int, depth: int, several: Ranges) -> Ranges:
    """Prefixes with at least two items, deleted or not, that no other part has."""
    table = tree.parts[number].table
    begins = _begins(table, depth)
    ends = np.append(begins[1:], len(table))
    items = table.bucket_starts[ends].astype(np.int64) - table.bucket_starts[begins]
    elsewhere = several.low[several.high[:, number] > several.low[:, number], number]
    chosen = np.flatnonzero(items > 1)
    chosen = chosen[~np.isin(begins[chosen], elsewhere)]
    low = np.zeros((len(chosen), len(tree.parts)), dtype=np.int64)
    high = np.zeros_like(low)
    low[:, number], high[:, number] = begins[chosen], ends[chosen]
    return Ranges(low, high)


def _begins(table: IdTable, depth: int) -> Int64[np.ndarray, " prefixes"]:
    """The row at which each prefix of so many codes begins."""
    if not len(table):
        return np.zeros(0, dtype=np.int64)
    later = np.sort(table.starts[: table.level_bounds[depth]], kind="stable")  # a few ascending runs
    return np.concatenate([np.zeros(1, dtype=np.int64), later])


MOST_TRIES: Final = 4
"""Wider beams that are tried to find one that keeps an ID."""
WIDEST: Final = 1000
"""No wider beam is tried."""


class Step(NamedTuple):
    """One level of an ID: its code among all that continue the same prefix and may be found."""

    children: Children
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


def _is_findable(children: Children, level: int, sought: Sought) -> Bool[np.ndarray, " children"]:
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
        self, frontier: Frontier, children: Children, scores: Float32[np.ndarray, " children"]
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
