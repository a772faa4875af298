"""Karpathy's caption files (COCO, Flickr30K, Flickr8K) become a data set in M-BEIR's layout.

Done as M-BEIR's authors did with COCO: the first five captions of each picture, a caption that occurs with
several pictures of a split kept once with all of them as positives, task 0 (text -> image) and task 3
(image -> text), pools of their own for val and test. GENIUS adds Flickr30K as data set 10 in this form.

No picture is copied: ``mbeir_images/<name>`` in the new folder is a link to the folder of pictures.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal, NamedTuple

from genius_search.artifact import new_folder
from genius_search.data.mbeir import (
    InstructionRow,
    write_candidates,
    write_instructions,
    write_qrels,
    write_queries,
)
from genius_search.errors import BadData, UsageError
from genius_search.records import QUERY_CAP, Candidate, Modality, Query

CAPTIONS_PER_IMAGE: Final = 5

SPLITS: Final = {"train": "train", "restval": "train", "val": "val", "test": "test"}
"""Karpathy's splits -> ours; ``restval`` is what he added to COCO's training pictures."""

TEXT_TO_IMAGE: Final = (
    "Find the photo that this caption was written for.",
    "Show me a picture of what is described here.",
    "Which image goes with this sentence?",
    "Search for a photograph that fits the description.",
)
"""Our own wording (no instructions are published for Flickr30K)."""

IMAGE_TO_TEXT: Final = (
    "Find a caption that was written for this photo.",
    "Which sentence says what is in this picture?",
    "Search for a text that describes the image.",
    "Give me the words that go with this photograph.",
)
"""Our own wording, as above."""


class ConvertedSplit(NamedTuple):
    """What one split came to."""

    split: str
    num_images: int
    num_captions: int
    """Different ones."""
    num_queries: int
    """Of both tasks; fewer than pictures and captions together only where M-BEIR's numbers run out."""


class _Caption(NamedTuple):
    did: str
    place: int
    """Which of its (first) picture's captions it is, from 0."""
    image_ids: list[str]


@dataclass(slots=True)
class _Split:
    """Pictures and captions of one split, tied both ways."""

    images: dict[str, tuple[str, list[str]]] = field(default_factory=dict)
    """Id of a picture -> its path and the ids of its captions."""
    captions: dict[str, _Caption] = field(default_factory=dict)

    def asked_captions(self) -> list[tuple[str, _Caption]]:
        """Captions that become queries: all, or as many as query numbers below UniIR's cap allow.

        COCO's training captions are more. Then every picture's first caption goes before any second one.
        """
        room = QUERY_CAP - 1 - len(self.images)
        captions = list(self.captions.items())
        return captions if len(captions) <= room else sorted(captions, key=_by_place)[:room]


def _by_place(item: tuple[str, _Caption]) -> int:
    return item[1].place


def convert_karpathy(
    json_file: Path, images_root: Path, out: Path, *, dataset_id: int, dataset_name: str
) -> list[ConvertedSplit]:
    """Write ``out`` from ``dataset_coco.json`` or ``dataset_flickr30k.json`` and the folder of its pictures.

    Parameters
    ----------
    images_root
        holds ``filepath/filename`` for COCO (``val2014/COCO_...jpg``), ``filename`` for Flickr.
    dataset_id
        9 for COCO and 10 for Flickr30K, as M-BEIR and GENIUS number them; any other for other data.

    Raises
    ------
    UsageError
        ``out`` holds something already, or the name cannot be part of a file name.
    BadData
        the JSON is not of this kind, or pictures are missing.
    """
    if not dataset_name.isalnum() or dataset_name != dataset_name.lower():
        raise UsageError(f"data set name {dataset_name!r}: use small letters and digits, as in flickr30k")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} exists already; give a new folder or delete it")
    if not images_root.is_dir():
        raise BadData(f"{images_root}: there is no such folder of pictures")
    splits = _collect(json_file, images_root, dataset_id, dataset_name)
    with new_folder(out) as partial:
        for split, content in splits.items():
            _write_split(partial, split, content, dataset_id, dataset_name)
        write_instructions(
            partial / "instructions" / "query_instructions.tsv",
            (
                InstructionRow(Modality.TEXT, Modality.IMAGE, dataset_name, dataset_id, TEXT_TO_IMAGE),
                InstructionRow(Modality.IMAGE, Modality.TEXT, dataset_name, dataset_id, IMAGE_TO_TEXT),
            ),
        )
        link = partial / _link(dataset_name)
        link.parent.mkdir(parents=True)
        try:
            link.symlink_to(images_root.resolve(), target_is_directory=True)
        except OSError as error:
            raise BadData(f"{link}: cannot link to {images_root}: {error.strerror}") from None
    return [
        ConvertedSplit(
            split, len(part.images), len(part.captions), len(part.images) + len(part.asked_captions())
        )
        for split, part in splits.items()
    ]


