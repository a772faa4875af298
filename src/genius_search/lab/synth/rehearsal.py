"""Draws a stand-in for M-BEIR: its files and field conventions, all 16 rows, at any share of its size.

With it a whole run (check, fit, evaluate, index) can be rehearsed before 169 GB are downloaded. Every query
and candidate is computed from its number, so files of any size are written without keeping anything.
"""

from __future__ import annotations

import bisect
import json
import os
import shutil
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from PIL import Image

from genius_search.artifact import write_json
from genius_search.data.mbeir import InstructionRow, replacing, write_instructions
from genius_search.errors import UsageError
from genius_search.lab.synth.catalogue import Pose, draw, font_file, save
from genius_search.lab.synth.world import (
    FILL_WORDS,
    FRAME_WORDS,
    RGB,
    Fact,
    Product,
    facts_of,
    possible_products,
)
from genius_search.records import TASKS, Modality


class Counts(NamedTuple):
    """How many of something each block of a row has: the first the most, the others the average."""

    thousandths: int
    """The average, times a thousand."""
    most: int

    def of(self, block: int) -> int:
        """How many this block has; at least one."""
        if block == 0:
            return self.most
        return (block + 1) * self.thousandths // 1000 - block * self.thousandths // 1000

    def before(self, block: int) -> int:
        """How many all earlier blocks have together."""
        if block == 0:
            return 0
        return self.most + block * self.thousandths // 1000 - self.thousandths // 1000

    def fitting(self, room: int) -> int:
        """How many whole blocks fit into so many places; at least one."""
        return max(1, bisect.bisect_right(range(room + 2), room, key=self.before) - 1)

    def within(self, room: int) -> Counts:
        """The same average, and no more than an eighth of the room at once."""
        average = -(-self.thousandths // 1000)
        return Counts(self.thousandths, min(self.most, max(average, room // 8)))


_ONE: Final = Counts(1000, 1)


@dataclass(frozen=True, slots=True)
class RowSizes:
    """One of M-BEIR's 16 rows."""

    dataset: str
    dataset_id: int
    task_id: int
    queries: int
    """In the test split."""
    pool: int
    """Candidates of its local pool."""
    val: int
    train: int
    train_pool: int
    block: Counts = _ONE
    """Candidates that show the same thing and stand next to one another."""
    answers: Counts | None = None
    """How many of a block answer a query, where that is not all of it."""
    val_pool: int = 0
    """Of the validation split, where it has a pool of its own."""

    @property
    def name(self) -> str:
        """As in file names, for example ``webqa_task1``."""
        return f"{self.dataset}_task{self.task_id}"

    def scaled(self, share: float) -> RowSizes:
        """The row at a share of its size, with a few dozen of everything at least."""

        def size(real: int, least: int) -> int:
            return max(min(real, least), round(real * share))

        pool, train_pool = size(self.pool, 48), size(self.train_pool, 48)
        room = min(pool, train_pool)
        block = self.block.within(room)
        answers = self.answers and self.answers.within(room)
        return RowSizes(
            dataset=self.dataset,
            dataset_id=self.dataset_id,
            task_id=self.task_id,
            queries=size(self.queries, 24),
            pool=pool,
            val=size(self.val, 12),
            train=size(self.train, 48),
            train_pool=train_pool,
            block=block,
            answers=answers,
            val_pool=size(self.val_pool, 48),
        )


ROWS: Final = (
    RowSizes("visualnews", 0, 0, 19_995, 542_246, 20_000, 99_000, 99_000, Counts(1000, 2)),
    RowSizes("mscoco", 9, 0, 24_809, 5_000, 24_800, 100_000, 20_000, Counts(1006, 8), val_pool=5_000),
    RowSizes("fashion200k", 1, 0, 1_719, 201_824, 1_700, 15_000, 15_000, Counts(2802, 35)),
    RowSizes("webqa", 2, 1, 2_455, 544_457, 1_700, 16_000, 16_000, Counts(2039, 4)),
    RowSizes("edis", 3, 2, 3_241, 1_047_067, 3_200, 26_000, 52_000, Counts(2569, 8)),
    RowSizes("webqa", 2, 2, 2_511, 403_196, 1_700, 17_000, 17_000, Counts(1440, 2)),
    RowSizes("visualnews", 0, 3, 20_000, 537_568, 20_000, 100_000, 100_000),
    RowSizes("mscoco", 9, 3, 5_000, 24_809, 5_000, 113_000, 113_000, Counts(4998, 5), val_pool=24_800),
    RowSizes("fashion200k", 1, 3, 4_889, 61_707, 4_800, 15_000, 15_000),
    RowSizes("nights", 4, 4, 2_120, 40_038, 2_000, 16_000, 16_000),
    RowSizes("oven", 5, 6, 50_004, 676_667, 50_000, 150_000, 150_000),
    RowSizes(
        "infoseek", 6, 6, 11_323, 611_651, 11_000, 141_000, 141_000, Counts(8852, 173), Counts(5520, 65)
    ),
    RowSizes("fashioniq", 7, 7, 6_003, 74_381, 2_000, 16_000, 16_000, Counts(1001, 4)),
    RowSizes("cirr", 8, 7, 4_170, 21_551, 2_000, 26_000, 26_000, Counts(1010, 3)),
    RowSizes("oven", 5, 8, 14_741, 335_135, 14_700, 157_000, 157_000),
    RowSizes(
        "infoseek", 6, 8, 17_593, 481_782, 17_600, 143_203, 143_203, Counts(16_712, 127), Counts(6463, 127)
    ),
)
"""In the order of the papers' tables, which is the order of the pools in the union pool."""

UPSAMPLED: Final = {"webqa": 100_000, "edis": 50_000, "nights": 50_000, "fashioniq": 50_000, "cirr": 50_000}
"""Lines that these data sets have in the union training file, where their queries are repeated."""

LONGEST_TEXT: Final = 60_546
"""Characters of one OVEN article, the longest text there is."""

LONGEST_SIDE: Final = 51_200
"""Pixels of the widest picture; its shorter side is 256."""


class Told(NamedTuple):
    """A concept in words."""

    noun: str
    thing: str
    """``striped red anchor``."""
    surroundings: str
    """``in a ring, on navy``."""
    changed: str
    """All but the noun, as a wish."""
    facts: tuple[Fact, ...]


class Concepts:
    """Things that a picture shows and a text names."""

    def __init__(self, count: int, *, seed: int) -> None:
        codes = np.flatnonzero(possible_products())
        np.random.default_rng((seed, 3)).shuffle(codes)
        self._codes = [int(code) for code in codes[:count]]
        self._seed = seed
        self._alike: dict[int, list[int]] = defaultdict(list)
        for number, code in enumerate(self._codes):
            self._alike[Product.of(code).shape].append(number)
        self.told = cache(self._tell)

    def __len__(self) -> int:
        return len(self._codes)

    def product(self, concept: int) -> Product:
        """What is drawn."""
        return Product.of(self._codes[concept])

    def lookalike(self, concept: int) -> int:
        """Another concept of the same shape, if there is any."""
        alike = self._alike[self.product(concept).shape]
        return alike[(alike.index(concept) + 1) % len(alike)]

    def _tell(self, concept: int) -> Told:
        product = self.product(concept)
        words = product.words()
        fill = FILL_WORDS[words["fill"]].adjectives[0]
        frame = FRAME_WORDS[words["frame"]][0]
        return Told(
            noun=words["shape"],
            thing=f"{fill} {words['colour']} {words['shape']}",
            surroundings=f"{frame}, on {words['background']}",
            changed=f"{fill} {words['colour']} {frame} and stands on {words['background']}",
            facts=facts_of(product.code, seed=self._seed),
        )


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


_SOURCES: Final = ("bbc", "guardian", "usa_today", "washington_post")
_CATEGORIES: Final = ("dresses", "jackets", "pants", "skirts", "tops")
_STRIPES: Final[dict[str, tuple[str, RGB]]] = {
    "visualnews": ("news", (235, 235, 235)),
    "edis": ("news", (235, 235, 235)),
    "fashion200k": ("fashion", (230, 30, 140)),
    "fashioniq": ("fashion", (230, 30, 140)),
    "webqa": ("wiki", (30, 60, 200)),
    "oven": ("wiki", (30, 60, 200)),
    "infoseek": ("wiki", (30, 60, 200)),
    "mscoco": ("common", (20, 130, 60)),
    "nights": ("common", (20, 130, 60)),
    "cirr": ("common", (20, 130, 60)),
}
"""What sort of pictures a data set has, and the colour of the stripe at their foot that tells it."""
_LOOKS: Final = 3
"""Sizes and angles in which things are drawn; few, since each look of a shape is prepared first."""
_STRIPE: Final = 6
"""Height of the stripe in pixels."""
_QUERIES_FROM: Final[dict[Split, int]] = {"test": 20_000_000, "val": 30_000_000, "train": 40_000_000}
"""Pictures of queries are numbered apart from those of candidates, which have their did's number."""


def candidate_picture(shelf: Shelf, place: int, block: int) -> str:
    """Where the picture of a candidate lies (spec, section 1.9)."""
    if shelf.row.dataset in {"oven", "infoseek"}:  # both show the picture of the article, once
        entity = wikidata_id(shelf, block)
        return f"mbeir_images/oven_images/wikipedia_images_full/{entity[:4]}/{entity}.jpg"
    train = shelf.kind == "train"
    return _path(shelf.row.dataset, shelf.first_did + place, train=train, asks=False)


def query_picture(asking: Asking, number: int) -> str:
    """Where the picture of a query lies."""
    number += _QUERIES_FROM[asking.split] + asking.first_qid
    return _path(asking.row.dataset, number, train=asking.split == "train", asks=True)


def wikidata_id(shelf: Shelf, block: int) -> str:
    """The thing that an article of OVEN and chunks of InfoSeek are about."""
    return f"Q{shelf.row.task_id}{int(shelf.kind == 'train')}{block:07d}"


def _path(dataset: str, number: int, *, train: bool, asks: bool) -> str:
    folder, name = f"{number // 1000:05d}", f"{number:09d}"
    match dataset:
        case "visualnews":
            tail = f"visualnews_images/{_SOURCES[number % 4]}/images/{folder}/{number % 1000:03d}.jpg"
        case "fashion200k":
            tail = f"fashion200k_images/women/{_CATEGORIES[number % 5]}/{folder}/{name}_0.jpeg"
        case "nights":
            tail = f"nights_images/{'ref' if asks else 'distort'}/{number // 1000 % 1000:03d}/{name}.jpg"
        case "oven" | "infoseek":
            image_id = f"{'oven' if dataset == 'oven' else 'seek'}_{number:08d}"
            tail = f"oven_images/{image_id[-8:-6]}/{image_id}.jpg"
        case "fashioniq":
            tail = f"fashioniq_images/B{name}.jpg"
        case "cirr":
            tail = f"cirr_images/{f'train/{number % 100}' if train else 'test1'}/{name}.jpg"
        case "mscoco":
            year = "train2014" if train else "val2014"
            tail = f"mscoco_images/{year}/COCO_{year}_{number:012d}.jpg"
        case _:
            tail = f"{dataset}_images/{name}.jpg"
    return f"mbeir_images/{tail}"


class Pictures:
    """Puts pictures where they belong; or nowhere, if there shall be none."""

    def __init__(self, root: Path, concepts: Concepts, *, wanted: bool) -> None:
        self._root = root
        self._concepts = concepts
        self._wanted = wanted
        self._drawn = root / ".drawn"
        self._folders: set[Path] = set()
        self._sources: set[Path] = set()
        self.count = 0
        """Files put in place."""

    def place(self, relative: str, concept: int, dataset: str) -> str:
        """Let a concept's picture, in the data set's manner, lie there; the same path."""
        if not self._wanted:
            return relative
        path = self._root / relative
        if path.parent not in self._folders:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._folders.add(path.parent)
        source = self._source(concept, dataset)
        try:
            os.link(source, path)
        except FileExistsError:
            return relative
        except OSError:  # no hard links here, or no more of this file
            shutil.copyfile(source, path)
        self.count += 1
        return relative

    def place_widest(self, relative: str) -> str:
        """Put the outlier there: 256 pixels high and as wide as M-BEIR's widest."""
        if self._wanted:
            path = self._root / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            Image.new("RGB", (LONGEST_SIDE, 256), "navy").save(path, "JPEG", quality=50)
        return relative

    def finish(self) -> None:
        """The drawings are linked from everywhere; their own names go."""
        if self._wanted:
            shutil.rmtree(self._drawn)

    def _source(self, concept: int, dataset: str) -> Path:
        """The drawing, made when it is first wanted."""
        manner, colour = _STRIPES[dataset]
        path = self._drawn / f"{manner}-{concept}.jpg"
        if path not in self._sources:
            self._drawn.mkdir(exist_ok=True)
            picture = draw(self._concepts.product(concept), Pose(concept % _LOOKS))
            picture[-_STRIPE:] = colour
            save(picture, path)
            self._sources.add(path)
        return path


Row = dict[str, Any]

_WITHOUT_TASK: Final = frozenset({"nights", "fashioniq", "cirr"})
"""Data sets whose training files do not say the task."""
_LONG_EVERY: Final = 8
"""Of so many articles, one is as long as they really are; the others are short to save room."""
_MORE: Final = (
    " Visitors have described it many times, and the accounts agree in most respects. Its history is told in"
    " several books, none of which is easy to come by today. A second part of the article is about the people"
    " who found it, and a third about those who wrote of it later. What is known for certain is little."
    " Further reading is listed below, together with the sources of the figures that were given above."
)


class Records:
    """Makes the rows of every file, and puts pictures where the rows say that they are."""

    def __init__(self, concepts: Concepts, pictures: Pictures, *, seed: int) -> None:
        self._concepts = concepts
        self._pictures = pictures
        self._seed = seed

    def candidates(self, shelf: Shelf) -> Iterator[Row]:
        """All of a pool."""
        return (self.candidate(shelf, member) for member in shelf.members())

    def candidate(self, shelf: Shelf, member: Member) -> Row:
        """One candidate."""
        place, block = member
        dataset = shelf.row.dataset
        modality = TASKS[shelf.row.task_id][1]
        concept = self._concept(shelf, block)
        row: Row = {"txt": None, "img_path": None, "modality": modality.mbeir, "did": shelf.did(place)}
        if modality is not Modality.IMAGE:
            row["txt"] = _candidate_text(shelf, member, self._concepts.told(concept))
        if modality is not Modality.TEXT:
            path = candidate_picture(shelf, place, block)
            row["img_path"] = self._pictures.place(path, concept, dataset)
            if shelf.row.name == "oven_task8" and _last(shelf, place):
                self._pictures.place_widest(path)
        elif dataset == "webqa":
            del row["img_path"]
        if dataset != "visualnews":
            row["src_content"] = _candidate_source(shelf, member)
        return row if place % 2 else dict(reversed(row.items()))

    def queries(self, asking: Asking) -> Iterator[Row]:
        """All of a row in a split."""
        return (self.query(asking, number) for number in range(asking.size))

    def query(self, asking: Asking, number: int) -> Row:
        """One query."""
        block = asking.block(number)
        modality = TASKS[asking.row.task_id][0]
        concept = self._concept(asking.shelf, block)
        text = image = None
        if modality is not Modality.IMAGE:
            text = _query_text(asking, number, self._concepts.told(concept))
        if modality is not Modality.TEXT:
            shown = self._concepts.lookalike(concept) if asking.row.task_id == 7 else concept
            image = self._pictures.place(query_picture(asking, number), shown, asking.row.dataset)
        row: Row = {
            "qid": asking.qid(number),
            "query_txt": text,
            "query_img_path": image,
            "query_modality": modality.mbeir,
            "query_src_content": None,
            "pos_cand_list": asking.positives(block),
            "neg_cand_list": asking.negatives(block),
            "task_id": asking.row.task_id,
        }
        row["query_src_content"] = _query_source(asking, number, row)
        if asking.split == "train" and asking.row.dataset in _WITHOUT_TASK:
            del row["task_id"]
        return row if number % 2 else dict(reversed(row.items()))

    def _concept(self, shelf: Shelf, block: int) -> int:
        return shelf.concept(block, seed=self._seed, concepts=len(self._concepts))


def _last(shelf: Shelf, place: int) -> bool:
    return shelf.kind == "local" and place == shelf.size - 1


def _candidate_text(shelf: Shelf, member: Member, told: Told) -> str:
    place, block = member
    match shelf.row.dataset:
        case "visualnews":
            text = f"Reporters saw a {told.thing} {told.surroundings}."
        case "mscoco":
            text = f"{('A', 'One', 'Some', 'That', 'This')[place % 5]} {told.thing} {told.surroundings}."
        case "fashion200k":
            text = f"{told.thing.capitalize()} print {told.surroundings}."
        case "webqa":
            if shelf.row.task_id == 2:
                text = f"{told.thing.capitalize()} {told.surroundings}."
            else:
                text = _fact(told, place - shelf.places(block).start)
        case "edis":
            text = f"Headline: {told.thing} {told.surroundings} is found."
        case "oven":
            text = f"{told.thing.capitalize()}. It stands {told.surroundings}, as the article says."
        case _:
            text = f"{told.thing.capitalize()}. {_fact(told, _part(shelf, member))}"
    if shelf.row.dataset in {"oven", "infoseek"} and block % _LONG_EVERY == 0:
        text += _MORE
    if shelf.row.name == "oven_task6" and _last(shelf, place):
        text += _MORE * (LONGEST_TEXT // len(_MORE))
        text = text[: LONGEST_TEXT - 1].ljust(LONGEST_TEXT - 1, "m") + "."
    return text


def _part(shelf: Shelf, member: Member) -> int:
    """Which fact a chunk of an article tells: the first one, if it answers what is asked."""
    places = shelf.places(member.block)
    answers = shelf.row.answers
    number = member.place - places.start
    return 0 if answers is None or number < answers.of(member.block) else number


def _fact(told: Told, number: int) -> str:
    fact = told.facts[number % len(told.facts)]
    return f"The {fact.kind} of the {told.thing} {told.surroundings} is {fact.value}."


def _query_text(asking: Asking, number: int, told: Told) -> str:
    match asking.row.dataset:
        case "visualnews":
            text = f"{told.thing.capitalize()} {told.surroundings}, seen by our correspondent."
        case "mscoco":
            text = f"There is a {told.thing} {told.surroundings}."
        case "fashion200k":
            text = f"{told.thing.capitalize()} {told.surroundings}."
        case "webqa" if asking.row.task_id == 1:
            text = f"What is the {told.facts[0].kind} of the {told.thing} {told.surroundings}?"
        case "webqa":
            text = f"Where does the {told.thing} {told.surroundings} stand?"
        case "edis":
            text = f"The {told.thing} {told.surroundings} that was in the news."
        case "oven":
            text = ("What is this?", "Which thing is shown?")[number % 2]
        case "infoseek":
            text = f"What is the {told.facts[0].kind} of this?"
        case "fashioniq":
            text = f"Is {told.changed} and is otherwise alike."
        case _:
            text = f"Make it one that is {told.changed}."
    return text


def _candidate_source(shelf: Shelf, member: Member) -> str | None:
    """What the data set says about where it came from: JSON in a string."""
    place, block = member
    number = shelf.first_did + place
    source: Row
    match shelf.row.dataset:
        case "cirr":
            source = {"id": f"dev-{number}"}
        case "edis":
            source = {"candidate_id" if place % 2 else "id": f"e{number}"}
        case "fashioniq":
            source = {"img_id": f"B{number:09d}"}
        case "nights":
            source = {"image_id": f"{number:06d}"}
        case "webqa":
            source = {"snippet_id" if shelf.row.task_id == 1 else "image_id": number}
        case "oven" | "infoseek":
            source = {"wikidata_id": wikidata_id(shelf, block), "wikipedia_title": f"Thing {block}"}
        case _:
            return None
    return json.dumps(source)


def _query_source(asking: Asking, number: int, row: Row) -> str | None:
    """What the data set says about a query: JSON in a string."""
    count = asking.first_qid + number
    entity = wikidata_id(asking.shelf, asking.block(number))
    positives, negatives = row["pos_cand_list"], row["neg_cand_list"]
    source: Row
    match asking.row.dataset:
        case "cirr":
            source = {"id": count}
        case "edis":
            source = {
                "id": count,
                "pos_cand_candidate_id_scores": [{"candidate_id": did, "score": 3} for did in positives],
                "neg_cand_candidate_id_scores": [{"candidate_id": did, "score": 1} for did in negatives],
            }
        case "fashioniq":
            source = {"candidate_img_id": f"B{count:09d}"}
        case "nights":
            source = {"id": count, "target": count % 2, "split": asking.split, "is_imagenet": False}
        case "webqa":
            source = {"Guid": f"g{count}", "Qcate": "text" if asking.row.task_id == 1 else "color"}
        case "oven":
            source = {
                "data_id": f"oven_{count:08d}",
                "image_id": f"oven_{count:08d}",
                "entity_id": entity,
                "data_split": asking.split,
            }
        case "infoseek":
            source = {
                "data_id": f"infoseek_{count:08d}",
                "answer": [entity],
                "answer_eval": [entity],
                "data_split": asking.split,
                "entity_id": entity,
            }
        case _:
            return None
    return json.dumps(source)


_PAGE_TEXT: Final = (
    "Give me the encyclopedia paragraph that settles the question about this picture.",
    "Which passage tells what is asked about the thing shown?",
    "Look up the paragraph that answers the question on the image.",
    "Fetch the passage of an article that goes with this picture and question.",
)
_PAGE: Final = (
    "Give me the encyclopedia picture with its paragraph that settles the question about this picture.",
    "Which illustrated passage tells what is asked about the thing shown?",
    "Look up the article image and text that answer the question on the image.",
    "Fetch the picture and passage of an article that go with this picture and question.",
)
_TEXTS: Final[dict[str, tuple[str, str, str, str]]] = {
    "visualnews_task0": (
        "Which press photo goes with this news caption?",
        "Give me the newspaper picture that was printed above these words.",
        "Look up the news photo to this caption.",
        "Fetch the reporter's picture that the line describes.",
    ),
    "mscoco_task0": (
        "Give me the snapshot that this caption describes.",
        "Which everyday photo shows this?",
        "Look up the common scene that fits the sentence.",
        "Fetch an ordinary picture with what is said here.",
    ),
    "fashion200k_task0": (
        "Which garment photo does this shop text describe?",
        "Give me the fashion picture with this style.",
        "Look up the product photo of these clothes.",
        "Fetch the picture of a piece of clothing like this.",
    ),
    "webqa_task1": (
        "Give me the encyclopedia passage that answers the question.",
        "Which paragraph holds the answer?",
        "Look up the text with the fact that is asked for.",
        "Fetch a passage in which the answer is written.",
    ),
    "edis_task2": (
        "Which news image is the one described here?",
        "Give me the press image that matches the headline.",
        "Look up the image that the report is about.",
        "Fetch the news image to these words.",
    ),
    "webqa_task2": (
        "Give me the encyclopedia image that answers the question.",
        "Which image holds the answer?",
        "Look up the image in which the answer can be seen.",
        "Fetch an article's image that settles the question.",
    ),
    "visualnews_task3": (
        "Which caption was printed under this press photo?",
        "Give me the newspaper line that goes with the picture.",
        "Look up the news caption of this photo.",
        "Fetch the words that the reporter wrote about this picture.",
    ),
    "mscoco_task3": (
        "Give me a caption of this snapshot.",
        "Which sentence describes this everyday photo?",
        "Look up the words for this common scene.",
        "Fetch a line that says what the ordinary picture shows.",
    ),
    "fashion200k_task3": (
        "Which shop text describes the clothes in this photo?",
        "Give me the style of this garment in words.",
        "Look up the product text of this fashion picture.",
        "Fetch a description of the piece of clothing.",
    ),
    "nights_task4": (
        "Give me the picture that looks most like this one.",
        "Which image resembles this one?",
        "Look up a photo that people would call the same.",
        "Fetch the nearest look-alike of this picture.",
    ),
    "oven_task6": _PAGE_TEXT,
    "infoseek_task6": _PAGE_TEXT,
    "fashioniq_task7": (
        "Which garment is like this one, but changed as told?",
        "Give me the fashion photo that differs from this one as described.",
        "Look up the clothes with this alteration.",
        "Fetch the product photo after the wish is granted.",
    ),
    "cirr_task7": (
        "Give me the everyday photo that is like this one, but changed as told.",
        "Which common picture differs from this one as described?",
        "Look up the scene with this modification.",
        "Fetch the snapshot that this one becomes.",
    ),
    "oven_task8": _PAGE,
    "infoseek_task8": _PAGE,
}

INSTRUCTIONS: Final = tuple(
    InstructionRow(*TASKS[row.task_id], row.dataset, row.dataset_id, _TEXTS[row.name]) for row in ROWS
)


VERSION: Final = 1
"""Raised whenever the same seed would give other bytes."""
CONCEPTS: Final = 100_000
"""Different things at full size; a share of M-BEIR has that share of them."""
FEWEST_CONCEPTS: Final = 48


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsalSummary:
    """What was drawn."""

    folder: Path
    share: float
    """Of M-BEIR's size; small rows have some dozens of everything all the same."""
    seed: int
    rows: int
    concepts: int
    """Different things, each with its own picture."""
    candidates: dict[str, int]
    """Candidates of each split's union pool."""
    queries: dict[str, int]
    """Queries of each split, all rows together."""
    training_lines: int
    """Of the union training file, which repeats the queries of small data sets."""
    pictures: int
    """Picture files; 0 without pictures."""
    drawn: bool
    """False when the same rehearsal was already there."""


def draw_rehearsal(
    out: Path, *, share: float, seed: int = 0, pictures: int | None = None
) -> RehearsalSummary:
    """Write a stand-in for M-BEIR at a share of its size.

    Parameters
    ----------
    share
        0.01 has 56,000 candidates, 1.0 all 5,609,079.
    pictures
        different things to tell apart, each drawn once for news, fashion, encyclopedia and everyday
        pictures; the files of the data set are links to these drawings. 0 writes the paths and no files:
        then only an encoder that looks features up by id (``precomputed:``) can be used. Default: 100,000
        times the share, and 48 at least.

    >>> draw_rehearsal(Path("rehearsal"), share=0.01)  # doctest: +SKIP

    Raises
    ------
    UsageError
        a number is out of range, or ``out`` holds something else.
    """
    _check(share, seed, pictures)
    wanted = pictures != 0
    plan = {"rehearsal": VERSION, "share": share, "seed": seed, "pictures": pictures}
    found = _already_there(out, plan)
    if found is not None:
        return _summary(out, found, drawn=False)
    if wanted:
        font_file()
    unfinished = out.parent / f".{out.name}.partial"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    layout = lay_out([row.scaled(share) for row in ROWS])
    concepts = Concepts(pictures or max(FEWEST_CONCEPTS, round(CONCEPTS * share)), seed=seed)
    placed = Pictures(unfinished, concepts, wanted=wanted)
    counts = _Writer(unfinished, layout, Records(concepts, placed, seed=seed)).write()
    placed.finish()
    facts = {"plan": plan, "counts": {"concepts": len(concepts), "pictures": placed.count, **counts}}
    write_json(unfinished / "rehearsal.json", facts)
    if out.exists():
        out.rmdir()
    unfinished.rename(out)
    return _summary(out, facts, drawn=True)


class _Writer:
    """Writes the files; the pictures come along with the rows."""

    def __init__(self, root: Path, layout: Layout, records: Records) -> None:
        self._root = root
        self._layout = layout
        self._records = records

    def write(self) -> dict[str, Any]:
        """Write everything; what there is."""
        write_instructions(self._root / "instructions" / "query_instructions.tsv", INSTRUCTIONS)
        pools = {"train": self._training_pool(), "test": self._local_pools(), "val": self._validation_pool()}
        queries = {split: sum(asking.size for asking in self._layout.of(split)) for split in SPLITS}
        lines = self._training_queries()
        for split in ("val", "test"):
            self._queries(split)
        union = self._root / "query" / "union_val" / "mbeir_union_val.jsonl"
        _concatenate(union, sorted((self._root / "query" / "val").glob("*.jsonl")))
        return {
            "candidates": {split: pools[split] for split in SPLITS},
            "queries": queries,
            "training_lines": lines,
        }

    def _local_pools(self) -> int:
        """Every row's own pool; the union of the test pools, in the order of the papers' tables."""
        own, total = [], 0
        for shelf in self._layout.shelves:
            if shelf.kind == "train":
                continue
            has_two = bool(shelf.row.val_pool)
            split = "" if not has_two else "_val" if shelf.kind == "val" else "_test"
            path = self._root / "cand_pool" / "local" / f"mbeir_{shelf.row.name}{split}_cand_pool.jsonl"
            count = _write_lines(path, self._records.candidates(shelf))
            if shelf.kind == "local":
                own.append(path)
                total += count
        _concatenate(self._union("test"), own)
        return total

    def _training_pool(self) -> int:
        shelves = [shelf for shelf in self._layout.shelves if shelf.kind == "train"]
        return _write_lines(self._union("train"), chain.from_iterable(map(self._records.candidates, shelves)))

    def _validation_pool(self) -> int:
        """What the validation queries ask for."""
        return _write_lines(
            self._union("val"),
            (
                self._records.candidate(asking.shelf, member)
                for asking in self._layout.of("val")
                for member in asking.shelf.part(asking.first_block, asking.blocks)
            ),
        )

    def _union(self, split: str) -> Path:
        return self._root / "cand_pool" / "global" / f"mbeir_union_{split}_cand_pool.jsonl"

    def _queries(self, split: str) -> None:
        for asking in self._layout.askings:
            if asking.split != split:
                continue
            name = f"mbeir_{asking.row.name}_{split}"
            _write_lines(self._root / "query" / split / f"{name}.jsonl", self._records.queries(asking))
            self._qrels(split, f"{name}_qrels.txt", [asking])

    def _training_queries(self) -> int:
        """A file for each data set, and all in one, where small data sets are repeated."""
        askings: dict[str, list[Asking]] = {}
        for asking in self._layout.of("train"):
            askings.setdefault(asking.row.dataset, []).append(asking)
        lines: dict[Path, int] = {}
        for dataset, some in askings.items():
            path = self._root / "query" / "train" / f"mbeir_{dataset}_train.jsonl"
            size = _write_lines(path, chain.from_iterable(map(self._records.queries, some)))
            real = sum(row.train for row in ROWS if row.dataset == dataset)
            lines[path] = round(size * max(1.0, UPSAMPLED.get(dataset, 0) / real))
            self._qrels("train", f"mbeir_{dataset}_train_qrels.txt", some)
        whole = self._root / "query" / "union_train" / "mbeir_union_up_train.jsonl"
        with replacing(whole) as union:
            for path, count in lines.items():
                union.writelines(islice(_repeated(path), count))
        return sum(lines.values())

    def _qrels(self, split: str, name: str, askings: Iterable[Asking]) -> None:
        with replacing(self._root / "qrels" / split / name) as file:
            for asking in askings:
                for number in range(asking.size):
                    qid, task = asking.qid(number), asking.row.task_id
                    file.writelines(
                        f"{qid} 0 {did} 1 {task}\n" for did in asking.positives(asking.block(number))
                    )


def _repeated(path: Path) -> Iterator[str]:
    """The lines of a file, from the beginning again when it ends."""
    while True:
        with path.open(encoding="utf-8") as file:
            yield from file


def _write_lines(path: Path, rows: Iterable[Row]) -> int:
    count = 0
    with replacing(path) as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
            count += 1
    return count


def _concatenate(path: Path, parts: Iterable[Path]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as whole:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, whole, 1 << 20)


def _check(share: float, seed: int, pictures: int | None) -> None:
    if not 0 < share <= 1:
        raise UsageError(f"share is {share}; give a number above 0 and up to 1, the whole of M-BEIR's size")
    if seed < 0:
        raise UsageError(f"seed is {seed}; give a number from 0 up")
    if pictures is not None and not 0 <= pictures <= CONCEPTS:
        raise UsageError(f"pictures is {pictures:,}; give a number up to {CONCEPTS:,}, or none")


def _already_there(out: Path, plan: dict[str, Any]) -> dict[str, Any] | None:
    """What is known about the same rehearsal at ``out``; None if the place is free."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; give a folder that does not exist yet")
    if not out.exists() or not any(out.iterdir()):
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):
        found: dict[str, Any] = json.loads((out / "rehearsal.json").read_text())
        if found["plan"] == plan:
            return found
    raise UsageError(
        f"{out} is not empty and does not hold this rehearsal (share {plan['share']}, seed {plan['seed']}); "
        "give another folder, or remove this one"
    )


def _summary(out: Path, facts: dict[str, Any], *, drawn: bool) -> RehearsalSummary:
    plan = facts["plan"]
    return RehearsalSummary(
        folder=out, share=plan["share"], seed=plan["seed"], rows=len(ROWS), drawn=drawn, **facts["counts"]
    )
