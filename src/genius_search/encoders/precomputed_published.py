"""The published feature files: GENIUS's ``*_IT_dict.pt`` and UniIR's ``*_embed.npy`` with ``*_ids.npy``.

GENIUS keeps images and texts apart, each with a mask; UniIR keeps one vector for both. Ids are M-BEIR's
integers. A folder is searched with all below it, and each query or candidate found by its id over all files
of its role (specification of M-BEIR, section 2.7). Numbers of queries start anew in each split, so a query
is looked up in files of its own: ``_train``, ``_val`` or ``_test`` ends a file's name, or the folder is named
so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Int64

from genius_search.encoders.pickles import read_container
from genius_search.encoders.precomputed_table import (
    Array,
    FeatureFile,
    Held,
    Ids,
    Role,
    Table,
    check_features,
    open_array,
    open_features,
)
from genius_search.errors import ArtifactMissing, BadData, UsageError
from genius_search.records import did_of, qid_of

GENIUS_FILES: Final = "_IT_dict.pt"
UNIIR_FILES: Final = "_embed.npy"
GENIUS_SPLIT: Final = "train"
"""What GENIUS's query files are of where nothing says otherwise: stage 0 ships no other."""
_SPLIT: Final = re.compile(r"_(train|val|test)$")
_PARTS: Final = {"image": ("img", "img_mask"), "text": ("text", "text_mask")}
_COMPARED: Final = 200
"""Vectors that are compared where two files hold the same ids."""
_ALIKE: Final = 0.05
"""Two vectors of one item differ by at most this share of their length (16-bit floats, autocast)."""


class PublishedFile(NamedTuple):
    """One file: the features that it holds, and whose they are."""

    file: Path
    role: Role
    split: str | None
    """Of queries, if it is known."""
    ids: Int64[np.ndarray, " ids"]
    rows: Int64[np.ndarray, " ids"]
    parts: dict[str, FeatureFile]
    """``image`` and ``text``, or ``joint``."""


def find_published(path: Path, ending: str) -> list[Path]:
    """The files with this ending: the one that was named, or those in a folder and below it.

    UniIR puts candidates beside the folders of its splits, so that a split's folder brings them along.
    """
    if path.is_file():
        return [path] if path.name.endswith(ending) or path.suffix == ending[-3:] == ".pt" else []
    folders = [path]
    beside = path.parent / "cand_pool"
    if ending == UNIIR_FILES and _SPLIT.match(f"_{path.name}") and beside.is_dir():
        folders.append(beside)
    return sorted(file for folder in folders for file in folder.rglob(f"*{ending}") if file.is_file())


def open_genius(files: Sequence[Path]) -> dict[Held, Table]:
    """The tables of GENIUS's files; errors as :func:`join`."""
    return join([_open_dict(file) for file in files])


def open_uniir(files: Sequence[Path]) -> dict[Held, Table]:
    """The tables of UniIR's files; errors as :func:`join`."""
    return join([_open_embeddings(file) for file in files])


def join(files: Sequence[PublishedFile]) -> dict[Held, Table]:
    """One table per role, split of queries, and modality, over all files that hold some.

    Query files that do not say their split count for each.

    Raises
    ------
    BadData
        two files give one item different vectors.
    """
    queries = [file for file in files if file.role == "query"]
    candidates = [file for file in files if file.role == "candidate"]
    splits = sorted({file.split for file in queries if file.split is not None})
    tables = _join([file for file in queries if file.split is None], None) if not splits else {}
    for split in splits:
        tables |= _join([file for file in queries if file.split in (None, split)], split)
    return tables | _join(candidates, None)


def _join(files: Sequence[PublishedFile], split: str | None) -> dict[Held, Table]:
    """The tables of files of one role."""
    if not files:
        return {}
    starts = np.cumsum([0, *(len(next(iter(file.parts.values())).features) for file in files)])
    ids = np.concatenate([file.ids for file in files])
    rows = np.concatenate([file.rows + start for file, start in zip(files, starts[:-1], strict=True)])
    if len(files) > 1:
        _compare(files, ids)
    where = str(files[0].file) if len(files) == 1 else f"{files[0].file} and {len(files) - 1} other files"
    shared = Ids.sort(where, ids, rows)
    return {
        Held(files[0].role, part, split): Table(part, tuple(file.parts[part] for file in files), shared)
        for part in files[0].parts
    }


