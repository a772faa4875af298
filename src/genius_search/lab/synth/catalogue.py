"""Draws a product-like world and writes it in M-BEIR's layout: all eight tasks, exact ground truth, offline.

Every product of a split has a picture, a caption, a card (picture and text) and two facts in the pool. What
answers a query is known by construction: texts name every attribute, pictures show every attribute, and no
two products are alike. ``src_content`` tells the product of each row, so that anybody can check this; no
encoder reads it.
"""

from __future__ import annotations

import importlib.util
import json
import math
import multiprocessing
import os
import random
import shutil
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Float32, Int, UInt8
from numpy import ndarray
from PIL import Image, ImageDraw, ImageFont

from genius_search.artifact import write_json
from genius_search.data.mbeir import (
    InstructionRow,
    write_candidates,
    write_instructions,
    write_qrels,
    write_queries,
)
from genius_search.errors import MissingExtra, UsageError
from genius_search.lab.synth import wordings
from genius_search.lab.synth.wordings import INSTRUCTIONS
from genius_search.lab.synth.world import (
    BACKGROUNDS,
    COLOURS,
    FILLS,
    FRAMES,
    NUM_CODES,
    SHAPES,
    SPLITS,
    VALUES,
    Change,
    Product,
    Split,
    changes,
    facts_of,
    sample_products,
    split_of_products,
)
from genius_search.records import TASKS, Candidate, Modality, Query

PIXELS: Final = 64
"""Width and height of every picture."""
_OVER: Final = 4
"""Supersampling of patterns and frames: drawn this much larger and averaged down."""
_GLYPH_OVER: Final = 2
"""Supersampling of glyphs, whose edges the font renderer has smoothed already."""
_SIZES: Final = (35.0, 41.0, 47.0)
"""Longer side of the glyph's ink, in pixels; what is nearly square gets a little less, so it fits turned."""
_ANGLES: Final = (-20, -10, 0, 10, 20)
SHIFT: Final = 3
"""Largest displacement from the centre, in pixels."""
_RIM: Final = 2.2
"""Width of the rim of an outlined shape, in pixels."""
_STROKE: Final = 4.6
"""Strokes thinner than this are thickened, so that fills can be seen in them."""
NUM_LOOKS: Final = len(_SIZES) * len(_ANGLES)


class Pose(NamedTuple):
    """How a product is drawn this time."""

    look: int
    """Which of the ``NUM_LOOKS`` pairs of size and rotation."""
    right: int = 0
    down: int = 0


class _Masks(NamedTuple):
    body: Float32[ndarray, "pixels pixels 1"]
    rim: Float32[ndarray, "pixels pixels 1"]


def font_file() -> Path:
    """Where matplotlib keeps DejaVu Sans; matplotlib itself is not imported."""
    spec = importlib.util.find_spec("matplotlib")
    if spec is None or spec.origin is None:
        raise MissingExtra(
            "the catalogue is drawn with matplotlib's font; install it: pip install matplotlib"
        )
    return Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf"


def draw(product: Product, pose: Pose) -> UInt8[ndarray, "pixels pixels 3"]:
    """Paint a product in a pose."""
    masks = _masks(product.shape, pose.look)
    rows = slice(SHIFT - pose.down, SHIFT - pose.down + PIXELS)
    columns = slice(SHIFT - pose.right, SHIFT - pose.right + PIXELS)
    canvas = _canvas(product.background, product.frame)
    if FILLS[product.fill] == "outlined":
        first, second = _pair(product.colour)
        body = masks.body[rows, columns]
        paint = first + (second - first) * body
        alpha = masks.rim[rows, columns]
    else:
        paint = _paint(product.colour, product.fill)
        alpha = masks.body[rows, columns]
    picture: UInt8[ndarray, "pixels pixels 3"] = (canvas + (paint - canvas) * alpha + 0.5).astype(np.uint8)
    return picture


def save(picture: UInt8[ndarray, "pixels pixels 3"], path: Path) -> None:
    """Write a picture as JPEG with fixed settings."""
    Image.fromarray(picture).save(path, "JPEG", quality=92, subsampling=0)


