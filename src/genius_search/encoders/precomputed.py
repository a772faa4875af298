"""`precomputed:PATH`: features that other programs computed, in ``.npy`` files, looked up by id.

PATH is a folder, or one of its files of features, which excludes files of the other modality:

- ``text_features.npy`` and ``image_features.npy``, two-dimensional; either may be absent. They are
  used for queries and candidates, unless there is a file for one of them, such as
  ``query_text_features.npy`` or ``candidate_image_features.npy``.
- ``X_ids.npy`` or ``ids.npy``, with one id for each row of ``X.npy``: texts (``"9:12"``), or
  M-BEIR's integers. Without such a file, row ``r`` (from 0) is number ``r + 1`` of its data set,
  for queries and candidates alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Float32, Int64

from genius_search.artifact import file_fingerprint, fingerprint_of
from genius_search.encoders.base import Keys
from genius_search.errors import ArtifactMissing, BadData, UsageError
from genius_search.records import candidate_number, parse_id, query_number

Array: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[Any]]


class FeatureFile:
    """A memory-mapped file of features, and the ids of its rows.

    Raises
    ------
    BadData
        A file has another shape or type, or the numbers of ids and features differ.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.features = _map(file)
        if (
            self.features.ndim != 2
            or self.features.dtype.kind != "f"
            or self.features.shape[1] == 0
        ):
            raise BadData(
                f"{file} holds {self.features.dtype} of shape {self.features.shape}; "
                "expected floating point numbers, one row per item"
            )
        ids_files = (file.with_name(name) for name in (f"{file.stem}_ids.npy", "ids.npy"))
        self.ids_file = next((path for path in ids_files if path.is_file()), None)
        if self.ids_file is None:
            return
        ids = _map(self.ids_file)
        if (
            ids.ndim != 1
            or ids.dtype.kind not in "iuU"
            or len(ids) != len(self.features)
            or not len(ids)
        ):
            raise BadData(
                f"{self.ids_file} holds {ids.dtype} of shape {ids.shape}; expected one integer or "
                f"text for each of the {len(self.features)} rows of {file}"
            )
        ids = ids if ids.dtype.kind == "U" else ids.astype(np.int64)
        self._ids, self._rows = np.unique(ids, return_index=True)  # sorted ids, and their rows
        if len(self._ids) < len(ids):
            raise BadData(f"{self.ids_file} has {len(ids) - len(self._ids)} ids more than once")

    def find_rows(self, keys: Keys) -> Int64[np.ndarray, " items"]:
        """Return the row of each item, or −1 without one; all items have the same role."""
        if self.ids_file is None:
            numbers = np.array([parse_id(key.id)[1] - 1 for key in keys], dtype=np.int64)
            return np.where((numbers >= 0) & (numbers < len(self.features)), numbers, -1)
        if self._ids.dtype.kind == "U":
            ids = np.array([key.id for key in keys])
        else:
            number = query_number if keys[0].role == "query" else candidate_number
            ids = np.array([number(key.id) for key in keys], dtype=np.int64)
        positions = np.searchsorted(self._ids, ids).clip(max=len(self._ids) - 1)
        return np.where(self._ids[positions] == ids, self._rows[positions], -1).astype(np.int64)


class PrecomputedEncoder:
    """Image and text features looked up by id; items without a row in the files cannot be encoded.

    Parameters
    ----------
    path
        A folder, or one of its files of features.

    Raises
    ------
    ArtifactMissing
        The path holds no features.
    BadData
        A file has another shape or type, or the widths of files differ.
    """

    needs_pixels: bool = False

    def __init__(self, path: Path) -> None:
        self.spec = f"precomputed:{path}"
        folder = path if path.is_dir() else path.parent
        parts = [part for part in ("text", "image") if path.name.endswith(f"{part}_features.npy")]
        paths = _find_files(folder, parts if path != folder else ["text", "image"])
        if not paths or not (path.is_dir() or path in paths.values()):
            raise ArtifactMissing(
                f"precomputed:{path} is neither a folder with text_features.npy or "
                "image_features.npy, nor such a file"
            )
        tables = {file: FeatureFile(file) for file in dict.fromkeys(paths.values())}
        self._tables = {content: tables[file] for content, file in paths.items()}
        widths = {table.features.shape[1]: file for file, table in tables.items()}
        if len(widths) > 1:
            listed = ", ".join(f"{file.name} has {width}" for width, file in sorted(widths.items()))
            raise BadData(f"the features in {path} must have one width: {listed}")
        self.dim = int(next(iter(widths)))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the contents of the files."""
        hashes: dict[str, list[str]] = {}
        for content, table in self._tables.items():
            files = filter(None, (table.file, table.ids_file))
            hashes[content] = [file_fingerprint(file) for file in files]
        return fingerprint_of(hashes)

    def image_features(self, _: Sequence[Any], keys: Keys = ()) -> Float32[np.ndarray, "items dim"]:
        """Return the stored features of images; raises like :meth:`text_features`."""
        return self._look_up("image", keys)

    def text_features(self, _: Sequence[str], keys: Keys = ()) -> Float32[np.ndarray, "items dim"]:
        """Return the stored features of texts; the texts themselves are ignored.

        Raises
        ------
        ArtifactMissing
            No file holds texts of this role.
        BadData
            An id has no row.
        UsageError
            An id is empty, because the text is new.
        """
        return self._look_up("text", keys)

    def _look_up(self, part: str, keys: Keys) -> Float32[np.ndarray, "items dim"]:
        if not keys or not all(key.id for key in keys):
            raise UsageError(
                "precomputed features cannot embed new content: they are looked up by the id of a "
                "known query or candidate. Use an encoder that reads texts and images, such as "
                "small or clip"
            )
        role = keys[0].role
        hint = ""
        if (role, part) == ("query", "text"):
            hint = (
                "; the text of a picture's query is its instruction: give it a row, or remove "
                "instructions/"
            )
        table = self._tables.get(f"{role} {part}")
        if table is None:
            raise ArtifactMissing(
                f"{self.spec} has no {part} features for {role} {keys[0].id}: put "
                f"{part}_features.npy into the same folder{hint}"
            )
        rows = table.find_rows(keys)
        missing_ids = [key.id for key, row in zip(keys, rows.tolist(), strict=True) if row < 0]
        if missing_ids:
            source = (
                table.ids_file or f"{table.file}, whose rows are numbered from 1 in each data set"
            )
            raise BadData(
                f"{role} {missing_ids[0]} is not among the {len(table.features)} ids of {source} "
                f"({len(missing_ids):,} of the {len(keys):,} requested ids are missing){hint}"
            )
        return np.asarray(table.features[rows], dtype=np.float32)


def _find_files(folder: Path, parts: Sequence[str]) -> dict[str, Path]:
    """Return the file of each role and part (text or image).

    ::

        text_features.npy, query_text_features.npy
            -> {"query text": query_text_features.npy, "candidate text": text_features.npy}
    """
    files: dict[str, Path] = {}
    for role in ("query", "candidate"):
        for part in parts:
            for name in (f"{part}_features.npy", f"{role}_{part}_features.npy"):
                if (folder / name).is_file():
                    files[f"{role} {part}"] = folder / name
    return files


def _map(file: Path) -> Array:
    """Memory-map an array of numbers or texts."""
    try:
        array: Array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError) as error:
        raise BadData(f"{file} is not an array that numpy can map: {error}") from error
    return array.view(np.ndarray)