def _compare(files: Sequence[PublishedFile], ids: np.ndarray) -> None:
    """Make sure that two files which hold the same number mean the same item."""
    owner = np.repeat(np.arange(len(files)), [len(file.ids) for file in files])
    place = np.concatenate([np.arange(len(file.ids)) for file in files])
    order = np.argsort(ids, kind="stable")
    same = np.flatnonzero(ids[order][1:] == ids[order][:-1])
    first, second = order[same], order[same + 1]
    apart = owner[first] != owner[second]
    first, second = first[apart], second[apart]
    for step in np.unique(np.linspace(0, len(first) - 1, min(_COMPARED, len(first))).astype(int)):
        pair = [(files[owner[side[step]]], int(place[side[step]])) for side in (first, second)]
        for part in files[0].parts:
            one, other = (
                file.parts[part].features[int(file.rows[at])].astype(np.float32) for file, at in pair
            )
            alike = one.shape == other.shape and (
                np.linalg.norm(one - other) <= _ALIKE * max(np.linalg.norm(one), np.linalg.norm(other))
            )
            if not alike:
                number = int(ids[first[step]])
                name = qid_of(number) if files[0].role == "query" else did_of(number)
                raise BadData(
                    f"{pair[0][0].file} and {pair[1][0].file} hold different {part} features of "
                    f"{files[0].role} {name}: they are of other encoders, data sets or splits; give the "
                    "folder of one"
                )


def _open_embeddings(file: Path) -> PublishedFile:
    stem = file.name.removesuffix(UNIIR_FILES)
    ids_file = file.with_name(f"{stem}_ids.npy")
    if not ids_file.is_file():
        raise ArtifactMissing(f"{file} has no {ids_file.name} beside it, which says whose its rows are")
    features, ids = open_features(file), open_array(ids_file)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or len(ids) != len(features):
        raise BadData(
            f"{ids_file} holds {ids.dtype} of shape {ids.shape}; expected one integer for each of the "
            f"{len(features)} rows of {file.name}"
        )
    role: Role = "candidate" if stem.endswith("_cand_pool") else "query"
    return PublishedFile(
        file,
        role,
        None if role == "candidate" else _split_of(file),
        ids.astype(np.int64),
        np.arange(len(ids)),
        {"joint": FeatureFile(file, features, ids_file=ids_file)},
    )


def _split_of(file: Path) -> str | None:
    """The split that a query file's name says, or its folder's."""
    for name in (file.name.removesuffix(GENIUS_FILES).removesuffix(UNIIR_FILES), f"_{file.parent.name}"):
        found = _SPLIT.search(name)
        if found:
            return found[1]
    return None


def _open_dict(file: Path) -> PublishedFile:
    if file.name.startswith("query_"):
        role: Role = "query"
    elif file.name.startswith("pool_") or "cand_pool_" in file.name:
        role = "candidate"
    else:
        raise UsageError(
            f"precomputed:{file}: the name does not say whose features it holds; let it start with query_, "
            "or with pool_ or cand_pool_"
        )
    content = read_container(file)
    if not isinstance(content, Mapping):
        raise BadData(f"{file} holds a {type(content).__name__}; expected a feature file of GENIUS")
    absent = [name for name in ("img", "text", "img_mask", "text_mask", "id_to_index") if name not in content]
    if absent:
        raise BadData(f"{file} lacks {', '.join(absent)}; expected a feature file of GENIUS")
    parts = {}
    for part, (name, mask) in _PARTS.items():
        features = _array(file, name, content[name])
        check_features(f"{file}: {name}", features)
        present = _array(file, mask, content[mask]).reshape(-1) > 0
        if len(present) != len(features):
            raise BadData(f"{file}: {mask} has {len(present)} entries, but {name} has {len(features)} rows")
        parts[part] = FeatureFile(file, features, present)
    sizes = {len(part.features) for part in parts.values()}
    if len(sizes) > 1:
        raise BadData(f"{file}: img and text have different numbers of rows: {sorted(sizes)}")
    ids, rows = _numbers(file, content["id_to_index"])
    if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < sizes.pop()):
        raise BadData(f"{file}: id_to_index names rows that are not there")
    split = None if role == "candidate" else _split_of(file) or GENIUS_SPLIT
    return PublishedFile(file, role, split, ids, rows, parts)


def _numbers(file: Path, id_to_index: object) -> tuple[np.ndarray, np.ndarray]:
    """Ids and their rows. In union files the ids are tensors of one number, which equal no other key."""
    if not isinstance(id_to_index, Mapping):
        raise BadData(f"{file}: id_to_index is no mapping from ids to rows")
    count = len(id_to_index)
    try:
        ids = np.fromiter((int(key) for key in id_to_index), dtype=np.int64, count=count)
        rows = np.fromiter((int(row) for row in id_to_index.values()), dtype=np.int64, count=count)
    except (TypeError, ValueError) as error:
        raise BadData(f"{file}: id_to_index maps something other than numbers to rows: {error}") from error
    return ids, rows


def _array(file: Path, name: str, value: object) -> Array:
    if not isinstance(value, torch.Tensor) or value.dtype is torch.bfloat16:
        raise BadData(f"{file}: {name} is no tensor that numpy can read; expected 16- or 32-bit floats")
    array: Array = value.numpy()
    return array
