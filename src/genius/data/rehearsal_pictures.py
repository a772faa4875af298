"""The pictures of a rehearsal: few are drawn; the many files, named as M-BEIR's, are links."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

from PIL import Image

from genius.data.catalogue_drawing import Pose, draw, save
from genius.data.catalogue_world import RGB
from genius.data.rehearsal_concepts import Concepts
from genius.data.rehearsal_layout import Asking, Shelf, Split
from genius.data.rehearsal_sizes import LONGEST_SIDE

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
