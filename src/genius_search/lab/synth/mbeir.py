"""A synthetic stand-in for M-BEIR: its files and field conventions, all 16 rows, at any share of its size.

Complete runs (check, fit, evaluate, index) can be rehearsed with it before 169 GB are downloaded. Every query
and candidate is computed from its number, so that files of any size are written without keeping anything.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import tomllib
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from jaxtyping import Int64
from PIL import Image

from genius_search.data.mbeir import Layout, candidate_row, query_row, replacing, write_json_lines
from genius_search.errors import UsageError
from genius_search.lab.mbeir_files import write_qrels
from genius_search.lab.published.numbers import SIZES
from genius_search.lab.synth.folder import concatenate, copy_instructions, draw_once
from genius_search.lab.synth.pictures import Pose, draw, font_file, save
from genius_search.lab.synth.world import (
    SPLITS,
    WORDS,
    Product,
    Split,
    facts_of,
    possible_products,
)
from genius_search.records import TASKS, Candidate, Modality, Query


class Block(NamedTuple):
    """Sizes of blocks: the first has the most, the others the average; at least one."""

    thousandths: int
    """The average, times a thousand."""
    most: int

    def within(self, room: int) -> Block:
        """Return the same average with at most an eighth of the room in one block."""
        average = -(-self.thousandths // 1000)
        return Block(self.thousandths, min(self.most, max(average, room // 8)))

    def starts(self, size: int) -> Int64[np.ndarray, " bounds"]:
        """Return where each whole block of ``size`` places begins, and where the last ends."""
        numbers = np.arange(size + 1)
        starts = np.append(0, self.most + (numbers + 1) * self.thousandths // 1000 - self.thousandths // 1000)
        return starts[: max(2, int(np.searchsorted(starts, size, side="right")))].clip(max=size)


@dataclass(frozen=True, slots=True)
class RowSizes:
    """The sizes of one of M-BEIR's 16 rows."""

    dataset: str
    dataset_id: int
    task_id: int
    queries: int
    """Test queries."""
    pool: int
    """Candidates of its local pool."""
    val: int
    train: int
    train_pool: int
    block: Block = Block(1000, 1)
    """Candidates that show the same thing and stand next to one another."""
    val_pool: int = 0
    """Candidates of the validation split, where it has a pool of its own."""
    query_texts: Sequence[str] = ()
    """Templates, used in turn."""
    candidate_texts: Sequence[str] = ()
    """Templates, used in turn."""

    @property
    def name(self) -> str:
        """As in file names, for example ``webqa_task1``."""
        return f"{self.dataset}_task{self.task_id}"

    @staticmethod
    def of(row: Mapping[str, str]) -> RowSizes:
        """Return the sizes in a line of ``mbeir.csv``."""
        name = row["row"]
        dataset, _, task = name.rpartition("_task")
        sizes = {
            column: int(row[column]) for column in ("dataset_id", "val", "val_pool", "train", "train_pool")
        }
        return RowSizes(
            dataset=dataset,
            task_id=int(task),
            queries=SIZES[name].queries,
            pool=SIZES[name].pool,
            block=Block(int(row["block"]), int(row["largest_block"])),
            query_texts=_TEXTS["queries"].get(name, ()),
            candidate_texts=_TEXTS["candidates"].get(name, ()),
            **sizes,
        )

    def scaled(self, share: float) -> RowSizes:
        """Return the row at a share of its size, with a few dozen of everything at least."""

        def size(real: int, least: int) -> int:
            return max(min(real, least), round(real * share))

        pool, train_pool = size(self.pool, 48), size(self.train_pool, 48)
        room = min(pool, train_pool)
        return replace(
            self,
            queries=size(self.queries, 24),
            pool=pool,
            val=size(self.val, 12),
            train=size(self.train, 48),
            train_pool=train_pool,
            block=self.block.within(room),
            val_pool=size(self.val_pool, 48),
        )


