"""Convert Karpathy's caption files (COCO, Flickr30K, Flickr8K) to M-BEIR's layout.

This follows M-BEIR's conversion of COCO: an image has its first five captions; a caption of several
images of a split is one query, and all these images are its positives; tasks are 0 (text -> image)
and 3 (image -> text); val and test have separate pools. GENIUS adds Flickr30K as data set 10.

Images are not copied: ``mbeir_images/<name>`` in the new folder is a link to the folder of images.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated, Final, NamedTuple

import tyro

from genius_search.cli.options import command
from genius_search.cli.terminal import print_table
from genius_search.data.mbeir import Layout
from genius_search.errors import BadData, UsageError
from genius_search.records import QUERY_CAP, Candidate, Modality, Query
from genius_search.writing import new_folder
from research.command import run
from research.mbeir_files import (
    InstructionRow,
    query_file,
    write_candidates,
    write_instructions,
    write_qrels,
    write_queries,
)

CAPTIONS_PER_IMAGE: Final = 5

SPLITS: Final = {"train": "train", "restval": "train", "val": "val", "test": "test"}
"""Karpathy's splits -> ours; ``restval`` is his extension of COCO's training images."""

TEXT_TO_IMAGE: Final = (
    "Find the photo that this caption was written for.",
    "Show me a picture of what is described here.",
    "Which image goes with this sentence?",
    "Search for a photograph that fits the description.",
)
"""Our wording, as no instructions are published for Flickr30K."""

IMAGE_TO_TEXT: Final = (
    "Find a caption that was written for this photo.",
    "Which sentence says what is in this picture?",
    "Search for a text that describes the image.",
    "Give me the words that go with this photograph.",
)
"""Our wording, as above."""


class _Caption(NamedTuple):
    did: str
    position: int
    """Position among the captions of the (first) image, from 0."""
    image_ids: list[str]


class _Picture(NamedTuple):
    path: str
    caption_ids: list[str]


@dataclass(slots=True)
class _Split:
    """The pictures and captions of a split."""

    images: dict[str, _Picture] = field(default_factory=dict)
    """Id of a picture -> the picture."""
    captions: dict[str, _Caption] = field(default_factory=dict)
    """Text -> caption."""

    def query_captions(self) -> list[tuple[str, _Caption]]:
        """Return the captions that become queries: all, up to UniIR's limit on query numbers.

        COCO's training captions exceed the limit. In that case, the first captions of all images
        precede the second ones.
        """
        max_queries = QUERY_CAP - 1 - len(self.images)
        captions = list(self.captions.items())
        if len(captions) <= max_queries:
            return captions
        return sorted(captions, key=lambda item: item[1].position)[:max_queries]


def convert_karpathy(
    json_file: Path, images_root: Path, out: Path, *, dataset_id: int, dataset_name: str
) -> list[tuple[str, int, int, int]]:
    """Write a data set from ``dataset_coco.json`` or ``dataset_flickr30k.json`` and its pictures.

    Return the name of each split and its numbers of pictures, of distinct captions, and of queries.
    Pictures and captions are all queries unless M-BEIR's numbers run out.

    Parameters
    ----------
    images_root
        folder of ``filepath/filename`` for COCO (``val2014/COCO_...jpg``), ``filename`` for Flickr.
    dataset_id
        9 for COCO and 10 for Flickr30K, as in M-BEIR and GENIUS; any other number for other data.

    Raises
    ------
    UsageError
        ``out`` exists already, or the name cannot be part of a file name.
    BadData
        The JSON file has another form, or images are missing.
    """
    if not dataset_name.isalnum() or dataset_name != dataset_name.lower():
        raise UsageError(
            f"data set name {dataset_name!r}: use small letters and digits, as in flickr30k"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists already; give a new folder or delete it")
    if not images_root.is_dir():
        raise BadData(f"{images_root} is not a folder; give the folder of the pictures")
    splits = _collect(json_file, images_root, dataset_id, dataset_name)
    with new_folder(out) as partial:
        sizes = [
            _write_split(Layout(partial), split, content, dataset_id, dataset_name)
            for split, content in splits.items()
        ]
        write_instructions(
            partial / "instructions" / "query_instructions.tsv",
            [
                InstructionRow(query, candidate, dataset_name, dataset_id, instructions)
                for query, candidate, instructions in (
                    (Modality.TEXT, Modality.IMAGE, TEXT_TO_IMAGE),
                    (Modality.IMAGE, Modality.TEXT, IMAGE_TO_TEXT),
                )
            ],
        )
        link = partial / "mbeir_images" / dataset_name
        link.parent.mkdir(parents=True)
        link.symlink_to(images_root.resolve(), target_is_directory=True)
    return sizes


def _collect(
    json_file: Path, images_root: Path, dataset_id: int, dataset_name: str
) -> dict[str, _Split]:
    """Number pictures and captions in the order of the file; the ids are unique in the data set."""
    splits: dict[str, _Split] = {}
    missing: list[Path] = []
    num_images = number = 0
    for split, path, captions in _images(json_file):
        num_images += 1
        if not (images_root / path).is_file():
            missing.append(images_root / path)
        content = splits.setdefault(split, _Split())
        number += 1
        image_id = f"{dataset_id}:{number}"
        caption_ids = []
        for position, text in enumerate(captions):
            if text not in content.captions:
                number += 1
                content.captions[text] = _Caption(f"{dataset_id}:{number}", position, [])
            content.captions[text].image_ids.append(image_id)
            caption_ids.append(content.captions[text].did)
        content.images[image_id] = _Picture(f"mbeir_images/{dataset_name}/{path}", caption_ids)
    if missing:
        raise BadData(
            f"{json_file}: {len(missing):,} of {num_images:,} pictures are missing, the first is "
            f"{missing[0]}; give the folder that contains the pictures, or complete it"
        )
    if not splits:
        raise BadData(f"{json_file} has no pictures")
    return splits


def _images(json_file: Path) -> Iterator[tuple[str, PurePosixPath, list[str]]]:
    """Yield split, path and captions of each picture."""
    try:
        images = [
            (
                SPLITS[image["split"]],
                PurePosixPath(image.get("filepath") or "", image["filename"]),
                [sentence["raw"].strip() for sentence in image["sentences"][:CAPTIONS_PER_IMAGE]],
            )
            for image in json.loads(json_file.read_bytes())["images"]
        ]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise BadData(f"{json_file} is not one of Karpathy's caption files ({error!r})") from None
    for position, (split, path, captions) in enumerate(images):
        if path.is_absolute() or ".." in path.parts:
            raise BadData(
                f"{json_file}: images[{position}] is not in the folder of pictures: {path}"
            )
        if not any(captions):
            raise BadData(f"{json_file}: images[{position}] ({path}) has no caption")
        yield split, path, list(dict.fromkeys(filter(None, captions)))


def _write_split(
    layout: Layout, split: str, content: _Split, dataset_id: int, name: str
) -> tuple[str, int, int, int]:
    """Write queries, pools and qrels of a split; training queries of both tasks are in one file."""
    pools = {
        0: [
            Candidate(did, Modality.IMAGE, image=picture.path)
            for did, picture in content.images.items()
        ],
        3: [
            Candidate(caption.did, Modality.TEXT, text=text)
            for text, caption in content.captions.items()
        ],
    }
    queries = _make_queries(content, dataset_id)
    write_candidates(layout.union_pool(split), [*pools[0], *pools[3]])
    if split == "train":
        files = {f"{name}_{split}": [*queries[0], *queries[3]]}
    else:
        files = {f"{name}_task{task}_{split}": records for task, records in queries.items()}
        for task, pool in pools.items():
            write_candidates(layout.local_pool(f"{name}_task{task}_{split}"), pool)
    for stem, records in files.items():
        write_queries(query_file(layout.root, split, stem), records)
        write_qrels(layout.qrels(split, stem), records)
    return split, len(pools[0]), len(pools[3]), len(queries[0]) + len(queries[3])


def _make_queries(content: _Split, dataset_id: int) -> dict[int, list[Query]]:
    """Return the queries of a split by task: captions and, numbered after them, pictures."""
    captions = content.query_captions()
    text_queries = [
        Query(
            f"{dataset_id}:{number}",
            Modality.TEXT,
            text=text,
            positives=tuple(caption.image_ids),
            task_id=0,
        )
        for number, (text, caption) in enumerate(captions, start=1)
    ]
    image_queries = [
        Query(
            f"{dataset_id}:{number}",
            Modality.IMAGE,
            image=picture.path,
            positives=tuple(picture.caption_ids),
            task_id=3,
        )
        for number, picture in enumerate(content.images.values(), start=len(captions) + 1)
    ]
    return {0: text_queries, 3: image_queries}


@command
class Karpathy:
    """Convert Karpathy's JSON of COCO or Flickr30K to M-BEIR's layout (text to image and back)."""

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """dataset_coco.json or dataset_flickr30k.json."""

    images: Path
    """Folder of the pictures; they are linked, not copied."""

    out: Path
    """Folder of the new data set."""

    dataset_id: int = 10
    """Number of the data set in ids: 9 for COCO, 10 for Flickr30K."""

    dataset_name: str = "flickr30k"
    """Name of the data set in file names."""

    def run(self) -> None:
        """Convert the file and print the sizes of the splits."""
        splits = convert_karpathy(
            self.file,
            self.images,
            self.out,
            dataset_id=self.dataset_id,
            dataset_name=self.dataset_name,
        )
        headings = ("split", "pictures", "captions", "queries")
        print_table(headings, [list(map(str, split)) for split in splits])


main = partial(run, Karpathy, "karpathy")


if __name__ == "__main__":
    sys.exit(main())
