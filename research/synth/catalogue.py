"""A synthetic catalogue in M-BEIR's layout: all eight tasks, exact answers, no network.

In a split, every product has a picture, a caption, a card (picture and text) and two facts in the
pool. The right answers follow from the construction: texts name every attribute, pictures show
every attribute, and all products differ. ``src_content`` names the product of each row, so that
everybody can check this; no encoder reads it.
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
from jaxtyping import Bool, Int
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
    draw_changes,
    facts_of,
    sample_products,
    split_indices,
)

DATASET: Final = "catalogue"
DATASET_ID: Final = 50
"""Number of the data set; M-BEIR's data sets have the numbers 0 to 10."""
IMAGES: Final = "mbeir_images/catalogue_images"
PRODUCTS_PER_FOLDER: Final = 200
"""Number of products whose pictures are in the same folder."""
Form = Literal["image", "caption", "card", "fact"]
"""How a candidate presents a product."""
FORMS: Final[tuple[Form, ...]] = get_args(Form)
FORM_OF_TASK: Final[Mapping[int, Form]] = dict(
    zip(TASKS, ("image", "fact", "card", "caption", "image", "fact", "image", "card"), strict=True)
)
CANDIDATES_PER_PRODUCT: Final = 5
"""A picture, a caption, a card and two facts."""
ROLES: Final = ("image", "card", "query3", "query4", "query6", "query7", "query8")
"""The uses of a product's pictures; each has another size and rotation."""
VERSION: Final = 1
"""Raised whenever equal seeds give other bytes."""
MAX_TRAIN_PRODUCTS: Final = 60_000
"""With eight queries for each product, this stays below M-BEIR's limit of 500,000 query ids."""
MAX_VAL_CANDIDATES: Final = 2_000
MAX_SINGLE_PROCESS_PICTURES: Final = 20_000
"""Up to this number of pictures, no other processes are started."""


class Request(NamedTuple):
    """A query before it has words."""

    number: int
    task: int
    position: int
    """Position of the target, the product that the query looks for, among the split's products."""
    reference: Change | None
    """The product in the query's picture, if it differs from the target."""


class Picture(NamedTuple):
    """A picture to draw; target and role determine the pose."""

    path: str
    shown: int
    """Code of the product in the picture."""
    target: int
    """Code of the product to which the picture belongs."""
    role: str