_TEXTS: Final = tomllib.loads(Path(__file__).with_name("mbeir.toml").read_text(encoding="utf-8"))
_LINES: Final = Path(__file__).with_name("mbeir.csv").read_text(encoding="utf-8").splitlines()
ROWS: Final = tuple(map(RowSizes.of, csv.DictReader(_LINES)))
"""In the order of the papers' tables, which is the order of the pools in the union pool."""
UPSAMPLED: Final[dict[str, int]] = _TEXTS["upsampled"]
LONGEST_TEXT: Final = 60_546
"""Characters of one OVEN article, the longest text there is."""
LONGEST_SIDE: Final = 51_200
"""Pixels of the widest picture; its shorter side is 256."""
VERSION: Final = 4
"""Raised whenever the same seed would give other bytes."""
CONCEPTS: Final = 100_000
"""Different things at full size; a share of M-BEIR has that share of them."""
MIN_CONCEPTS: Final = 48
_PARTNERS: Final = {"oven": "infoseek", "infoseek": "oven"}
"""Data sets about the same things, that list each other's candidates as positives."""
_WITHOUT_TASK: Final = frozenset({"nights", "fashioniq", "cirr"})
"""Data sets whose training files do not name the task."""
_WITHOUT_SOURCE: Final = frozenset({"visualnews", "mscoco", "fashion200k"})


class Concept(NamedTuple):
    """A thing that pictures show and texts name, with values for the templates of texts."""

    product: Product
    words: dict[str, str]
    facts: tuple[str, ...]


class Concepts:
    """The different things of a data set."""

    def __init__(self, count: int, *, seed: int) -> None:
        codes = np.flatnonzero(possible_products())
        np.random.default_rng((seed, 3)).shuffle(codes)
        self._products = [Product.of(int(code)) for code in codes[:count]]
        self._seed = seed
        self._by_shape: dict[int, list[int]] = defaultdict(list)
        for number, product in enumerate(self._products):
            self._by_shape[product.shape].append(number)
        self.get = cache(self._get)

    def __len__(self) -> int:
        return len(self._products)

    def lookalike(self, concept: int) -> int:
        """Return another concept of the same shape, if there is any."""
        alike = self._by_shape[self._products[concept].shape]
        return alike[(alike.index(concept) + 1) % len(alike)]

    def _get(self, concept: int) -> Concept:
        product = self._products[concept]
        names = product.words()
        fill, frame = WORDS["fills"][names["fill"]]["adjectives"][0], WORDS["frames"][names["frame"]][0]
        thing = f"{fill} {names['colour']} {names['shape']}"
        place = f"{frame}, on {names['background']}"
        facts = facts_of(product.code, seed=self._seed)
        words = {
            "thing": thing,
            "Thing": thing.capitalize(),
            "place": place,
            "changed": f"{fill} {names['colour']} {frame} and stands on {names['background']}",
            "asked": facts[0].kind,
        }
        texts = tuple(f"The {fact.kind} of the {thing} {place} is {fact.value}." for fact in facts)
        return Concept(product, words, texts)


class Shelf:
    """A row's candidates for some splits: numbered from ``first_did``, in blocks, strays at the end."""

    def __init__(
        self, row: RowSizes, kind: Literal["local", "val", "train"], first_did: int, size: int
    ) -> None:
        self.row, self.kind, self.first_did, self.size = row, kind, first_did, size
        starts = row.block.starts(size)
        self.blocks = len(starts) - 1
        """Whole blocks; every candidate after them is a block of its own that no query wants."""
        self._starts = np.append(starts, np.arange(starts[-1] + 1, size + 1))

    def did(self, place: int) -> str:
        """Return the id of a candidate."""
        return f"{self.row.dataset_id}:{self.first_did + place}"

    def places(self, block: int) -> range:
        """Return the places of a block."""
        return range(*self._starts[block : block + 2].tolist())

    def members(self, blocks: range | None = None) -> Iterator[tuple[int, int]]:
        """Yield place and block of each candidate of some blocks, or of all, ids ascending."""
        for block in range(len(self._starts) - 1) if blocks is None else blocks:
            for place in self.places(block):
                yield place, block

    def entity(self, block: int) -> str:
        """Return the Wikidata id of what OVEN's and InfoSeek's articles are about."""
        return f"Q{self.row.task_id}{int(self.kind == 'train')}{block:07d}"


