"""``python -m research.published.features``: the authors' stored features as a folder for ``precomputed:``.

GENIUS's ``*_IT_dict.pt`` have images and texts apart, each with a mask; UniIR's ``*_embed.npy`` with
``*_ids.npy`` one vector for both, which then stands for the image and for the text: their sum has its
direction. Ids are M-BEIR's integers (specification of M-BEIR, section 2.7). Numbers of queries start anew in
each split, so a folder holds the queries of one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch

from genius_search.cli.options import command
from genius_search.cli.terminal import print_text
from genius_search.errors import ArtifactMissing, BadData, UsageError
from genius_search.writing import new_folder
from research.command import run
from research.published.checkpoint import read_container

GENIUS_FILES: Final = "_IT_dict.pt"
UNIIR_FILES: Final = "_embed.npy"
BLOCK: Final = 65_536
_SPLIT: Final = re.compile(r"_(train|val|test)$")
_PARTS: Final = {"image": ("img", "img_mask"), "text": ("text", "text_mask")}
Split = Literal["train", "val", "test"]
Role = Literal["query", "candidate"]


class Stored(NamedTuple):
    """Features of one part of one file, and whose its rows are."""

    role: Role
    part: str
    features: np.ndarray
    ids: np.ndarray
    """M-BEIR's integers."""
    rows: np.ndarray
    """The row of each id."""


def convert_features(source: Path, out: Path, *, split: Split) -> dict[str, int]:
    """Write the features of a folder, and of all below it, as ``precomputed:`` reads them.

    Of an id that is in several files the first counts. Query files whose name, or whose folder's name, ends
    in another split are left out.

    Raises
    ------
    ArtifactMissing
        There are no such features.
    ArtifactMismatch
        A torch file is damaged, or asks for code to be run.
    BadData
        A file is not what it should be.

    Returns
    -------
    dict
        the number of rows in each file that was written.
    """
    stored = [one for file in sorted(source.rglob("*")) for one in _read(file, split)]
    if not stored:
        raise ArtifactMissing(
            f"{source} has no published features for split {split}: neither *{GENIUS_FILES} (GENIUS) nor "
            f"*{UNIIR_FILES} (UniIR)"
        )
    written = {}
    with new_folder(out) as folder:
        for role, part in dict.fromkeys((one.role, one.part) for one in stored):
            own = [one for one in stored if (one.role, one.part) == (role, part)]
            written[f"{role}_{part}"] = _write(folder / f"{role}_{part}_features.npy", own)
    return written


def _write(file: Path, stored: Sequence[Stored]) -> int:
    """Write each id's features once; return their number."""
    widths = {one.features.shape[1] for one in stored}
    if len(widths) > 1:
        raise BadData(f"{file.stem}: the features have different widths: {sorted(widths)}")
    ids = np.concatenate([one.ids for one in stored])
    owners = np.repeat(np.arange(len(stored)), [len(one.ids) for one in stored])
    rows = np.concatenate([one.rows for one in stored])
    _, first = np.unique(ids, return_index=True)
    first.sort()
    np.save(file.with_name(f"{file.stem}_ids.npy"), ids[first])
    features = np.lib.format.open_memmap(
        file, mode="w+", dtype=stored[0].features.dtype, shape=(len(first), *widths)
    )
    for start in range(0, len(first), BLOCK):
        block = first[start : start + BLOCK]
        for number in np.unique(owners[block]).tolist():
            chosen = np.flatnonzero(owners[block] == number)
            features[start + chosen] = stored[number].features[rows[block[chosen]]]
    features.flush()
    return len(first)


def _read(file: Path, split: Split) -> Iterator[Stored]:
    """Yield the parts of a file of features; none of any other file, or of queries of another split."""
    if file.name.endswith(GENIUS_FILES):
        role = _role(file, is_candidate=file.name.startswith("pool_") or "cand_pool_" in file.name)
        if role == "candidate" or _is_of(file, file.name.removesuffix(GENIUS_FILES), split):
            yield from _read_dict(file, role)
    elif file.name.endswith(UNIIR_FILES):
        stem = file.name.removesuffix(UNIIR_FILES)
        role = _role(file, is_candidate=stem.endswith("_cand_pool"))
        if role == "candidate" or _is_of(file, stem, split):
            features = np.load(file, mmap_mode="r", allow_pickle=False)
            ids = np.load(file.with_name(f"{stem}_ids.npy"), allow_pickle=False).astype(np.int64)
            if features.ndim != 2 or len(ids) != len(features):
                raise BadData(f"{file} holds {features.shape}, and its ids are {ids.shape}")
            for part in _PARTS:
                yield Stored(role, part, features, ids, np.arange(len(ids)))


def _role(file: Path, *, is_candidate: bool) -> Role:
    if is_candidate:
        return "candidate"
    if file.name.endswith(GENIUS_FILES) and not file.name.startswith("query_"):
        raise UsageError(f"{file}: the name does not say whose features it holds (query_, pool_, cand_pool_)")
    return "query"


def _is_of(file: Path, stem: str, split: Split) -> bool:
    """Return whether a query file may be of a split: its name, or its folder's, says no other."""
    named = next(filter(None, map(_SPLIT.search, (stem, f"_{file.parent.name}"))), None)
    return named is None or named[1] == split


def _read_dict(file: Path, role: Role) -> Iterator[Stored]:
    content = read_container(file)
    names = ("img", "text", "img_mask", "text_mask", "id_to_index")
    if not isinstance(content, Mapping) or any(name not in content for name in names):
        raise BadData(f"{file} is no feature file of GENIUS: expected a dict with {', '.join(names)}")
    # In union files each id is a tensor of one number.
    places: Mapping[Any, Any] = content["id_to_index"]
    ids = np.fromiter((int(key) for key in places), dtype=np.int64, count=len(places))
    rows = np.fromiter((int(row) for row in places.values()), dtype=np.int64, count=len(places))
    for part, (name, mask) in _PARTS.items():
        arrays = [content[name], content[mask]]
        if not all(isinstance(one, torch.Tensor) for one in arrays) or len(arrays[0]) != len(arrays[1]):
            raise BadData(f"{file}: {name} and {mask} are not tensors of one length")
        if len(rows) and not 0 <= rows.min() <= rows.max() < len(arrays[0]):
            raise BadData(f"{file}: id_to_index names rows that {name} does not have")
        is_there = arrays[1].numpy().reshape(-1)[rows] > 0
        yield Stored(role, part, arrays[0].numpy(), ids[is_there], rows[is_there])


@command
class Features:
    """Convert the authors' stored features, so that `--encoder precomputed:FOLDER` reads them."""

    source: Path
    """Folder with *_IT_dict.pt (GENIUS), or *_embed.npy (UniIR), or with such folders."""

    out: Path
    """Folder of the features, a new one."""

    split: Split = "train"
    """Split of the queries."""

    def run(self) -> None:
        """Convert the files."""
        for name, rows in convert_features(self.source, self.out, split=self.split).items():
            print_text(f"{name}: {rows:,} rows")


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert what the command line says."""
    return run(Features, "published.features", arguments)


if __name__ == "__main__":
    sys.exit(main())