@dataclass(frozen=True, slots=True)
class CatalogueSplit:
    """The candidates and queries of a split.

    The ids of candidates follow one another: pictures, captions, cards, two facts of each product,
    then third facts of the first products.
    """

    split: Split
    seed: int
    codes: Int[ndarray, " products"]
    first_did: int
    num_candidates: int
    """At least ``CANDIDATES_PER_PRODUCT`` for each product; the others are third facts."""
    requests: Mapping[int, Sequence[Request]]
    """Queries of each task, in the order of their answers."""

    def candidates(self, form: Form) -> Iterator[Candidate]:
        """Yield all candidates of a form, with ascending ids."""
        codes = self.codes.tolist()
        for position, code in enumerate(codes):
            match form:
                case "image":
                    yield self._candidate(form, position, None, self._path(position, form))
                case "caption":
                    text = wordings.caption(Product.of(code), self._random("caption", code))
                    yield self._candidate(form, position, text, None)
                case "card":
                    text = self._card_text(code)
                    yield self._candidate(form, position, text, self._path(position, form))
                case "fact":
                    yield self._fact(position, 0)
                    yield self._fact(position, 1)
        if form == "fact":
            for position in range(self.num_candidates - CANDIDATES_PER_PRODUCT * len(codes)):
                yield self._fact(position, 2)

    def queries(self, task: int) -> Iterator[Query]:
        """Yield all queries of a task with their answers, with ascending ids."""
        return map(self._query, self.requests[task])

    def pictures(self) -> Iterator[Picture]:
        """Yield the pictures of candidates, then those of queries."""
        codes = self.codes.tolist()
        for position, code in enumerate(codes):
            for role in ("image", "card"):
                yield Picture(self._path(position, role), code, code, role)
        for task, requests in self.requests.items():
            if TASKS[task][0] is Modality.TEXT:
                continue
            role = f"query{task}"
            for request in requests:
                code = codes[request.position]
                shown = request.reference.code if request.reference else code
                yield Picture(self._path(request.position, role), shown, code, role)

    def _query(self, request: Request) -> Query:
        code, task = int(self.codes[request.position]), request.task
        product, rng = Product.of(code), self._random(f"query {task}", code)
        form, modality = FORM_OF_TASK[task], TASKS[task][0]
        source: dict[str, object] = {"kind": form, "product": product.words()}
        text, fact_number = None, 0
        if form == "fact":
            fact_number = rng.randrange(2)
            source["fact"] = topic = facts_of(code, seed=self.seed)[fact_number].topic
            text = wordings.question(product if task == 1 else None, topic, rng)
        elif request.reference:
            source["changed"] = attribute = request.reference.attribute
            source["reference"] = Product.of(request.reference.code).words()
            describe = wordings.edit if task == 7 else wordings.changed_card_request
            text = describe(product, attribute, rng)
        elif task == 8:
            text = rng.choice(WORDS["card_requests"])
        elif task == 0:
            text = wordings.caption(product, rng)
        elif task == 2:
            text = wordings.description(product, rng)
        has_image = modality is not Modality.TEXT
        return Query(
            qid=f"{DATASET_ID}:{request.number}",
            modality=modality,
            text=text,
            image=self._path(request.position, f"query{task}") if has_image else None,
            positives=(self._did(form, request.position, fact_number),),
            task_id=task,
            source=json.dumps(source),
        )

    def _candidate(
        self, form: Form, position: int, text: str | None, image: str | None
    ) -> Candidate:
        modality = Modality.of(has_image=image is not None, has_text=text is not None)
        product = Product.of(int(self.codes[position]))
        source = json.dumps({"kind": form, "product": product.words()})
        return Candidate(self._did(form, position), modality, text, image, source)

    def _fact(self, position: int, fact_number: int) -> Candidate:
        code = int(self.codes[position])
        fact, product = facts_of(code, seed=self.seed)[fact_number], Product.of(code)
        text = wordings.fact_text(product, fact, self._random(f"fact {fact_number}", code))
        source = json.dumps({"kind": "fact", "product": product.words(), "fact": fact.topic})
        did = self._did("fact", position, fact_number)
        return Candidate(did, Modality.TEXT, text, None, source)

    def _card_text(self, code: int) -> str:
        rng = self._random("card", code)
        number = f"{rng.randrange(10_000):04d}-{rng.randrange(100):02d}"
        facts = facts_of(code, seed=self.seed)
        price = next(fact.value for fact in facts if fact.topic == "price")
        return wordings.card_text(Product.of(code), number=number, price=price, rng=rng)

    def _did(self, form: Form, position: int, fact_number: int = 0) -> str:
        """Return a candidate's id."""
        products = len(self.codes)
        if form != "fact":
            offset = position
        elif fact_number < 2:
            offset = 2 * position + fact_number
        else:
            offset = 2 * products + position
        return f"{DATASET_ID}:{self.first_did + FORMS.index(form) * products + offset}"

    def _path(self, position: int, role: str) -> str:
        folder = f"{IMAGES}/{self.split}/{position // PRODUCTS_PER_FOLDER:04d}"
        return f"{folder}/{position:06d}-{role}.jpg"

    def _random(self, purpose: str, code: int) -> random.Random:
        return random.Random(f"{self.seed} {purpose} {code}")