class QuerySet:
    """The queries of a row in a split; each wants one block of its shelf."""

    def __init__(
        self, row: RowSizes, split: Split, first_qid: int, size: int, shelf: Shelf, other: Shelf | None
    ) -> None:
        self.row, self.split, self.first_qid, self.size, self.shelf = row, split, first_qid, size, shelf
        self.other = other
        """The shelf of the partner data set (OVEN, InfoSeek), or of WebQA's other modality."""
        self.first_block = 0
        if split == "train":
            self.blocks = min(row.train, shelf.blocks)
        elif split == "test" or row.val_pool:
            self.blocks = min(row.queries, shelf.blocks)
        else:  # validation wants other blocks than the test, partners the same
            shelves = [shelf, other] if other is not None and row.dataset in _PARTNERS else [shelf]
            room = min(one.blocks for one in shelves)
            self.first_block = min(max(one.row.queries for one in shelves), room - 1)
            self.blocks = min(room - self.first_block, *(one.row.val for one in shelves))

    def block(self, number: int) -> int:
        """Return the block that a query wants."""
        return self.first_block + number % self.blocks

    def positives(self, block: int) -> tuple[str, ...]:
        """Return the ids that answer a query for this block, those of its own data set first."""
        own = tuple(map(self.shelf.did, self.shelf.places(block)))
        if self.row.dataset not in _PARTNERS or self.other is None or block >= self.other.blocks:
            return own
        return own + tuple(map(self.other.did, self.other.places(block)))

    def negatives(self, block: int) -> tuple[str, ...]:
        """Return the ids that nearly answer it, where the data set names such (M-BEIR, section 1.6)."""
        after = self.shelf.places(block).stop
        following = tuple(self.shelf.did((after + step) % self.shelf.size) for step in range(3))
        match self.row.dataset:
            case "webqa" if self.other is not None:
                return following[0], self.other.did(block % self.other.size)
            case "edis":
                return following[:2]
            case "nights":
                return following[:1]
            case "cirr":
                return following
            case _:
                return ()


def plan_rows(rows: list[RowSizes]) -> tuple[list[Shelf], list[QuerySet]]:
    """Give every row its ids: candidates unique in a data set, queries counted anew in each split."""
    next_did: dict[int, int] = defaultdict(lambda: 1)
    shelves: dict[tuple[str, str], Shelf] = {}
    kinds: tuple[Literal["local", "val", "train"], ...] = ("local", "val", "train")
    for kind in kinds:
        for row in rows:
            size = {"local": row.pool, "val": row.val_pool, "train": row.train_pool}[kind]
            if size:
                shelves[row.name, kind] = Shelf(row, kind, next_did[row.dataset_id], size)
                next_did[row.dataset_id] += size
    query_sets: list[QuerySet] = []
    for split in SPLITS:
        next_qid: dict[int, int] = defaultdict(lambda: 1)
        for row in rows:
            size = {"train": row.train, "val": row.val, "test": row.queries}[split]
            kind = "train" if split == "train" else "val" if split == "val" and row.val_pool else "local"
            other = f"{_PARTNERS.get(row.dataset)}_task{row.task_id}"
            if row.dataset == "webqa":
                other = f"webqa_task{3 - row.task_id}"
            shelf, partner = shelves[row.name, kind], shelves.get((other, kind))
            query_sets.append(QuerySet(row, split, next_qid[row.dataset_id], size, shelf, partner))
            next_qid[row.dataset_id] += size
    return list(shelves.values()), query_sets


