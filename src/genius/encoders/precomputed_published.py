"""The published feature files: GENIUS's ``*_IT_dict.pt`` and UniIR's ``*_embed.npy`` with ``*_ids.npy``.

GENIUS keeps images and texts apart, each with a mask; UniIR keeps one vector for both. Ids are M-BEIR's
integers. A folder is searched with all below it, and each query or candidate found by its id over all files
of its role (specification of M-BEIR, section 2.7).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Int64

from genius.data.records import did_of, qid_of
from genius.encoders.precomputed_plain import check_features, open_array, open_features
from genius.encoders.precomputed_table import Array, FeatureFile, Ids, Table
from genius.errors import ArtifactMissing, BadData, UsageError

Role = Literal["query", "candidate"]

GENIUS_FILES: Final = "_IT_dict.pt"
UNIIR_FILES: Final = "_embed.npy"
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


def open_genius(files: Sequence[Path]) -> dict[tuple[str, str], Table]:
    """The tables of GENIUS's files, by role and modality; errors as :func:`join`."""
    return join([_open_dict(file) for file in files])


def open_uniir(files: Sequence[Path]) -> dict[tuple[str, str], Table]:
    """The tables of UniIR's files, by role and ``joint``; errors as :func:`join`."""
    return join([_open_embeddings(file) for file in files])


def join(files: Sequence[PublishedFile]) -> dict[tuple[str, str], Table]:
    """One table per role and modality over all files that hold some.

    Raises
    ------
    UsageError
        query files of two splits have a query number in common: numbers start anew in each split.
    BadData
        two files give one item different vectors.
    """
    tables: dict[tuple[str, str], Table] = {}
    for role in ("query", "candidate"):
        own = [file for file in files if file.role == role]
        if not own:
            continue
        starts = np.cumsum([0, *(len(next(iter(file.parts.values())).features) for file in own)])
        ids = np.concatenate([file.ids for file in own])
        rows = np.concatenate([file.rows + start for file, start in zip(own, starts[:-1], strict=True)])
        if len(own) > 1:
            _compare(own, ids)
        where = str(own[0].file) if len(own) == 1 else f"{own[0].file} and {len(own) - 1} other files"
        shared = Ids.sort(where, ids, rows)
        for part in own[0].parts:
            tables[role, part] = Table(part, tuple(file.parts[part] for file in own), shared)
    return tables


def _compare(files: Sequence[PublishedFile], ids: np.ndarray) -> None:
    """Make sure that two files which hold the same item mean the same item."""
    owner = np.repeat(np.arange(len(files)), [len(file.ids) for file in files])
    place = np.concatenate([np.arange(len(file.ids)) for file in files])
    order = np.argsort(ids, kind="stable")
    same = np.flatnonzero(ids[order][1:] == ids[order][:-1])
    first, second = order[same], order[same + 1]
    apart = owner[first] != owner[second]
    first, second = first[apart], second[apart]
    splits = np.array([file.split or "" for file in files])
    mixed = np.flatnonzero(splits[owner[first]] != splits[owner[second]])
    if len(mixed) and files[0].role == "query":
        left, right = (files[owner[side[mixed[0]]]] for side in (first, second))
        raise UsageError(
            f"query {qid_of(int(ids[first[mixed[0]]]))} is in {left.file} and in {right.file}, and numbers "
            "of queries start anew in each split: give the folder of one split, for example "
            f"precomputed:{right.file.parent}"
        )
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
                    f"{files[0].role} {name}: they are of other encoders or data sets; give the folder of one"
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
    split = _SPLIT.search(stem)
    return PublishedFile(
        file,
        "candidate" if stem.endswith("_cand_pool") else "query",
        split[1] if split else None,
        ids.astype(np.int64),
        np.arange(len(ids)),
        {"joint": FeatureFile(file, features, ids_file=ids_file)},
    )


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
    content = _load(file)
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
    return PublishedFile(file, role, None, ids, rows, parts)


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


def _load(file: Path) -> Mapping[str, Any]:
    """Map the tensors of a ``torch.save`` file; nothing but tensors, numbers and texts is accepted."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises RuntimeError, UnpicklingError, ValueError and others
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadData(
            f"{file} cannot be read as a torch file of tensors ({reason}); nothing else is opened: such "
            "a file could run code"
        ) from error
    if not isinstance(content, Mapping):
        raise BadData(f"{file} holds a {type(content).__name__}; expected a feature file of GENIUS")
    return content
