"""`precomputed:PATH`: features computed elsewhere, in plain ``.npy`` files, looked up by id.

PATH is a folder, or a file in it, which leaves out files of the other modality:

- ``text_features.npy`` and ``image_features.npy``, two-dimensional; either may be absent. Queries and
  candidates share them, unless ``query_text_features.npy``, ``candidate_image_features.npy`` and so on are
  there, which come first.
- beside ``X.npy`` its ids, one per row, in ``X_ids.npy`` or ``ids.npy``: ids as text (``"9:12"``), or
  M-BEIR's integers. Without one, row ``r`` (from 0) is number ``r + 1`` of its data set, for queries and
  candidates alike.
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
    """One file's features, memory-mapped, and the ids of its rows.

    Raises
    ------
    BadData
        A file is not what it should be, or the ids do not fit the features.
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
        beside = (file.with_name(name) for name in (f"{file.stem}_ids.npy", "ids.npy"))
        self.ids_file = next((path for path in beside if path.is_file()), None)
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
                f"{self.ids_file} holds {ids.dtype} of shape {ids.shape}; expected one integer or text for "
                f"each of the {len(self.features)} rows of {file}"
            )
        ids = ids if ids.dtype.kind == "U" else ids.astype(np.int64)
        self._ids, self._rows = np.unique(ids, return_index=True)
        if len(self._ids) < len(ids):
            raise BadData(f"{self.ids_file} has {len(ids) - len(self._ids)} ids more than once")

    def find(self, keys: Keys) -> Int64[np.ndarray, " items"]:
        """Return the rows of items of one role; −1 for an item that has none."""
        if self.ids_file is None:
            numbers = np.array([parse_id(key.id)[1] - 1 for key in keys], dtype=np.int64)
            return np.where((numbers >= 0) & (numbers < len(self.features)), numbers, -1)
        if self._ids.dtype.kind == "U":
            wanted = np.array([key.id for key in keys])
        else:
            number = query_number if keys[0].role == "query" else candidate_number
            wanted = np.array([number(key.id) for key in keys], dtype=np.int64)
        places = np.searchsorted(self._ids, wanted).clip(max=len(self._ids) - 1)
        return np.where(self._ids[places] == wanted, self._rows[places], -1).astype(np.int64)


class PrecomputedEncoder:
    """Image and text features looked up by id; nothing that is not in the files can be encoded.

    Parameters
    ----------
    path
        a folder, or one of the files in it.

    Raises
    ------
    ArtifactMissing
        No features are at the path.
    BadData
        A file is not what it should be, or files do not fit together.
    """

    needs_pixels: bool = False

    def __init__(self, path: Path) -> None:
        self.spec = f"precomputed:{path}"
        folder = path if path.is_dir() else path.parent
        parts = [part for part in ("text", "image") if path.name.endswith(f"{part}_features.npy")]
        found = {
            f"{role} {part}": file
            for role in ("query", "candidate")
            for part in (parts if path != folder else ("text", "image"))
            for name in (f"{part}_features.npy", f"{role}_{part}_features.npy")
            if (file := folder / name).is_file()
        }
        if not found or not (path.is_dir() or path in found.values()):
            raise ArtifactMissing(
                f"precomputed:{path} is neither a folder with text_features.npy or image_features.npy, nor "
                "such a file"
            )
        opened = {file: FeatureFile(file) for file in dict.fromkeys(found.values())}
        self._files = {held: opened[file] for held, file in found.items()}
        widths = {table.features.shape[1]: file for file, table in opened.items()}
        if len(widths) > 1:
            listed = ", ".join(f"{file.name} has {width}" for width, file in sorted(widths.items()))
            raise BadData(f"the features in {path} must have one width: {listed}")
        self.dim = int(next(iter(widths)))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the contents of the files."""
        return fingerprint_of(
            {
                held: [file_fingerprint(file) for file in (table.file, table.ids_file) if file]
                for held, table in self._files.items()
            }
        )

    def image_features(self, _: Sequence[Any], keys: Keys = ()) -> Float32[np.ndarray, "items dim"]:
        """Return the features of known images; raises as :meth:`text_features`."""
        return self._look_up("image", keys)

    def text_features(self, _: Sequence[str], keys: Keys = ()) -> Float32[np.ndarray, "items dim"]:
        """Return the features of known texts, whatever the text says now.

        Raises
        ------
        ArtifactMissing
            No file holds texts of this role.
        BadData
            Ids have no row.
        UsageError
            An id is empty: the content is new.
        """
        return self._look_up("text", keys)

    def _look_up(self, part: str, keys: Keys) -> Float32[np.ndarray, "items dim"]:
        if not keys or not all(key.id for key in keys):
            raise UsageError(
                "precomputed features cannot embed new content: they are looked up by the id of a known "
                "query or candidate. Use an encoder that reads texts and images, such as small or clip"
            )
        role = keys[0].role
        table = self._files.get(f"{role} {part}")
        hint = "; the text of a picture's query is its instruction: give it a row, or remove instructions/"
        hint = hint if (role, part) == ("query", "text") else ""
        if table is None:
            raise ArtifactMissing(
                f"{self.spec} has no {part} features for {role} {keys[0].id}: put {part}_features.npy "
                f"beside the other files{hint}"
            )
        rows = table.find(keys)
        absent = [key.id for key, row in zip(keys, rows.tolist(), strict=True) if row < 0]
        if absent:
            where = (
                table.ids_file or f"{table.file}, whose rows are number 1 and on of any data set"
            )
            raise BadData(
                f"{role} {absent[0]} is not among the {len(table.features)} ids of {where} "
                f"({len(absent):,} of {len(keys):,} looked up are not){hint}"
            )
        return np.asarray(table.features[rows], dtype=np.float32)


def _map(file: Path) -> Array:
    """Memory-map an array of numbers or texts."""
    try:
        array: Array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError) as error:
        raise BadData(f"{file} is not an array that numpy can map: {error}") from error
    return array.view(np.ndarray)
