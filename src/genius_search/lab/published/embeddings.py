"""`published:PATH`: the authors' stored features, looked up by id.

These are GENIUS's ``*_IT_dict.pt`` (images and texts apart, each with a mask) and UniIR's ``*_embed.npy``
with ``*_ids.npy`` (one vector for both). Ids are M-BEIR's integers. A folder is searched with all below it,
and each query or candidate found by its id over all files of its role (specification of M-BEIR, section
2.7). Numbers of queries start anew in each split, so a query is looked up in files of its own split:
``_train``, ``_val`` or ``_test`` ends a file's name, or is the folder's name.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float32

from genius_search.artifact import file_fingerprint, fingerprint_of
from genius_search.encoders.base import ImageInput, ItemKey, JointInput, TextInput
from genius_search.encoders.precomputed import (
    Array,
    FeatureFile,
    Held,
    PrecomputedEncoder,
    Role,
    check_features,
    map_array,
    map_features,
    sort_ids,
)
from genius_search.errors import ArtifactMissing, BadData, UsageError
from genius_search.lab.published.checkpoint import read_container
from genius_search.records import did_of, qid_of

GENIUS_FILES: Final = "_IT_dict.pt"
UNIIR_FILES: Final = "_embed.npy"
GENIUS_SPLIT: Final = "train"
"""The split of GENIUS's query files where nothing names another: stage 0 ships no other."""
_SPLIT: Final = re.compile(r"_(train|val|test)$")
_PARTS: Final = {"image": ("img", "img_mask"), "text": ("text", "text_mask")}
_COMPARED: Final = 200
"""Vectors that are compared where files hold the same ids."""
_TOLERANCE: Final = 0.05
"""Vectors of one item differ by at most this share of their length (16-bit floats, autocast)."""


class PublishedEncoder(PrecomputedEncoder):
    """GENIUS's stored image and text features, looked up by id and split."""

    kind = "published"

    def hash_file(self, file: Path) -> str:
        """Hash a file; of a torch file only the checksums of its tensors, which spares reading all of it.

        A file saved without checksums (``torch.serialization.set_crc32_options``) is read whole.
        """
        if not zipfile.is_zipfile(file):
            return file_fingerprint(file)
        with zipfile.ZipFile(file) as container:
            entries = container.infolist()
        if not all(entry.CRC for entry in entries if entry.file_size):
            return file_fingerprint(file)
        return fingerprint_of(
            sorted([entry.filename.partition("/")[2], entry.file_size, entry.CRC] for entry in entries)
        )

    def files_of(self, part: str, key: ItemKey) -> Sequence[FeatureFile]:
        """Return the files of the item's own split, where files name theirs."""
        splits = {held.split: files for held, files in self.tables.items() if held[:2] == (key.role, part)}
        if not splits:
            which = "query files" if key.role == "query" else "candidate pools' files"
            raise self.missing(part, key, f"give a folder that holds the {which} too")
        if key.split in splits or None in splits:
            return splits.get(key.split) or splits[None]
        others = " and ".join(f"{files[0].file} ({split})" for split, files in splits.items())
        if key.split is not None:
            raise BadData(
                f"query {key.id} is of split {key.split}, and {self.spec} holds queries of another: "
                f"{others}. Their numbers mean other queries; give a folder that holds this split too, in "
                f"files or folders whose names end in {key.split}"
            )
        if len(splits) > 1:
            raise UsageError(
                f"{self.spec} holds queries of several splits, {others}, and nothing tells which of them "
                f"query {key.id} belongs to; give the folder of one"
            )
        return next(iter(splits.values()))


class PublishedJointEncoder(PublishedEncoder):
    """UniIR's stored embeddings: one vector for image and text together, looked up by id and split."""

    def joint_features(self, items: Sequence[JointInput]) -> Float32[np.ndarray, "items dim"]:
        """Return the vectors of known queries or candidates, whatever they hold now."""
        return self.look_up("joint", [item.key for item in items])

    def image_features(self, images: Sequence[ImageInput]) -> Float32[np.ndarray, "items dim"]:  # noqa: ARG002
        """Raise :class:`UsageError`: image and text are not apart."""
        raise UsageError(
            f"{self.spec} holds one vector for image and text together; what needs them apart needs GENIUS's "
            "own feature files"
        )

    def text_features(self, texts: Sequence[TextInput]) -> Float32[np.ndarray, "items dim"]:  # noqa: ARG002
        """Raise :class:`UsageError`: image and text are not apart."""
        return self.image_features(())


