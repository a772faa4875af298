"""`precomputed:PATH`: features that were computed elsewhere, looked up by id.

PATH is a folder, or one ``.npy`` file in it whose name starts with what it holds. The files of a folder:

- ``text_features.npy`` and ``image_features.npy``, two-dimensional; either may be absent. Queries and
  candidates share them, unless ``query_text_features.npy``, ``candidate_image_features.npy`` and so on are
  there, which come first.
- beside ``X_features.npy`` its ids, one per row, in the first that exists of ``X_features_ids.npy``,
  ``X_ids.npy``, ``query_ids.npy`` or ``candidate_ids.npy`` (for a file with that prefix) and ``ids.npy``: ids
  as text (``"9:12"``), or M-BEIR's integers. Without one, row ``r`` (from 0) is number ``r + 1`` of its data
  set, for queries and candidates alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from genius.artifact import file_fingerprint, fingerprint_of
from genius.data.records import candidate_number, parse_id, query_number
from genius.encoders.protocol import ImageInput, ItemKey, TextInput
from genius.errors import ArtifactMissing, BadData, UsageError

__all__ = ["PrecomputedEncoder"]

_Array: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[Any]]
_Part: TypeAlias = Literal["text", "image"]
_ROLES: Final = ("query", "candidate")
_PARTS: Final[tuple[_Part, ...]] = ("text", "image")


@dataclass(frozen=True, slots=True)
class _Ids:
    """The ids of a file's rows, sorted so that a row is found by bisection."""

    file: Path
    values: _Array
    rows: _Array


@dataclass(frozen=True, slots=True)
class _Table:
    """One features file, mapped, not read."""

    file: Path
    features: _Array
    ids: _Ids | None

    def rows_of(self, keys: Sequence[ItemKey]) -> list[int]:
        return [self._row_of(key) for key in keys]

    def _row_of(self, key: ItemKey) -> int:
        if not key.id:
            raise UsageError(
                "precomputed features cannot embed new content: they are looked up by the id of a known "
                "query or candidate. Use an encoder that reads texts and pictures, such as small or clip"
            )
        if self.ids is None:
            row = parse_id(key.id)[1] - 1
            if not 0 <= row < len(self.features):
                raise BadData(
                    f"{key.role} {key.id} is row {row} of {self.file}, which has {len(self.features)} "
                    "rows, counted from 0. If rows do not follow the ids' numbers, put the ids beside it, "
                    f"as {_ids_names(self.file)[0]}"
                )
            return row
        wanted: int | str = key.id
        if self.ids.values.dtype.kind in "iu":
            wanted = query_number(key.id) if key.role == "query" else candidate_number(key.id)
        place = int(np.searchsorted(self.ids.values, wanted))
        if place == len(self.ids.values) or self.ids.values[place] != wanted:
            raise BadData(f"{key.role} {key.id} is not among the ids in {self.ids.file}; it has no features")
        return int(self.ids.rows[place])

    def look_up(self, keys: Sequence[ItemKey]) -> Float[Tensor, "items dim"]:
        rows = self.rows_of(keys)
        found = torch.from_numpy(self.features[rows].astype(np.float32))
        good = found.isfinite().all(dim=1)
        if not bool(good.all()):
            first = int(good.int().argmin())
            raise BadData(
                f"{self.file}, row {rows[first]} ({keys[first].role} {keys[first].id}) "
                "holds NaN or infinity; compute it again"
            )
        return found


class PrecomputedEncoder:
    """Looks features up by id; cannot embed anything that is not in its files.

    Raises
    ------
    ArtifactMissing
        no features are at the path, or those of a role and part that are asked for.
    BadData
        a file is not what it should be, an id has no row, or a row holds NaN or infinity.
    UsageError
        the file's name does not say what it holds, or content without an id is to be embedded.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tables = _open_tables(path)

    @property
    def spec(self) -> str:
        """``precomputed:PATH``."""
        return f"precomputed:{self._path}"

    @property
    def dim(self) -> int:
        """Width of its features."""
        return int(next(iter(self._tables.values())).features.shape[1])

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the contents of its files."""
        contents = {}
        for (role, part), table in self._tables.items():
            ids = file_fingerprint(table.ids.file) if table.ids else "by row"
            contents[f"{role} {part}"] = [file_fingerprint(table.file), ids]
        return fingerprint_of(contents)

    @property
    def needs_pixels(self) -> bool:
        """It needs ids only."""
        return False

    def image_features(self, images: Sequence[ImageInput]) -> Float[Tensor, "items dim"]:
        """Features of known images."""
        return self._look_up("image", [image.key for image in images])

    def text_features(self, texts: Sequence[TextInput]) -> Float[Tensor, "items dim"]:
        """Features of known texts, whatever the text says now."""
        return self._look_up("text", [text.key for text in texts])

    def _look_up(self, part: _Part, keys: Sequence[ItemKey]) -> Float[Tensor, "items dim"]:
        features = torch.zeros(len(keys), self.dim)
        for role in _ROLES:
            places = [place for place, key in enumerate(keys) if key.role == role]
            if not places:
                continue
            table = self._tables.get((role, part))
            if table is None:
                raise ArtifactMissing(
                    f"{self.spec} has no {part} features for {role} {keys[places[0]].id}: "
                    f"put {part}_features.npy into {_folder_of(self._path)}"
                )
            features[places] = table.look_up([keys[place] for place in places])
        return features