_NUM_LOOKS: Final = 3
"""Sizes and angles in which things are drawn; few, since each look of a shape is prepared first."""
_QUERIES_FROM: Final[dict[Split, int]] = {"test": 20_000_000, "val": 30_000_000, "train": 40_000_000}
"""Pictures of queries are numbered apart from those of candidates, which have their did's number."""


def _path(dataset: str, number: int) -> str:
    folder = "oven_images/seek" if dataset == "infoseek" else f"{dataset}_images"
    return f"mbeir_images/{folder}/{number // 1000:05d}/{number % 1000:03d}.jpg"


class Pictures:
    """Picture files, which link to one drawing for each concept."""

    def __init__(self, root: Path, concepts: Concepts, *, enabled: bool) -> None:
        self._root, self._concepts, self._enabled = root, concepts, enabled
        self._drawn = root / ".drawn"
        self.count = 0

    def add(self, relative: str, concept: int) -> None:
        """Put a concept's picture at a path."""
        path = self._root / relative
        if self._enabled and not path.exists():
            source = self._drawn / f"{concept}.jpg"
            if not source.exists():
                self._drawn.mkdir(exist_ok=True)
                save(draw(self._concepts.get(concept).product, Pose(concept % _NUM_LOOKS)), source)
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source, path)
            except OSError:  # no hard links on this disk, or no more of this file
                shutil.copyfile(source, path)
            self.count += 1

    def add_widest(self, relative: str) -> None:
        """Replace a picture by one as wide as M-BEIR's widest."""
        if self._enabled:
            path = self._root / relative
            path.unlink()
            Image.new("RGB", (LONGEST_SIDE, 256), "navy").save(path, "JPEG", quality=50)

    def finish(self) -> None:
        """Remove the drawings' own names."""
        if self._enabled:
            shutil.rmtree(self._drawn)


_LONG_EVERY: Final = 8
"""One in so many articles is as long as they really are; the others are short to save room."""
_PADDING: Final[str] = _TEXTS["padding"]
Row = dict[str, Any]


