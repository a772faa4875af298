"""A drawn catalogue of products in M-BEIR's layout: all eight tasks, exact ground truth, offline.

Every product of a split has a picture, a caption, a card (picture and text) and two facts in the pool. The
right answers are known by construction: texts name every attribute, pictures show every attribute, and no two
products are alike. ``src_content`` names the product of each row, so that anybody can verify this; no encoder
reads it.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import shutil
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Int, UInt8
from numpy import ndarray

from genius_search.cli.options import JsonOption, OptionalInt, command
from genius_search.cli.terminal import print_facts
from genius_search.data.mbeir import Layout
from genius_search.errors import UsageError
from genius_search.records import TASKS, Candidate, Modality, Query
from genius_search.writing import write_json
from research.command import run
from research.mbeir_files import query_file, write_candidates, write_qrels, write_queries
from research.synth import wordings
from research.synth.pictures import NUM_LOOKS, SHIFT, Pose, draw, font_file, save
from research.synth.world import (
    NUM_CODES,
    SPLITS,
    WORDS,
    Change,
    Product,
    Split,
    changes,
    facts_of,
    sample_products,
    split_of_products,
)

DATASET: Final = "catalogue"
DATASET_ID: Final = 50
"""Its number beside M-BEIR's data sets, whose numbers are 0 to 10."""
IMAGES: Final = "mbeir_images/catalogue_images"
PER_FOLDER: Final = 200
"""Products whose pictures share a folder."""
Kind = Literal["image", "caption", "card", "fact"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
KIND_OF_TASK: Final[Mapping[int, Kind]] = dict(
    zip(TASKS, ("image", "fact", "card", "caption", "image", "fact", "image", "card"), strict=True)
)
PER_PRODUCT: Final = 5
"""Candidates of a product: a picture, a caption, a card, two facts."""
ROLES: Final = ("image", "card", "query3", "query4", "query6", "query7", "query8")
"""The uses of a product's pictures; no two of them have the same size and rotation."""
VERSION: Final = 1
"""Raised whenever the same seed would give other bytes."""
MAX_TRAIN_PRODUCTS: Final = 60_000
"""Eight queries of each stay below M-BEIR's 500,000 query ids."""
VAL_CANDIDATES: Final = 2_000
SINGLE_PROCESS: Final = 20_000
"""Up to this many pictures are drawn without starting other processes."""


class Request(NamedTuple):
    """A query before it has words: its number, its task, and the place of the wanted product."""

    number: int
    task: int
    place: int
    reference: Change | None
    """The product in its picture, when that is not the wanted product itself."""


Picture = tuple[str, int, int, str]
"""A picture to draw: its file, the product in it, the wanted product and the role, which decide the pose."""


@dataclass(frozen=True, slots=True)
class SplitRows:
    """The candidates and queries of a split."""

    split: Split
    seed: int
    codes: Int[ndarray, " products"]
    first_did: int
    num_candidates: int
    """At least ``PER_PRODUCT`` for each product; the excess are third facts of the first products."""
    requests: Mapping[int, Sequence[Request]]
    """Queries of each task, in the order of their answers."""

    def candidates(self, kind: Kind) -> Iterator[Candidate]:
        """Yield all candidates of a kind, ids ascending."""
        codes = self.codes.tolist()
        for place, code in enumerate(codes):
            match kind:
                case "image":
                    yield self._candidate(kind, place, None, self._path(place, "image"))
                case "caption":
                    text = wordings.caption(Product.of(code), self._rng("caption", code))
                    yield self._candidate(kind, place, text, None)
                case "card":
                    yield self._candidate(
                        kind, place, self._card_text(code), self._path(place, "card")
                    )
                case "fact":
                    yield from (self._fact(place, which) for which in (0, 1))
        if kind == "fact":
            third = range(self.num_candidates - PER_PRODUCT * len(codes))
            yield from (self._fact(place, 2) for place in third)

    def queries(self, task: int) -> Iterator[Query]:
        """Yield all queries of a task with their answers, ids ascending."""
        return map(self._query, self.requests[task])

    def pictures(self) -> Iterator[Picture]:
        """Yield the pictures of candidates, then those of queries."""
        codes = self.codes.tolist()
        for place, code in enumerate(codes):
            for role in ("image", "card"):
                yield self._path(place, role), code, code, role
        for task, requests in self.requests.items():
            if TASKS[task][0] is not Modality.TEXT:
                for request in requests:
                    code, role = codes[request.place], f"query{task}"
                    shown = request.reference.code if request.reference else code
                    yield self._path(request.place, role), shown, code, role

    def _query(self, request: Request) -> Query:
        code, task = int(self.codes[request.place]), request.task
        product, rng = Product.of(code), self._rng(f"query {task}", code)
        kind, modality = KIND_OF_TASK[task], TASKS[task][0]
        source: dict[str, object] = {"kind": kind, "product": product.words()}
        text, which = None, 0
        if kind == "fact":
            which = rng.randrange(2)
            source["fact"] = fact = facts_of(code, seed=self.seed)[which].kind
            text = wordings.question(product if task == 1 else None, fact, rng)
        elif request.reference:
            source["changed"] = changed = request.reference.attribute
            source["reference"] = Product.of(request.reference.code).words()
            word = wordings.edit if task == 7 else wordings.changed_card_request
            text = word(product, changed, rng)
        elif task == 8:
            text = rng.choice(WORDS["card_requests"])
        elif task == 0:
            text = wordings.caption(product, rng)
        elif task == 2:
            text = wordings.description(product, rng)
        return Query(
            qid=f"{DATASET_ID}:{request.number}",
            modality=modality,
            text=text,
            image=None if modality is Modality.TEXT else self._path(request.place, f"query{task}"),
            positives=(self._did(kind, request.place, which),),
            task_id=task,
            source=json.dumps(source),
        )

    def _candidate(self, kind: Kind, place: int, text: str | None, image: str | None) -> Candidate:
        modality = Modality.of(has_image=image is not None, has_text=text is not None)
        source = json.dumps({"kind": kind, "product": Product.of(int(self.codes[place])).words()})
        return Candidate(self._did(kind, place), modality, text, image, source)

    def _fact(self, place: int, which: int) -> Candidate:
        code = int(self.codes[place])
        fact, product = facts_of(code, seed=self.seed)[which], Product.of(code)
        text = wordings.fact_text(product, fact, self._rng(f"fact {which}", code))
        source = json.dumps({"kind": "fact", "product": product.words(), "fact": fact.kind})
        return Candidate(self._did("fact", place, which), Modality.TEXT, text, None, source)

    def _card_text(self, code: int) -> str:
        rng = self._rng("card", code)
        number = f"{rng.randrange(10_000):04d}-{rng.randrange(100):02d}"
        price = next(fact.value for fact in facts_of(code, seed=self.seed) if fact.kind == "price")
        return wordings.card_text(Product.of(code), number=number, price=price, rng=rng)

    def _did(self, kind: Kind, place: int, which: int = 0) -> str:
        """Return a candidate's id; ``which`` counts facts, and third facts come after all others."""
        products = len(self.codes)
        offset = KINDS.index(kind) * products + place
        if kind == "fact":
            offset += place + which if which < 2 else 2 * products
        return f"{DATASET_ID}:{self.first_did + offset}"

    def _path(self, place: int, role: str) -> str:
        return f"{IMAGES}/{self.split}/{place // PER_FOLDER:04d}/{place:06d}-{role}.jpg"

    def _rng(self, purpose: str, code: int) -> random.Random:
        return random.Random(f"{self.seed} {purpose} {code}")


def plan_requests(
    split: Split,
    codes: Int[ndarray, " products"],
    *,
    per_task: int,
    splits: UInt8[ndarray, " codes"],
    seed: int,
) -> dict[int, list[Request]]:
    """Choose the products that each task's queries want, and the references of changed ones.

    A picture that differs from its answer shows another product of the same split; half of the time one that
    is in the pool too, where there is one, so that ignoring the change finds a wrong candidate.
    """
    allowed = splits == SPLITS.index(split)
    pool = np.zeros(NUM_CODES, dtype=bool)
    pool[codes] = True
    number = 0
    plan: dict[int, list[Request]] = {}
    for task in TASKS:
        rng = random.Random(f"{seed} asks {split} {task}")
        chosen: list[tuple[int, Change | None]] = []
        for place in rng.sample(range(len(codes)), len(codes)):
            if len(chosen) == per_task:
                break
            if task != 7 and not (task == 8 and rng.random() < 0.5):
                chosen.append((place, None))
                continue
            code = int(codes[place])
            change = next(changes(code, within=pool, rng=rng), None) if rng.random() < 0.5 else None
            change = change or next(changes(code, within=allowed, rng=rng), None)
            if change is not None:
                chosen.append((place, change))
        plan[task] = [
            Request(number + step, task, place, change)
            for step, (place, change) in enumerate(sorted(chosen), start=1)
        ]
        number += len(chosen)
    return plan


def draw_catalogue(
    out: Path,
    *,
    items: int,
    seed: int = 0,
    train_products: int | None = None,
    queries_per_task: int = 1_000,
) -> dict[str, Any]:
    """Draw a catalogue whose test pool has ``items`` candidates, and write it in M-BEIR's layout.

    The same seed and sizes give the same bytes; where there is much to draw, all processors do.
    ``train_products`` follows ``items`` between 2,000 and 12,000 if not given. When that very catalogue is
    already at ``out``, nothing is done.

    >>> draw_catalogue(Path("catalogue"), items=10_400, seed=1)  # doctest: +SKIP

    Raises UsageError: ``items`` is not between 1,000 and 1,000,000, another number is out of range, or
    ``out`` holds something else.

    Returns
    -------
    dict
        the folder, its settings, the sizes of each split, and ``drawn``: False when it was already there.
    """
    if train_products is None:
        train_products = min(max(items, 2_000), 12_000)
    for name, value, low, high in (
        ("items", items, 1_000, 1_000_000),
        ("seed", seed, 0, 2**63 - 1),
        ("train_products", train_products, 1, MAX_TRAIN_PRODUCTS),
        ("queries_per_task", queries_per_task, 1, 60_000),
    ):
        if not low <= value <= high:
            raise UsageError(f"{name} is {value:,}; give a number from {low:,} to {high:,}")
    plan = {
        "catalogue": VERSION,
        "items": items,
        "seed": seed,
        "train_products": train_products,
        "queries_per_task": queries_per_task,
    }
    about = out / "catalogue.json"
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        if about.is_file() and json.loads(about.read_text())["plan"] == plan:
            return {"folder": out, **json.loads(about.read_text())["counts"], "drawn": False}
        raise UsageError(
            f"{out} holds something else than this catalogue; give another folder, or remove it"
        )
    font_file()
    worlds = _plan_splits(items, seed, train_products, queries_per_task)
    # Not `writing.new_folder`, which waits for the disk at every file: these can be drawn again.
    partial_folder = out.parent / f".{out.name}.partial"
    shutil.rmtree(partial_folder, ignore_errors=True)
    counts = {
        "items": items,
        "seed": seed,
        "products": {rows.split: len(rows.codes) for rows in worlds},
        "candidates": {rows.split: rows.num_candidates for rows in worlds},
        "queries": {rows.split: sum(map(len, rows.requests.values())) for rows in worlds},
        "pictures": _write(partial_folder, worlds),
    }
    write_json(partial_folder / about.name, {"plan": plan, "counts": counts})
    if out.exists():
        out.rmdir()
    partial_folder.rename(out)
    return {"folder": out, **counts, "drawn": True}


def _plan_splits(
    items: int, seed: int, train_products: int, queries_per_task: int
) -> list[SplitRows]:
    """Decide the contents of each split; candidate ids run through test, val, train."""
    splits = split_of_products(seed)
    sizes: dict[Split, int] = {
        "test": items,
        "val": min(VAL_CANDIDATES, items // 4),
        "train": train_products * PER_PRODUCT,
    }
    rows, first_did = [], 1
    for split, num_candidates in sizes.items():
        codes = sample_products(split, num_candidates // PER_PRODUCT, splits=splits, seed=seed)
        per_task = len(codes) if split == "train" else min(queries_per_task, len(codes))
        requests = plan_requests(split, codes, per_task=per_task, splits=splits, seed=seed)
        rows.append(SplitRows(split, seed, codes, first_did, num_candidates, requests))
        first_did += num_candidates
    return rows


def _write(root: Path, worlds: list[SplitRows]) -> int:
    """Write all files; returns the number of pictures. Other processes draw while this one writes texts."""
    for rows in worlds:
        for number in range(-(-len(rows.codes) // PER_FOLDER)):
            (root / IMAGES / rows.split / f"{number:04d}").mkdir(parents=True)
    num_pictures = sum(1 for rows in worlds for _ in rows.pictures())
    pictures = chain.from_iterable(rows.pictures() for rows in worlds)
    draw_one = partial(_draw, root, worlds[0].seed)
    if num_pictures <= SINGLE_PROCESS:
        _write_texts(root, worlds)
        deque(map(draw_one, pictures), maxlen=0)
    else:
        with multiprocessing.Pool() as pool:
            drawn = pool.imap_unordered(draw_one, pictures, chunksize=400)
            _write_texts(root, worlds)
            deque(drawn, maxlen=0)
    return num_pictures


def _draw(root: Path, seed: int, picture: Picture) -> None:
    path, shown, owner, role = picture
    rng = random.Random(f"{seed} poses {owner}")
    looks = rng.sample(range(NUM_LOOKS), len(ROLES))
    poses = [Pose(look, rng.randint(-SHIFT, SHIFT), rng.randint(-SHIFT, SHIFT)) for look in looks]
    save(draw(Product.of(shown), poses[ROLES.index(role)]), root / path)


def _write_texts(root: Path, worlds: list[SplitRows]) -> None:
    target = root / "instructions" / "query_instructions.tsv"
    target.parent.mkdir(parents=True)
    shutil.copyfile(Path(__file__).with_name("catalogue_instructions.tsv"), target)
    layout = Layout(root)
    for rows in worlds:
        split = rows.split
        all_queries = chain.from_iterable(map(rows.queries, TASKS))
        if split == "train":  # in one piece only
            write_candidates(
                layout.union_pool(split), chain.from_iterable(map(rows.candidates, KINDS))
            )
            write_queries(query_file(layout.root, "union_train", "union_up_train"), all_queries)
            continue
        pools = {task: layout.local_pool(f"{DATASET}_task{task}_{split}") for task in TASKS}
        first_pools = []
        for kind in KINDS:
            first, *others = (pools[task] for task in TASKS if KIND_OF_TASK[task] == kind)
            write_candidates(first, rows.candidates(kind))
            first_pools.append(first)
            for other in others:
                shutil.copyfile(first, other)
        layout.union_pool(split).parent.mkdir(parents=True, exist_ok=True)
        layout.union_pool(split).write_bytes(b"".join(path.read_bytes() for path in first_pools))
        for task in TASKS:
            name = f"{DATASET}_task{task}_{split}"
            write_queries(query_file(layout.root, split, name), rows.queries(task))
            write_qrels(layout.qrels(split, name), rows.queries(task))
        write_queries(query_file(layout.root, f"union_{split}", f"union_{split}"), all_queries)


@command
class Catalogue(JsonOption):
    """Draw a world of products with all eight tasks, offline, in M-BEIR's layout.

    The same seed and sizes give the same bytes.
    """

    out: Path
    """Folder of the new data set."""

    items: int
    """Candidates in the global test pool, 1,000 to 1,000,000."""

    train_products: OptionalInt = None
    """Products in the training split; default: as many as items, between 2,000 and 12,000."""

    queries_per_task: int = 1000
    """Test queries of each task."""

    seed: int = 0
    """Seed of the random numbers."""

    def run(self) -> None:
        """Draw the data set."""
        summary = draw_catalogue(
            self.out,
            items=self.items,
            seed=self.seed,
            train_products=self.train_products,
            queries_per_task=self.queries_per_task,
        )
        print_facts(summary, as_json=self.json)


main = partial(run, Catalogue, "synth.catalogue")


if __name__ == "__main__":
    sys.exit(main())