@cache
def _masks(shape: int, look: int) -> _Masks:
    """A shape's ink and its ink with a rim, at a size and angle, with room to be shifted."""
    size, angle = _SIZES[look // len(_ANGLES)], _ANGLES[look % len(_ANGLES)]
    glyph = SHAPES[shape].glyph
    stroke = _extra_stroke(glyph)
    font = _font_for(glyph, size - 2 * stroke)
    return _Masks(
        body=_ink(glyph, font, angle, stroke=stroke),
        rim=_ink(glyph, font, angle, stroke=stroke + _RIM),
    )


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(font_file()), size, layout_engine=ImageFont.Layout.BASIC)


def _font_for(glyph: str, pixels: float) -> ImageFont.FreeTypeFont:
    """The font at the size that gives a glyph this extent."""
    left, top, right, bottom = _font(200).getbbox(glyph)
    width, height = right - left, bottom - top
    extent = max(width, height, 0.8 * math.hypot(width, height))
    return _font(round(200 * pixels * _GLYPH_OVER / extent))


@cache
def _extra_stroke(glyph: str) -> float:
    """How much to thicken a glyph on each side, in pixels: twice area over outline is its mean stroke."""
    font = _font_for(glyph, _SIZES[1])
    thin, thick = (float(_ink(glyph, font, 0, stroke=stroke).sum()) for stroke in (0.0, 1.0))
    outline = max(thick - thin, 1.0)
    return float(np.clip((_STROKE - 2 * thin / outline) / 2, 0.0, 0.8))


def _ink(
    glyph: str, font: ImageFont.FreeTypeFont, angle: int, *, stroke: float
) -> Float32[ndarray, "pixels pixels 1"]:
    """A glyph centred and turned; ``stroke`` thickens it on each side, in pixels."""
    stroke *= _GLYPH_OVER
    side = (PIXELS + 2 * SHIFT) * _GLYPH_OVER
    left, top, right, bottom = font.getbbox(glyph, stroke_width=stroke)
    picture = Image.new("L", (side, side))
    corner = ((side - left - right) / 2, (side - top - bottom) / 2)
    ImageDraw.Draw(picture).text(corner, glyph, fill=255, font=font, stroke_width=stroke)
    turned = picture.rotate(angle, Image.Resampling.BILINEAR).reduce(_GLYPH_OVER)
    return (np.asarray(turned, dtype=np.float32) / 255)[..., None]


@cache
def _pair(colour: int) -> tuple[Float32[ndarray, 3], Float32[ndarray, 3]]:
    """A colour and the pale partner that patterns use beside it."""
    first = np.array(COLOURS[VALUES["colour"][colour]], dtype=np.float32)
    return first, first + (np.float32(255) - first) * np.float32(0.82)


@cache
def _paint(colour: int, fill: int) -> Float32[ndarray, "pixels pixels 3"]:
    first, second = _pair(colour)
    paint: Float32[ndarray, "pixels pixels 3"] = first + (second - first) * _pattern(FILLS[fill])
    return paint