class Records:
    """The rows of every file; pictures are put where the rows say that they are."""

    def __init__(self, concepts: Concepts, pictures: Pictures, *, seed: int) -> None:
        self._concepts, self._pictures, self._seed = concepts, pictures, seed

    def candidate(self, shelf: Shelf, place: int, block: int) -> Row:
        """Return a candidate with M-BEIR's oddities: absent keys, and keys in different orders."""
        row, modality = shelf.row, TASKS[shelf.row.task_id][1]
        concept = self._concept(shelf, block)
        is_last = shelf.kind == "local" and place == shelf.size - 1
        text = image = None
        if modality is not Modality.IMAGE:
            text = self._candidate_text(shelf, place, block, concept)
            if row.name == "oven_task6" and is_last:
                text += _PADDING * (LONGEST_TEXT // len(_PADDING))
                text = text[: LONGEST_TEXT - 1].ljust(LONGEST_TEXT - 1, "m") + "."
        if modality is not Modality.TEXT:
            image = _path(row.dataset, shelf.first_did + place)
            if row.dataset in _PARTNERS:  # both show the picture of the article, once
                entity = shelf.entity(block)
                image = f"mbeir_images/oven_images/wikipedia_images_full/{entity[:4]}/{entity}.jpg"
            self._pictures.add(image, concept)
            if row.name == "oven_task8" and is_last:
                self._pictures.add_widest(image)
        source = self._source(row.dataset, shelf.first_did + place)
        found = candidate_row(Candidate(shelf.did(place), modality, text, image, source))
        found["did"] = found.pop("did")
        found["src_content"] = found.pop("src_content")
        if row.name == "webqa_task1":
            del found["img_path"]
        if row.dataset == "visualnews":
            del found["src_content"]
        return found if place % 2 else dict(reversed(found.items()))

    def query(self, queries: QuerySet, number: int) -> Row:
        """Return a query with M-BEIR's oddities: absent keys, and keys in different orders."""
        row, block = queries.row, queries.block(number)
        modality = TASKS[row.task_id][0]
        concept = self._concept(queries.shelf, block)
        text = image = None
        if modality is not Modality.IMAGE:
            template = row.query_texts[number % len(row.query_texts)]
            text = template.format(**self._concepts.get(concept).words)
        if modality is not Modality.TEXT:
            shown = self._concepts.lookalike(concept) if row.task_id == 7 else concept
            image = _path(row.dataset, _QUERIES_FROM[queries.split] + queries.first_qid + number)
            self._pictures.add(image, shown)
        query = Query(
            qid=f"{row.dataset_id}:{queries.first_qid + number}",
            modality=modality,
            text=text,
            image=image,
            positives=queries.positives(block),
            negatives=queries.negatives(block),
            task_id=row.task_id,
            source=self._source(row.dataset, queries.first_qid + number),
        )
        found = query_row(query)
        if queries.split == "train" and row.dataset in _WITHOUT_TASK:
            del found["task_id"]
        return found if number % 2 else dict(reversed(found.items()))

    @staticmethod
    def _source(dataset: str, number: int) -> str | None:
        """Return ``src_content``, JSON in a string; some data sets have none."""
        return None if dataset in _WITHOUT_SOURCE else json.dumps({"id": number})

    def _concept(self, shelf: Shelf, block: int) -> int:
        """Return the concept of a block; OVEN and InfoSeek have the same under the same number."""
        about = "wiki" if shelf.row.dataset in _PARTNERS else shelf.row.dataset
        key = f"{self._seed} {about} {shelf.row.task_id} {shelf.kind} {block}"
        return zlib.crc32(key.encode()) % len(self._concepts)

    def _candidate_text(self, shelf: Shelf, place: int, block: int, concept: int) -> str:
        _, words, facts = self._concepts.get(concept)
        fact = facts[(place - shelf.places(block).start) % len(facts)]
        templates = shelf.row.candidate_texts
        text = templates[place % len(templates)].format(**words, fact=fact)
        return text + _PADDING if shelf.row.dataset in _PARTNERS and block % _LONG_EVERY == 0 else text


def draw_synthetic_mbeir(
    out: Path, *, share: float, seed: int = 0, pictures: int | None = None
) -> dict[str, Any]:
    """Write a stand-in for M-BEIR at a share of its size.

    Raises UsageError: a number is out of range, or ``out`` holds something else.

    Parameters
    ----------
    share
        0.01 has 56,000 candidates, 1.0 all 5,609,079.
    pictures
        different things, each drawn once; the files of the data set are links to these drawings. 0 writes the
        paths and no files: then only an encoder that looks features up by id (``precomputed:``) can be used.
        Default: 100,000 times the share, and 48 at least.

    >>> draw_synthetic_mbeir(Path("rehearsal"), share=0.01)  # doctest: +SKIP

    Returns
    -------
    dict
        the folder, its settings, the sizes of each split, and ``drawn``: False when it was already there.
    """
    if not 0 < share <= 1:
        raise UsageError(f"share is {share}; give a number above 0 and up to 1, M-BEIR's full size")
    if seed < 0:
        raise UsageError(f"seed is {seed}; give a number from 0 up")
    if pictures is not None and not 0 <= pictures <= CONCEPTS:
        raise UsageError(f"pictures is {pictures:,}; give a number up to {CONCEPTS:,}, or none")
    plan = {"rehearsal": VERSION, "share": share, "seed": seed, "pictures": pictures}

    def write(root: Path) -> dict[str, Any]:
        if pictures != 0:
            font_file()
        concepts = Concepts(pictures or max(MIN_CONCEPTS, round(CONCEPTS * share)), seed=seed)
        files = Pictures(root, concepts, enabled=pictures != 0)
        shelves, query_sets = plan_rows([row.scaled(share) for row in ROWS])
        counts = _write(root, shelves, query_sets, Records(concepts, files, seed=seed))
        files.finish()
        return {"concepts": len(concepts), "pictures": files.count, **counts}

    counts = draw_once(out, "rehearsal", plan, write)
    return {"folder": out, "share": share, "seed": seed, "rows": len(ROWS), **counts}


def _write(root: Path, shelves: list[Shelf], query_sets: list[QuerySet], records: Records) -> dict[str, Any]:
    """Write all pools, queries and qrels; returns their sizes."""
    layout = Layout(root)
    copy_instructions("mbeir", root)

    def rows_of(shelf: Shelf) -> Iterator[Row]:
        return (records.candidate(shelf, *member) for member in shelf.members())

    train = [shelf for shelf in shelves if shelf.kind == "train"]
    train_rows = chain.from_iterable(map(rows_of, train))
    candidates = {"train": write_json_lines(layout.union_pool("train"), train_rows)}
    own = []
    for shelf in shelves:
        if shelf.kind != "train":
            split = "" if not shelf.row.val_pool else "_val" if shelf.kind == "val" else "_test"
            path = layout.local_pool(f"{shelf.row.name}{split}")
            write_json_lines(path, rows_of(shelf))
            if shelf.kind == "local":
                own.append(path)
    concatenate(layout.union_pool("test"), own)
    wanted = (
        records.candidate(queries.shelf, *member)
        for queries in query_sets
        if queries.split == "val"
        for member in queries.shelf.members(range(queries.first_block, queries.first_block + queries.blocks))
    )
    candidates["val"] = write_json_lines(layout.union_pool("val"), wanted)
    candidates["test"] = sum(shelf.size for shelf in shelves if shelf.kind == "local")
    num_queries = dict.fromkeys(SPLITS, 0)
    for queries in query_sets:
        num_queries[queries.split] += queries.size
    lines = _write_queries(layout, query_sets, records)
    return {"candidates": candidates, "queries": num_queries, "training_lines": lines}


def _write_queries(layout: Layout, query_sets: list[QuerySet], records: Records) -> int:
    """Write queries and qrels; returns the lines of the union training file."""

    def rows_of(queries: QuerySet) -> Iterator[Row]:
        return (records.query(queries, number) for number in range(queries.size))

    by_file: dict[tuple[Split, str], list[QuerySet]] = {}
    for queries in query_sets:
        row, split = queries.row, queries.split
        name = f"{row.dataset if split == 'train' else row.name}_{split}"
        by_file.setdefault((split, name), []).append(queries)
    training, validation = {}, []
    for (split, name), some in by_file.items():
        path = layout.queries(split, name)
        size = write_json_lines(path, chain.from_iterable(map(rows_of, some)))
        write_qrels(layout.qrels(split, name), chain.from_iterable(map(_judged, some)))
        if split == "val":
            validation.append(path)
        elif split == "train":
            dataset = some[0].row.dataset
            real = sum(row.train for row in ROWS if row.dataset == dataset)
            training[path] = round(size * max(1.0, UPSAMPLED.get(dataset, 0) / real))
    concatenate(layout.queries("union_val", "union_val"), sorted(validation))
    with replacing(layout.queries("union_train", "union_up_train")) as union:
        for path, count in training.items():
            while count > 0:
                with path.open(encoding="utf-8") as file:
                    for line in islice(file, count):
                        union.write(line)
                        count -= 1  # noqa: PLW2901
    return sum(training.values())


def _judged(queries: QuerySet) -> Iterator[Query]:
    """Yield the queries with nothing but what qrels need."""
    modality, task_id = TASKS[queries.row.task_id][0], queries.row.task_id
    for number in range(queries.size):
        qid = f"{queries.row.dataset_id}:{queries.first_qid + number}"
        yield Query(qid, modality, positives=queries.positives(queries.block(number)), task_id=task_id)