def _folder_of(path: Path) -> Path:
    return path.parent if path.suffix == ".npy" else path


def _open_tables(path: Path) -> dict[tuple[str, _Part], _Table]:
    if not path.exists():
        raise ArtifactMissing(f"precomputed:{path}: no such file or folder")
    folder = _folder_of(path)
    if not folder.is_dir():
        raise UsageError(f"precomputed:{path} is neither a folder nor a .npy file")
    files = {
        (role, part): next((folder / name for name in names if (folder / name).is_file()), None)
        for role in _ROLES
        for part in _PARTS
        for names in [(f"{role}_{part}_features.npy", f"{part}_features.npy")]
    }
    if path.suffix == ".npy":
        for role, part in _meant_by(path):
            files[role, part] = path
    opened = {file: _open_table(file) for file in files.values() if file is not None}
    if not opened:
        raise ArtifactMissing(f"{folder} has neither text_features.npy nor image_features.npy")
    widths = {table.features.shape[1]: file for file, table in opened.items()}
    if len(widths) > 1:
        said = ", ".join(f"{file.name} has {width}" for width, file in sorted(widths.items()))
        raise BadData(f"the features in {folder} must have one width: {said}")
    return {meant: opened[file] for meant, file in files.items() if file is not None}


def _meant_by(file: Path) -> list[tuple[str, _Part]]:
    """What a file's name says it holds: ``text…``, ``image…``, ``query_text…``, ``candidate_image…``."""
    roles = [role for role in _ROLES if file.name.startswith(f"{role}_")] or list(_ROLES)
    bare = file.name.removeprefix("query_").removeprefix("candidate_")
    for part in _PARTS:
        if bare.startswith(part):
            return [(role, part) for role in roles]
    raise UsageError(
        f"precomputed:{file}: the file's name must start with text or image, to say what it holds; "
        "for example text_features.npy"
    )


def _open_table(file: Path) -> _Table:
    features = _open_array(file)
    if features.ndim != 2 or features.dtype.kind != "f" or features.shape[1] == 0:
        raise BadData(
            f"{file} holds {features.dtype} of shape {features.shape}; "
            "expected floating point numbers, one row per item"
        )
    return _Table(file, features, _open_ids(file, rows=len(features)))


def _open_ids(features: Path, *, rows: int) -> _Ids | None:
    found = [name for name in _ids_names(features) if (features.parent / name).is_file()]
    if not found:
        return None
    file = features.parent / found[0]
    ids = _open_array(file)
    if ids.ndim != 1 or ids.dtype.kind not in "iuU":
        raise BadData(f"{file} holds {ids.dtype} of shape {ids.shape}; expected one integer or text per row")
    if len(ids) != rows:
        raise BadData(f"{file} has {len(ids)} ids, but {features} has {rows} rows")
    order = np.argsort(ids, kind="stable")
    values = np.asarray(ids[order])
    repeated = np.flatnonzero(values[1:] == values[:-1])
    if len(repeated):
        raise BadData(f"{file} has the id {values[repeated[0]]} more than once")
    return _Ids(file, values, order)


def _ids_names(features: Path) -> list[str]:
    kind = features.stem.removesuffix("_features")
    roles = [f"{role}_ids.npy" for role in _ROLES if kind.startswith(f"{role}_")]
    return [f"{features.stem}_ids.npy", f"{kind}_ids.npy", *roles, "ids.npy"]


def _open_array(file: Path) -> _Array:
    try:
        array: _Array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError) as error:
        raise BadData(f"{file} is not an array that numpy can map: {error}") from error
    return array