def open_features(place: str, *, download: bool = False, device: str = "cpu") -> PublishedEncoder:  # noqa: ARG001
    """Open the authors' stored features at a path.

    Raises ArtifactMissing: no such features are at the path. Raises BadData: a file is not what it should be,
    or files do not fit together. Raises ArtifactMismatch: a torch file is damaged, or asks for code to be
    run. Raises UsageError: a file's name does not say what it holds, or the folder holds both layouts.
    """
    path = Path(place).expanduser()
    if not path.exists():
        raise ArtifactMissing(f"published:{path}: no such file or folder")
    genius, uniir = _find_files(path, GENIUS_FILES), _find_files(path, UNIIR_FILES)
    if genius and uniir:
        raise UsageError(
            f"published:{path} holds features of GENIUS ({genius[0].name}) and of UniIR ({uniir[0].name}); "
            "give the folder of one"
        )
    if uniir:
        return PublishedJointEncoder(path, _join([_open_embeddings(file) for file in uniir]))
    if genius:
        return PublishedEncoder(path, _join([_open_dict(file) for file in genius]))
    raise ArtifactMissing(
        f"published:{path} holds no published features: no *_IT_dict.pt (GENIUS), no *_embed.npy (UniIR)"
    )


class PublishedFile(NamedTuple):
    """One published file's features, by part, which share their ids."""

    role: Role
    split: str | None
    """The split of queries, where it is known."""
    parts: dict[str, FeatureFile]
    """``image`` and ``text``, or ``joint``."""


def _find_files(path: Path, ending: str) -> list[Path]:
    """Find files with this ending: the one that was named, or those in a folder and below it.

    UniIR puts candidates beside the folders of its splits, so a split's folder brings them along.
    """
    if path.is_file():
        return [path] if path.name.endswith(ending) or path.suffix == ending[-3:] == ".pt" else []
    folders = [path]
    beside = path.parent / "cand_pool"
    if ending == UNIIR_FILES and _SPLIT.match(f"_{path.name}") and beside.is_dir():
        folders.append(beside)
    return sorted(file for folder in folders for file in folder.rglob(f"*{ending}") if file.is_file())


def _join(files: Sequence[PublishedFile]) -> dict[Held, Sequence[FeatureFile]]:
    """Collect files by role, part and split; query files that do not name their split count for each."""
    splits: list[str | None] = [*sorted({file.split for file in files if file.split is not None})]
    tables: dict[Held, Sequence[FeatureFile]] = {}
    held: list[tuple[Role, str | None]] = [*(("query", split) for split in splits or [None])]
    for role, split in [*held, ("candidate", None)]:
        group = [file for file in files if file.role == role and file.split in (None, split)]
        for part in group[0].parts if group else ():
            tables[Held(role, part, split)] = [file.parts[part] for file in group]
            _compare(role, part, tables[Held(role, part, split)])
    return tables


def _compare(role: Role, part: str, files: Sequence[FeatureFile]) -> None:
    """Check on a sample that files which hold the same number mean the same item."""
    columns = [(file.ids, file.rows) for file in files if file.ids is not None and file.rows is not None]
    ids = np.concatenate([ids for ids, _ in columns])
    rows = np.concatenate([rows for _, rows in columns])
    owners = np.repeat(np.arange(len(files)), [len(ids) for ids, _ in columns])
    order = np.argsort(ids, kind="stable")
    shared = np.flatnonzero(ids[order][1:] == ids[order][:-1])  # ids of one file are unique
    for place in shared[np.linspace(0, len(shared) - 1, min(_COMPARED, len(shared))).astype(int)]:
        pair = order[place : place + 2]
        first, second = (files[owner] for owner in owners[pair])
        one, other = (
            files[o].features[r].astype(np.float32) for o, r in zip(owners[pair], rows[pair], strict=True)
        )
        longest = max(np.linalg.norm(one), np.linalg.norm(other))
        if one.shape != other.shape or np.linalg.norm(one - other) > _TOLERANCE * longest:
            number = int(ids[pair[0]])
            raise BadData(
                f"{first.file} and {second.file} hold different {part} features of {role} "
                f"{qid_of(number) if role == 'query' else did_of(number)}: they are of other encoders, data "
                "sets or splits; give the folder of one"
            )