def draw_catalogue(
    out: Path,
    *,
    items: int,
    seed: int = 0,
    train_products: int | None = None,
    queries_per_task: int = 1_000,
) -> dict[str, Any]:
    """Draw a catalogue whose test pool has ``items`` candidates, and write it in M-BEIR's layout.

    Equal seeds and sizes give equal bytes. Large catalogues are drawn by several processes. If
    ``train_products`` is None, it equals ``items``, limited to between 2,000 and 12,000. If the
    same catalogue already exists at ``out``, it remains unchanged.

    >>> draw_catalogue(Path("catalogue"), items=10_400, seed=1)  # doctest: +SKIP

    Returns
    -------
    dict
        The folder, its settings, the sizes of each split, and ``drawn``, which is False if the
        catalogue already existed.

    Raises
    ------
    UsageError
        ``items`` is not between 1,000 and 1,000,000, another number is out of range, or ``out``
        contains something else.
    """
    if train_products is None:
        train_products = min(max(items, 2_000), 12_000)
    _check_range("items", items, 1_000, 1_000_000)
    _check_range("seed", seed, 0, 2**63 - 1)
    _check_range("train_products", train_products, 1, MAX_TRAIN_PRODUCTS)
    _check_range("queries_per_task", queries_per_task, 1, 60_000)
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
            f"{out} contains something else than this catalogue; give another folder, or remove it"
        )
    font_file()  # fails early if there is none
    splits = _plan_splits(items, seed, train_products, queries_per_task)
    # Unlike `writing.new_folder`, this does not wait for the disk at every file: a catalogue that
    # is lost can be drawn again.
    partial_folder = out.parent / f".{out.name}.partial"
    shutil.rmtree(partial_folder, ignore_errors=True)
    counts = {
        "items": items,
        "seed": seed,
        "products": {split.split: len(split.codes) for split in splits},
        "candidates": {split.split: split.num_candidates for split in splits},
        "queries": {split.split: sum(map(len, split.requests.values())) for split in splits},
        "pictures": _write(partial_folder, splits),
    }
    write_json(partial_folder / about.name, {"plan": plan, "counts": counts})
    if out.exists():
        out.rmdir()
    partial_folder.rename(out)
    return {"folder": out, **counts, "drawn": True}


def _check_range(name: str, value: int, minimum: int, maximum: int) -> None:
    if not minimum <= value <= maximum:
        raise UsageError(f"{name} is {value:,}; give a number from {minimum:,} to {maximum:,}")


