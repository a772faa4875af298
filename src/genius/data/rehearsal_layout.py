"""Who is where in a rehearsal: ids, blocks, positives and negatives, computed and never stored.

A row's candidates stand in blocks that show the same concept, so what answers a query is a range of ids and
a data set of any size needs no memory.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from genius.data.rehearsal_sizes import RowSizes

Split = Literal["train", "val", "test"]
SPLITS: Final[tuple[Split, ...]] = ("train", "val", "test")

_PARTNERS: Final = {"oven": "infoseek", "infoseek": "oven"}
"""Data sets about the same things, that list each other's candidates as positives."""
WIKI: Final = frozenset(_PARTNERS)


class Member(NamedTuple):
    """A candidate: its place in a pool and the block it belongs to."""

    place: int
    block: int


@dataclass(frozen=True, slots=True)
class Shelf:
    """A row's candidates for some splits: numbered from ``first_did``, in blocks, strays at the end."""

    row: RowSizes
    kind: Literal["local", "val", "train"]
    first_did: int
    size: int

    @property
    def blocks(self) -> int:
        """Whole blocks; every candidate after them is a block of its own that nobody asks for."""
        return self.row.block.fitting(self.size)

    def did(self, place: int) -> str:
        """The id of a candidate."""
        return f"{self.row.dataset_id}:{self.first_did + place}"

    def places(self, block: int) -> range:
        """Where a block stands."""
        counts = self.row.block
        first = counts.before(block)
        return range(min(first, self.size), min(first + counts.of(block), self.size))

    def members(self) -> Iterator[Member]:
        """Every candidate in the order of the ids."""
        for block in range(self.blocks):
            for place in self.places(block):
                yield Member(place, block)
        first = self.places(self.blocks - 1).stop
        for place in range(first, self.size):
            yield Member(place, self.blocks + place - first)

    def part(self, first_block: int, blocks: int) -> Iterator[Member]:
        """The candidates of some blocks."""
        for block in range(first_block, first_block + blocks):
            for place in self.places(block):
                yield Member(place, block)

    def concept(self, block: int, *, seed: int, concepts: int) -> int:
        """What a block shows; OVEN and InfoSeek show the same thing under the same number."""
        about = "wiki" if self.row.dataset in WIKI else self.row.dataset
        return zlib.crc32(f"{seed} {about} {self.row.task_id} {self.kind} {block}".encode()) % concepts


@dataclass(frozen=True, slots=True)
class Asking:
    """The queries of a row in a split; each asks for one block of its shelf."""

    row: RowSizes
    split: Split
    first_qid: int
    size: int
    shelf: Shelf
    other: Shelf | None
    """Of the partner data set (OVEN, InfoSeek), or WebQA's other modality."""
    first_block: int
    blocks: int

    def qid(self, number: int) -> str:
        """The id of a query."""
        return f"{self.row.dataset_id}:{self.first_qid + number}"

    def block(self, number: int) -> int:
        """The block that a query asks for."""
        return self.first_block + number % self.blocks

    def positives(self, block: int) -> list[str]:
        """What answers a query for this block, the own data set first."""
        places = self._answers(block)
        own = [self.shelf.did(place) for place in places]
        if self.row.dataset not in WIKI or self.other is None or block >= self.other.blocks:
            return own
        return own + [self.other.did(place) for place in self.other.places(block)]

    def negatives(self, block: int) -> list[str]:
        """What nearly answers it, where the data set names such candidates (spec, section 1.6)."""
        after = self.shelf.places(block).stop
        following = [self.shelf.did((after + step) % self.shelf.size) for step in range(3)]
        match self.row.dataset:
            case "webqa" if self.other is not None:
                return [following[0], self.other.did(block % self.other.size)]
            case "edis":
                return following[:2]
            case "nights":
                return following[:1]
            case "cirr":
                return following
            case "infoseek":
                places = self.shelf.places(block)[len(self._answers(block)) :]
                return [self.shelf.did(place) for place in places]
            case _:
                return []

    def _answers(self, block: int) -> range:
        places = self.shelf.places(block)
        return places if self.row.answers is None else places[: self.row.answers.of(block)]


class Layout(NamedTuple):
    """Everything a rehearsal holds."""

    shelves: list[Shelf]
    askings: list[Asking]

    def of(self, split: Split) -> list[Asking]:
        """The queries of a split, in the order of the papers' tables."""
        return [asking for asking in self.askings if asking.split == split]


def lay_out(rows: list[RowSizes]) -> Layout:
    """Give every row its ids: candidates unique in a data set, queries counted anew in each split."""
    next_did: dict[int, int] = {}
    shelves: dict[tuple[str, str], Shelf] = {}
    for kind in ("local", "val", "train"):
        for row in rows:
            size = {"local": row.pool, "val": row.val_pool, "train": row.train_pool}[kind]
            if size:
                first = next_did.get(row.dataset_id, 1)
                shelves[row.name, kind] = Shelf(row, kind, first, size)
                next_did[row.dataset_id] = first + size
    askings: list[Asking] = []
    for split in SPLITS:
        next_qid: dict[int, int] = {}
        for row in rows:
            size = {"train": row.train, "val": row.val, "test": row.queries}[split]
            kind = "train" if split == "train" else "val" if split == "val" and row.val_pool else "local"
            shelf = shelves[row.name, kind]
            other = shelves.get((_other_name(row), kind))
            first_block, blocks = _span(row, split, shelf, other)
            first_qid = next_qid.get(row.dataset_id, 1)
            askings.append(Asking(row, split, first_qid, size, shelf, other, first_block, blocks))
            next_qid[row.dataset_id] = first_qid + size
    return Layout(list(shelves.values()), askings)


def _other_name(row: RowSizes) -> str:
    if row.dataset == "webqa":
        return f"webqa_task{3 - row.task_id}"
    return f"{_PARTNERS.get(row.dataset, '')}_task{row.task_id}"


def _span(row: RowSizes, split: Split, shelf: Shelf, other: Shelf | None) -> tuple[int, int]:
    """Which blocks are asked for: validation asks for others than the test, partners for the same."""
    if split == "train":
        return 0, min(row.train, shelf.blocks)
    if split == "test" or row.val_pool:
        return 0, min(row.queries, shelf.blocks)
    shelves = [shelf] if other is None or row.dataset not in WIKI else [shelf, other]
    room = min(one.blocks for one in shelves)
    first = min(max(one.row.queries for one in shelves), room - 1)
    return first, min(room - first, *(one.row.val for one in shelves))