def _split_of(file: Path) -> str | None:
    """Return the split that a query file's name says, or its folder's."""
    for name in (file.name.removesuffix(GENIUS_FILES).removesuffix(UNIIR_FILES), f"_{file.parent.name}"):
        if match := _SPLIT.search(name):
            return match[1]
    return None


def _open_embeddings(file: Path) -> PublishedFile:
    stem = file.name.removesuffix(UNIIR_FILES)
    ids_file = file.with_name(f"{stem}_ids.npy")
    if not ids_file.is_file():
        raise ArtifactMissing(f"{file} has no {ids_file.name} beside it, which says whose its rows are")
    features, ids = map_features(file), map_array(ids_file)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or len(ids) != len(features):
        raise BadData(
            f"{ids_file} holds {ids.dtype} of shape {ids.shape}; expected one integer for each of the "
            f"{len(features)} rows of {file.name}"
        )
    values, rows = sort_ids(ids.astype(np.int64))
    joint = FeatureFile(file=file, features=features, ids=values, rows=rows, ids_file=ids_file)
    if stem.endswith("_cand_pool"):
        return PublishedFile("candidate", None, {"joint": joint})
    return PublishedFile("query", _split_of(file), {"joint": joint})


def _open_dict(file: Path) -> PublishedFile:
    is_query = file.name.startswith("query_")
    if not is_query and not file.name.startswith("pool_") and "cand_pool_" not in file.name:
        raise UsageError(
            f"published:{file}: the name does not say whose features it holds; let it start with query_, "
            "or with pool_ or cand_pool_"
        )
    content = read_container(file)
    if not isinstance(content, Mapping):
        raise BadData(f"{file} holds a {type(content).__name__}; expected a feature file of GENIUS")
    absent = [name for name in ("img", "text", "img_mask", "text_mask", "id_to_index") if name not in content]
    if absent:
        raise BadData(f"{file} lacks {', '.join(absent)}; expected a feature file of GENIUS")
    ids, rows = _ids_and_rows(file, content["id_to_index"])
    parts = {}
    for part, (name, mask) in _PARTS.items():
        features = check_features(f"{file}: {name}", _array(file, name, content[name]))
        present = _array(file, mask, content[mask]).reshape(-1) > 0
        if len(present) != len(features):
            raise BadData(f"{file}: {mask} has {len(present)} entries, but {name} has {len(features)} rows")
        parts[part] = FeatureFile(file=file, features=features, ids=ids, rows=rows, present=present)
    sizes = {len(part.features) for part in parts.values()}
    if len(sizes) > 1:
        raise BadData(f"{file}: img and text have different numbers of rows: {sorted(sizes)}")
    if len(rows) and not (rows.min() >= 0 and rows.max() < sizes.pop()):
        raise BadData(f"{file}: id_to_index names rows that are not there")
    if is_query:
        return PublishedFile("query", _split_of(file) or GENIUS_SPLIT, parts)
    return PublishedFile("candidate", None, parts)


def _ids_and_rows(file: Path, id_to_index: object) -> tuple[Array, Array]:
    """Return sorted ids and their rows; in union files each id is a tensor of one number."""
    if not isinstance(id_to_index, Mapping):
        raise BadData(f"{file}: id_to_index is no mapping from ids to rows")
    try:
        ids = np.fromiter((int(key) for key in id_to_index), dtype=np.int64, count=len(id_to_index))
        rows = np.fromiter((int(row) for row in id_to_index.values()), dtype=np.int64, count=len(ids))
    except (TypeError, ValueError) as error:
        raise BadData(f"{file}: id_to_index maps something other than numbers to rows: {error}") from error
    return sort_ids(ids, rows)


def _array(file: Path, name: str, value: object) -> Array:
    if not isinstance(value, torch.Tensor) or value.dtype is torch.bfloat16:
        raise BadData(f"{file}: {name} is no tensor that numpy can read; expected 16- or 32-bit floats")
    array: Array = value.numpy()
    return array