def _plan_splits(
    items: int, seed: int, train_products: int, queries_per_task: int
) -> list[CatalogueSplit]:
    """Choose the contents of each split; ids of candidates ascend through test, val and train."""
    split_of_code = split_indices(seed)
    sizes: dict[Split, int] = {
        "test": items,
        "val": min(MAX_VAL_CANDIDATES, items // 4),
        "train": train_products * CANDIDATES_PER_PRODUCT,
    }
    splits, first_did = [], 1
    for split, num_candidates in sizes.items():
        num_products = num_candidates // CANDIDATES_PER_PRODUCT
        is_allowed = split_of_code == SPLITS.index(split)
        codes = sample_products(split, num_products, is_allowed=is_allowed, seed=seed)
        per_task = len(codes) if split == "train" else min(queries_per_task, len(codes))
        requests = plan_requests(split, codes, per_task=per_task, is_allowed=is_allowed, seed=seed)
        splits.append(CatalogueSplit(split, seed, codes, first_did, num_candidates, requests))
        first_did += num_candidates
    return splits


def plan_requests(
    split: Split,
    codes: Int[ndarray, " products"],
    *,
    per_task: int,
    is_allowed: Bool[ndarray, " codes"],
    seed: int,
) -> dict[int, list[Request]]:
    """Choose the targets of each task's queries, and the references of changed ones.

    A picture that differs from the target shows another product of the same split. In half of the
    cases, this product is also in the pool if possible, so that a search that ignores the change
    returns a wrong candidate.
    """
    is_in_pool = np.zeros(NUM_CODES, dtype=bool)
    is_in_pool[codes] = True
    number = 0
    plan: dict[int, list[Request]] = {}
    for task in TASKS:
        rng = random.Random(f"{seed} asks {split} {task}")
        chosen: list[tuple[int, Change | None]] = []
        for position in rng.sample(range(len(codes)), len(codes)):
            if len(chosen) == per_task:
                break
            if task != 7 and not (task == 8 and rng.random() < 0.5):
                chosen.append((position, None))
                continue
            code = int(codes[position])
            change = None
            if rng.random() < 0.5:
                change = next(draw_changes(code, is_allowed=is_in_pool, rng=rng), None)
            change = change or next(draw_changes(code, is_allowed=is_allowed, rng=rng), None)
            if change is not None:
                chosen.append((position, change))
        plan[task] = [
            Request(number + step, task, position, change)
            for step, (position, change) in enumerate(sorted(chosen), start=1)
        ]
        number += len(chosen)
    return plan


def _write(root: Path, splits: list[CatalogueSplit]) -> int:
    """Write all files, and return the number of pictures.

    If there are many, other processes draw pictures while this one writes texts.
    """
    for split in splits:
        for number in range(-(-len(split.codes) // PRODUCTS_PER_FOLDER)):
            (root / IMAGES / split.split / f"{number:04d}").mkdir(parents=True)
    num_pictures = sum(1 for split in splits for _ in split.pictures())
    pictures = chain.from_iterable(split.pictures() for split in splits)
    draw_picture = partial(_draw, root, splits[0].seed)
    if num_pictures <= MAX_SINGLE_PROCESS_PICTURES:
        _write_texts(root, splits)
        deque(map(draw_picture, pictures), maxlen=0)
    else:
        with multiprocessing.Pool() as pool:
            drawn = pool.imap_unordered(draw_picture, pictures, chunksize=400)
            _write_texts(root, splits)
            deque(drawn, maxlen=0)
    return num_pictures


def _draw(root: Path, seed: int, picture: Picture) -> None:
    rng = random.Random(f"{seed} poses {picture.target}")
    looks = rng.sample(range(NUM_LOOKS), len(ROLES))
    poses = [Pose(look, rng.randint(-SHIFT, SHIFT), rng.randint(-SHIFT, SHIFT)) for look in looks]
    pixels = draw(Product.of(picture.shown), poses[ROLES.index(picture.role)])
    save(pixels, root / picture.path)


def _write_texts(root: Path, splits: list[CatalogueSplit]) -> None:
    instructions = root / "instructions" / "query_instructions.tsv"
    instructions.parent.mkdir(parents=True)
    shutil.copyfile(Path(__file__).with_name("catalogue_instructions.tsv"), instructions)
    layout = Layout(root)
    for split in splits:
        if split.split == "train":
            candidates = chain.from_iterable(map(split.candidates, FORMS))
            write_candidates(layout.union_pool("train"), candidates)
            name = "union_up_train"
        else:
            _write_rows(layout, split)
            name = f"union_{split.split}"
        queries = chain.from_iterable(map(split.queries, TASKS))
        write_queries(query_file(root, f"union_{split.split}", name), queries)


def _write_rows(layout: Layout, split: CatalogueSplit) -> None:
    """Write pools, queries and qrels of each task, and the global pool."""
    names = {task: f"{DATASET}_task{task}_{split.split}" for task in TASKS}
    pools = []
    for form in FORMS:
        first, *copies = [
            layout.local_pool(names[task]) for task in TASKS if FORM_OF_TASK[task] == form
        ]
        write_candidates(first, split.candidates(form))
        pools.append(first)
        for copy in copies:
            shutil.copyfile(first, copy)
    union_pool = layout.union_pool(split.split)
    union_pool.parent.mkdir(parents=True, exist_ok=True)
    union_pool.write_bytes(b"".join(path.read_bytes() for path in pools))
    for task, name in names.items():
        write_queries(query_file(layout.root, split.split, name), split.queries(task))
        write_qrels(layout.qrels(split.split, name), split.queries(task))


@command
class Catalogue(JsonOption):
    """Draw a synthetic catalogue of products with all eight tasks, in M-BEIR's layout.

    It needs no network. Equal seeds and sizes give equal bytes.
    """

    out: Path
    """Folder of the new data set."""

    items: int
    """Number of candidates in the global test pool, 1,000 to 1,000,000."""

    train_products: OptionalInt = None
    """Number of products in the training split; default: items, between 2,000 and 12,000."""

    queries_per_task: int = 1000
    """Number of test queries of each task."""

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