def _link(dataset_name: str) -> PurePosixPath:
    return PurePosixPath("mbeir_images", dataset_name)


def _collect(json_file: Path, images_root: Path, dataset_id: int, dataset_name: str) -> dict[str, _Split]:
    """Number pictures and captions in the order of the file, so that ids are unique over all splits."""
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
        for place, text in enumerate(captions):
            if text not in content.captions:
                number += 1
                content.captions[text] = _Caption(f"{dataset_id}:{number}", place, [])
            content.captions[text].image_ids.append(image_id)
            caption_ids.append(content.captions[text].did)
        content.images[image_id] = (str(_link(dataset_name) / path), caption_ids)
    if missing:
        raise BadData(
            f"{json_file}: {len(missing):,} of {num_images:,} pictures are missing, the first is "
            f"{missing[0]}; give the folder that holds them, or complete it"
        )
    if not splits:
        raise BadData(f"{json_file}: has no pictures")
    return splits


def _images(json_file: Path) -> Iterator[tuple[str, PurePosixPath, list[str]]]:
    """Split, path and captions of each picture."""
    try:
        with json_file.open(encoding="utf-8") as file:
            body = json.load(file, object_hook=_without_tokens)
        rows = body["images"]
    except OSError as error:
        raise BadData(f"{json_file}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise BadData(
            f"{json_file} is not a caption file of Karpathy's kind, an object with 'images' ({error!r})"
        ) from None
    for place, row in enumerate(rows):
        try:
            split = SPLITS.get(row["split"])
            path = PurePosixPath(row.get("filepath") or "", row["filename"])
            captions = [sentence["raw"].strip() for sentence in row["sentences"][:CAPTIONS_PER_IMAGE]]
        except (KeyError, TypeError, AttributeError) as error:
            raise BadData(
                f"{json_file}: images[{place}] needs filename, split and sentences[].raw ({error!r})"
            ) from None
        if split is None:
            raise BadData(
                f"{json_file}: images[{place}] is in split {row['split']!r}, not {', '.join(SPLITS)}"
            )
        if path.is_absolute() or ".." in path.parts:
            raise BadData(f"{json_file}: images[{place}] leads out of the folder of pictures: {path}")
        captions = list(dict.fromkeys(caption for caption in captions if caption))
        if not captions:
            raise BadData(f"{json_file}: images[{place}] ({path}) has no caption")
        yield split, path, captions


def _without_tokens(part: dict[str, Any]) -> dict[str, Any]:
    """The token lists are most of the file and not needed."""
    part.pop("tokens", None)
    return part


def _write_split(out: Path, split: str, content: _Split, dataset_id: int, name: str) -> None:
    """Queries, pools and qrels of one split; the training queries of both tasks share a file."""
    pool = out / "cand_pool"
    write_candidates(
        pool / "global" / f"mbeir_union_{split}_cand_pool.jsonl",
        (*_candidates(content, 0), *_candidates(content, 3)),
    )
    if split == "train":
        stem = f"mbeir_{name}_{split}"
        queries = (*_queries(content, dataset_id, 0), *_queries(content, dataset_id, 3))
        write_queries(out / "query" / split / f"{stem}.jsonl", queries)
        write_qrels(out / "qrels" / split / f"{stem}_qrels.txt", queries)
        return
    for task_id in (0, 3):
        stem = f"mbeir_{name}_task{task_id}_{split}"
        write_candidates(pool / "local" / f"{stem}_cand_pool.jsonl", _candidates(content, task_id))
        write_queries(out / "query" / split / f"{stem}.jsonl", _queries(content, dataset_id, task_id))
        write_qrels(out / "qrels" / split / f"{stem}_qrels.txt", _queries(content, dataset_id, task_id))


def _candidates(content: _Split, task_id: Literal[0, 3]) -> Iterator[Candidate]:
    if task_id == 0:
        for did, (path, _) in content.images.items():
            yield Candidate(did, Modality.IMAGE, image=path)
    else:
        for text, caption in content.captions.items():
            yield Candidate(caption.did, Modality.TEXT, text=text)


def _queries(content: _Split, dataset_id: int, task_id: Literal[0, 3]) -> Iterator[Query]:
    """Captions are numbered from 1 and pictures after them, so that a split's query ids are unique."""
    asked = content.asked_captions()
    if task_id == 0:
        for number, (text, caption) in enumerate(asked, start=1):
            qid = f"{dataset_id}:{number}"
            yield Query(qid, Modality.TEXT, text=text, positives=tuple(caption.image_ids), task_id=task_id)
    else:
        for number, (path, caption_ids) in enumerate(content.images.values(), start=len(asked) + 1):
            qid = f"{dataset_id}:{number}"
            yield Query(qid, Modality.IMAGE, image=path, positives=tuple(caption_ids), task_id=task_id)