def _pattern(fill: str) -> Float32[ndarray, "pixels pixels 1"]:
    """Where a fill shows the pale partner."""
    side = PIXELS * _OVER
    y, x = (np.mgrid[0:side, 0:side] + 0.5) / _OVER
    match fill:
        case "striped":
            pale = y % 6 < 2.6
        case "dotted":
            row = y // 4
            pale = ((x + 4 * (row % 2)) % 8 - 4) ** 2 + (y % 4 - 2) ** 2 < 1.7**2
        case "checkered":
            pale = (x // 5 + y // 5) % 2 == 0
        case "two-tone":
            pale = x >= PIXELS / 2
        case _:
            pale = np.zeros_like(x, dtype=bool)
    cells = pale.reshape(PIXELS, _OVER, PIXELS, _OVER).mean(axis=(1, 3))
    pattern: Float32[ndarray, "pixels pixels 1"] = cells.astype(np.float32)[..., None]
    return pattern


@cache
def _canvas(background: int, frame: int) -> Float32[ndarray, "pixels pixels 3"]:
    top, bottom = (np.array(end, dtype=np.float32) for end in BACKGROUNDS[VALUES["background"][background]])
    slope = np.linspace(0, 1, PIXELS, dtype=np.float32)[:, None, None]
    canvas = np.broadcast_to(top + (bottom - top) * slope, (PIXELS, PIXELS, 3))
    ink = np.array((70, 70, 78) if canvas.mean() > 128 else (215, 215, 220), dtype=np.float32)
    framed: Float32[ndarray, "pixels pixels 3"] = canvas + (ink - canvas) * _frame(FRAMES[frame])
    return framed


def _frame(frame: str) -> Float32[ndarray, "pixels pixels 1"]:
    side = PIXELS * _OVER
    picture = Image.new("L", (side, side))
    pen = ImageDraw.Draw(picture)
    near, far, width = 2 * _OVER, (PIXELS - 2) * _OVER - 1, 2 * _OVER
    match frame:
        case "ring":
            pen.ellipse((near, near, far, far), outline=255, width=width)
        case "box":
            pen.rectangle((near, near, far, far), outline=255, width=width)
        case "corners":
            pen.rectangle((near, near, far, far), outline=255, width=width)
            reach = 14 * _OVER
            pen.rectangle((reach, 0, side - 1 - reach, side), fill=0)
            pen.rectangle((0, reach, side, side - 1 - reach), fill=0)
        case "bars":
            pen.rectangle((near, near, far, near + width * 3 // 2), fill=255)
            pen.rectangle((near, far - width * 3 // 2, far, far), fill=255)
        case _:
            pass
    return (np.asarray(picture.reduce(_OVER), dtype=np.float32) / 255)[..., None]


DATASET_ID: Final = 50
"""Its number beside M-BEIR's data sets, whose numbers are 0 to 10."""
IMAGES: Final = "mbeir_images/catalogue_images"
SHARD: Final = 200
"""Products whose pictures share a folder and are drawn by one process in one go."""
Kind = Literal["image", "caption", "card", "fact"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
KIND_OF_TASK: Final[Mapping[int, Kind]] = {
    0: "image",
    1: "fact",
    2: "card",
    3: "caption",
    4: "image",
    6: "fact",
    7: "image",
    8: "card",
}
PER_PRODUCT: Final = 5
"""Candidates of a product: a picture, a caption, a card, two facts."""
Role = Literal["image", "card", "query3", "query4", "query6", "query7", "query8"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)
"""What a product's pictures are for; no two of them have the same size and rotation."""


class Ask(NamedTuple):
    """A query before it has words: its number, its task, where its answer's product stands in the split."""

    number: int
    task: int
    place: int
    reference: Change | None
    """What its picture shows, when that is not the wanted product itself."""


class Picture(NamedTuple):
    """What to draw into which file."""

    path: str
    product: Product
    pose: Pose


@dataclass(frozen=True, slots=True)
class SplitRows:
    """The rows of one split."""

    split: Split
    seed: int
    codes: Int[ndarray, " products"]
    first_did: int
    num_candidates: int
    """At least ``PER_PRODUCT`` for each product; what exceeds it are third facts of the first products."""
    asks: Mapping[int, Sequence[Ask]]
    """Queries of each task, in the order of their answers."""

    def candidates(self, kind: Kind) -> Iterator[Candidate]:
        """All candidates of a kind, ids ascending."""
        codes = self.codes.tolist()
        for place, code in enumerate(codes):
            match kind:
                case "image":
                    yield self._candidate(kind, place, code, None, _path(self.split, place, "image"))
                case "caption":
                    text = wordings.caption(Product.of(code), self._rng("caption", code))
                    yield self._candidate(kind, place, code, text, None)
                case "card":
                    yield self._candidate(
                        kind, place, code, self._card_text(code), _path(self.split, place, "card")
                    )
                case "fact":
                    yield from (self._fact_candidate(place, code, which) for which in (0, 1))
        if kind == "fact":
            extra = self.num_candidates - PER_PRODUCT * len(codes)
            yield from (self._fact_candidate(place, code, 2) for place, code in enumerate(codes[:extra]))

    def queries(self, task: int) -> Iterator[Query]:
        """All queries of a task with their answers, ids ascending."""
        return map(self._query, self.asks[task])

    def shards(self) -> Iterator[PictureShard]:
        """Its pictures, in shares small enough to be sent to another process."""
        for first in range(0, len(self.codes), SHARD):
            codes = tuple(self.codes[first : first + SHARD].tolist())
            asks = [
                ask
                for task, asked in self.asks.items()
                if TASKS[task][0] is not Modality.TEXT
                for ask in asked[
                    bisect_left(asked, first, key=_place) : bisect_left(asked, first + SHARD, key=_place)
                ]
            ]
            yield PictureShard(self.split, self.seed, first, codes, tuple(asks))

    def _query(self, ask: Ask) -> Query:
        code = int(self.codes[ask.place])
        product, rng = Product.of(code), self._rng(f"query {ask.task}", code)
        kind, modality = KIND_OF_TASK[ask.task], TASKS[ask.task][0]
        told: dict[str, object] = {"kind": kind, "product": product.words()}
        which = 0
        text = None
        if kind == "fact":
            which = rng.randrange(2)
            fact = facts_of(code, seed=self.seed)[which].kind
            told["fact"] = fact
            text = (
                wordings.question(product, fact, rng) if ask.task == 1 else wordings.image_question(fact, rng)
            )
        if ask.reference:
            changed = ask.reference.attribute
            told["changed"], told["reference"] = changed, Product.of(ask.reference.code).words()
            ways = {7: wordings.edit, 8: wordings.changed_card_request}
            text = ways[ask.task](product, changed, rng)
        elif ask.task == 8:
            text = wordings.card_request(rng)
        elif ask.task == 0:
            text = wordings.caption(product, rng)
        elif ask.task == 2:
            text = wordings.description(product, rng)
        return Query(
            qid=f"{DATASET_ID}:{ask.number}",
            modality=modality,
            text=text,
            image=None if modality is Modality.TEXT else _path(self.split, ask.place, _role(ask.task)),
            positives=(self._did(kind, ask.place, which),),
            task_id=ask.task,
            source=json.dumps(told),
        )

    def _candidate(self, kind: Kind, place: int, code: int, text: str | None, image: str | None) -> Candidate:
        modality = Modality.of(has_image=image is not None, has_text=text is not None)
        source = json.dumps({"kind": kind, "product": Product.of(code).words()})
        return Candidate(self._did(kind, place), modality, text, image, source)

    def _fact_candidate(self, place: int, code: int, which: int) -> Candidate:
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
        """The id of a candidate; ``which`` of the facts, and third facts come after all others."""
        products = len(self.codes)
        offset = KINDS.index(kind) * products + place
        if kind == "fact":
            facts = KINDS.index("fact") * products
            offset = facts + 2 * place + which if which < 2 else facts + 2 * products + place
        return f"{DATASET_ID}:{self.first_did + offset}"

    def _rng(self, purpose: str, code: int) -> random.Random:
        return random.Random(f"{self.seed} {purpose} {code}")


class PictureShard(NamedTuple):
    """What one process draws in one go."""

    split: Split
    seed: int
    first: int
    """Where its first product stands in the split."""
    codes: tuple[int, ...]
    asks: tuple[Ask, ...]
    """The queries with pictures whose answers are among these products."""

    def pictures(self) -> Iterator[Picture]:
        """What to draw, in any order."""
        poses = [self._poses(code) for code in self.codes]
        for place, code in enumerate(self.codes, start=self.first):
            for role in ("image", "card"):
                yield self._picture(place, role, code, poses[place - self.first])
        for ask in self.asks:
            shown = ask.reference.code if ask.reference else self.codes[ask.place - self.first]
            yield self._picture(ask.place, _role(ask.task), shown, poses[ask.place - self.first])

    def _poses(self, code: int) -> list[Pose]:
        """A pose for every role; no two have the same size and rotation."""
        rng = random.Random(f"{self.seed} poses {code}")
        looks = rng.sample(range(NUM_LOOKS), len(ROLES))
        return [Pose(look, rng.randint(-SHIFT, SHIFT), rng.randint(-SHIFT, SHIFT)) for look in looks]

    def _picture(self, place: int, role: Role, shown: int, poses: list[Pose]) -> Picture:
        return Picture(_path(self.split, place, role), Product.of(shown), poses[ROLES.index(role)])


def plan_asks(
    split: Split,
    codes: Int[ndarray, " products"],
    *,
    per_task: int,
    splits: UInt8[ndarray, " codes"],
    seed: int,
) -> dict[int, list[Ask]]:
    """Choose which products are asked for in each task, and what the pictures of changed ones show.

    A picture that differs from its answer shows another product of the same split; half of the time one that
    is in the pool too, where there is one, so that ignoring the change finds a wrong candidate.
    """
    allowed = splits == SPLITS.index(split)
    pool = np.zeros(NUM_CODES, dtype=bool)
    pool[codes] = True
    number = 0
    plan: dict[int, list[Ask]] = {}
    for task in TASKS:
        rng = random.Random(f"{seed} asks {split} {task}")
        places = rng.sample(range(len(codes)), len(codes))
        chosen: list[tuple[int, Change | None]] = []
        for place in places:
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
        plan[task] = []
        for place, change in sorted(chosen):
            number += 1
            plan[task].append(Ask(number, task, place, change))
    return plan


def _place(ask: Ask) -> int:
    return ask.place


def _path(split: Split, place: int, role: Role) -> str:
    return f"{IMAGES}/{split}/{place // SHARD:04d}/{place:06d}-{role}.jpg"


def _role(task: int) -> Role:
    return next(role for role in ROLES if role == f"query{task}")


DATASET: Final = "catalogue"
VERSION: Final = 1
"""Raised whenever the same seed would give other bytes."""
MIN_ITEMS: Final = 1_000
MAX_ITEMS: Final = 1_000_000
MAX_TRAIN_PRODUCTS: Final = 60_000
"""Eight queries of each stay below M-BEIR's 500,000 query ids."""
MAX_QUERIES_PER_TASK: Final = 60_000
VAL_CANDIDATES: Final = 2_000
_ALONE: Final = 20_000
"""Up to this many pictures are drawn without starting other processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogueSummary:
    """What was drawn."""

    folder: Path
    items: int
    """Candidates of the test pool."""
    seed: int
    products: dict[str, int]
    """Products of each split."""
    candidates: dict[str, int]
    """Candidates of each split's union pool."""
    queries: dict[str, int]
    """Queries of each split, all tasks together."""
    pictures: int
    drawn: bool
    """False when the same catalogue was already there."""


def draw_catalogue(
    out: Path,
    *,
    items: int,
    seed: int = 0,
    train_products: int | None = None,
    queries_per_task: int = 1_000,
    workers: int | None = None,
) -> CatalogueSummary:
    """Draw a world whose test pool has ``items`` candidates, and write it in M-BEIR's layout.

    The same seed and sizes give the same bytes, whatever the number of ``workers`` (default: all processors
    when there is much to draw). ``train_products`` follows ``items`` between 2,000 and 12,000 if not given.
    When that very catalogue is already at ``out``, nothing is done.

    >>> draw_catalogue(Path("catalogue"), items=10_400, seed=1)  # doctest: +SKIP

    Raises
    ------
    UsageError
        ``items`` is not between 1,000 and 1,000,000, another number is out of range, or ``out`` holds
        something else.
    """
    if train_products is None:
        train_products = min(max(items, 2_000), 12_000)
    _check("items", items, MIN_ITEMS, MAX_ITEMS)
    _check("seed", seed, 0, 2**63 - 1)
    _check("train_products", train_products, 1, MAX_TRAIN_PRODUCTS)
    _check("queries_per_task", queries_per_task, 1, MAX_QUERIES_PER_TASK)
    if workers is not None:
        _check("workers", workers, 1, 1_024)
    plan = {
        "catalogue": VERSION,
        "items": items,
        "seed": seed,
        "train_products": train_products,
        "queries_per_task": queries_per_task,
    }
    found = _already_there(out, plan)
    if found is not None:
        return _summary(out, found, drawn=False)
    font_file()
    unfinished = out.parent / f".{out.name}.partial"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    worlds = _plan_splits(items, seed, train_products, queries_per_task)
    counts = {
        "products": {rows.split: len(rows.codes) for rows in worlds},
        "candidates": {rows.split: rows.num_candidates for rows in worlds},
        "queries": {rows.split: sum(map(len, rows.asks.values())) for rows in worlds},
        "pictures": _write(unfinished, worlds, workers),
    }
    facts = {"plan": plan, "counts": counts}
    write_json(unfinished / "catalogue.json", facts)
    unfinished.rename(out)
    return _summary(out, facts, drawn=True)


def _check(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise UsageError(f"{name} is {value:,}; give a number from {low:,} to {high:,}")


def _already_there(out: Path, plan: dict[str, int]) -> dict[str, Any] | None:
    """What is known about the same catalogue at ``out``; None if the place is free."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; give a folder that does not exist yet")
    if not out.exists() or not any(out.iterdir()):
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):
        found: dict[str, Any] = json.loads((out / "catalogue.json").read_text())
        if found["plan"] == plan:
            return found
    raise UsageError(
        f"{out} is not empty and does not hold this catalogue ({plan['items']:,} items, seed {plan['seed']}, "
        f"{plan['train_products']:,} training products, {plan['queries_per_task']:,} queries per task); "
        "give another folder, or remove this one"
    )


def _summary(out: Path, facts: dict[str, Any], *, drawn: bool) -> CatalogueSummary:
    plan, counts = facts["plan"], facts["counts"]
    return CatalogueSummary(folder=out, items=plan["items"], seed=plan["seed"], drawn=drawn, **counts)


def _plan_splits(items: int, seed: int, train_products: int, queries_per_task: int) -> list[SplitRows]:
    """Decide what each split holds; candidate ids run through test, val, train."""
    splits = split_of_products(seed)
    wanted: dict[Split, int] = {
        "test": items,
        "val": min(VAL_CANDIDATES, items // 4),
        "train": train_products * PER_PRODUCT,
    }
    rows, first_did = [], 1
    for split, num_candidates in wanted.items():
        codes = sample_products(split, num_candidates // PER_PRODUCT, splits=splits, seed=seed)
        per_task = len(codes) if split == "train" else min(queries_per_task, len(codes))
        asks = plan_asks(split, codes, per_task=per_task, splits=splits, seed=seed)
        rows.append(SplitRows(split, seed, codes, first_did, num_candidates, asks))
        first_did += num_candidates
    return rows


def _write_split(root: Path, rows: SplitRows) -> None:
    """Write a split's pools, queries and qrels; the training split has them in one piece only."""
    pools, split = root / "cand_pool", rows.split
    if split == "train":
        write_candidates(
            pools / "global" / "mbeir_union_train_cand_pool.jsonl",
            chain.from_iterable(map(rows.candidates, KINDS)),
        )
        write_queries(
            root / "query" / "union_train" / "mbeir_union_up_train.jsonl",
            chain.from_iterable(map(rows.queries, TASKS)),
        )
        return
    files = {task: pools / "local" / f"mbeir_{DATASET}_task{task}_{split}_cand_pool.jsonl" for task in TASKS}
    union = pools / "global" / f"mbeir_union_{split}_cand_pool.jsonl"
    union.parent.mkdir(parents=True, exist_ok=True)
    with union.open("wb") as whole:
        for kind in KINDS:
            first, *others = (file for task, file in files.items() if KIND_OF_TASK[task] == kind)
            write_candidates(first, rows.candidates(kind))
            for other in others:
                shutil.copyfile(first, other)
            with first.open("rb") as part:
                shutil.copyfileobj(part, whole)
    for task in TASKS:
        name = f"mbeir_{DATASET}_task{task}_{split}"
        write_queries(root / "query" / split / f"{name}.jsonl", rows.queries(task))
        write_qrels(root / "qrels" / split / f"{name}_qrels.txt", rows.queries(task))
    write_queries(
        root / "query" / f"union_{split}" / f"mbeir_union_{split}.jsonl",
        chain.from_iterable(map(rows.queries, TASKS)),
    )


def _write(root: Path, worlds: list[SplitRows], workers: int | None) -> int:
    """Write all files; how many pictures there are. Other processes, if any, draw while this one writes."""
    if workers is None:
        few = sum(2 * len(rows.codes) + sum(map(len, rows.asks.values())) for rows in worlds) <= _ALONE
        workers = 1 if few else os.cpu_count() or 1
    shards = chain.from_iterable(rows.shards() for rows in worlds)
    draw_shard = partial(_draw_shard, root)
    if workers == 1:
        _write_texts(root, worlds)
        return sum(map(draw_shard, shards))
    with multiprocessing.Pool(workers) as pool:
        drawn = pool.imap_unordered(draw_shard, shards)
        _write_texts(root, worlds)
        return sum(drawn)


def _write_texts(root: Path, worlds: list[SplitRows]) -> None:
    write_instructions(
        root / "instructions" / "query_instructions.tsv",
        (InstructionRow(*TASKS[task], DATASET, DATASET_ID, texts) for task, texts in INSTRUCTIONS.items()),
    )
    for rows in worlds:
        _write_split(root, rows)


def _draw_shard(root: Path, shard: PictureShard) -> int:
    """Draw one share; how many pictures there were."""
    pictures = list(shard.pictures())
    for folder in {(root / picture.path).parent for picture in pictures}:
        folder.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        save(draw(picture.product, picture.pose), root / picture.path)
    return len(pictures)
