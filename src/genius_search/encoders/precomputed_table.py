"""Features in plain ``.npy`` files, image and text apart: the layout for features of one's own.

- ``text_features.npy`` and ``image_features.npy``, two-dimensional; either may be absent. Queries and
  candidates share them, unless ``query_text_features.npy``, ``candidate_image_features.npy`` and so on are
  there, which come first.
- beside ``X_features.npy`` its ids, one per row, in the first that exists of ``X_features_ids.npy``,
  ``X_ids.npy``, ``query_ids.npy`` or ``candidate_ids.npy`` (for a file with that prefix) and ``ids.npy``: ids
  as text (``"9:12"``), or M-BEIR's integers. Without one, row ``r`` (from 0) is number ``r + 1`` of its data
  set, for queries and candidates alike.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from genius_search.encoders.base import ItemKey
from genius_search.errors import ArtifactMissing, BadData, UsageError
from genius_search.records import CANDIDATE_CAP, QUERY_CAP, candidate_number, parse_id, query_number

Array: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[Any]]
Role: TypeAlias = Literal["query", "candidate"]

_PLAIN_ID: Final = "(?:0|[1-9][0-9]{0,3}):(?:0|[1-9][0-9]{0,11})"
_PLAIN_IDS: Final = re.compile(rf"{_PLAIN_ID}(?:\n{_PLAIN_ID})*")
_IDS_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class Ids:
    """Whose the rows are: sorted, so that a row is found by bisection."""

    where: str
    """The file or files they are from, for messages."""
    values: Array
    """Ids as text, or M-BEIR's integers."""
    rows: Array

    @staticmethod
    def sort(where: str, ids: Array, rows: Array) -> Ids:
        """Sort ids; of one that occurs twice the first stays."""
        if len(ids) > 1 and not (ids[1:] > ids[:-1]).all():
            order = np.argsort(ids, kind="stable")
            ids, rows = ids[order], rows[order]
            first = np.concatenate([[True], ids[1:] != ids[:-1]])
            ids, rows = ids[first], rows[first]
        small = len(rows) == 0 or int(rows.max()) < np.iinfo(np.int32).max
        return Ids(where, np.array(ids), np.array(rows, dtype=np.int32 if small else np.int64))


class FeatureFile(NamedTuple):
    """One file's features, mapped, not read."""

    file: Path
    features: Array
    """Floating point, one row per item."""
    present: Bool[np.ndarray, " rows"] | None = None
    """Rows that count; None where all do."""
    ids_file: Path | None = None
    """The file of its ids, if that is another."""


class Held(NamedTuple):
    """Whose features of what."""

    role: Role
    part: str
    """``image``, ``text`` or ``joint``."""
    split: str | None = None
    """Of queries; None where the files do not say, and for candidates."""


@dataclass(frozen=True)
class Table:
    """The features of one role (and split) and one modality, over all files that hold some."""

    what: str
    """``image``, ``text`` or ``joint``, for messages."""
    files: tuple[FeatureFile, ...]
    ids: Ids | None
    """None where row ``r`` is number ``r + 1`` of any data set."""
    advice: str = ""
    """What to do when rows do not follow the ids' numbers."""

    @property
    def dim(self) -> int:
        """Width of the features."""
        return int(self.files[0].features.shape[1])

    @cached_property
    def _starts(self) -> Int64[np.ndarray, " files"]:
        return np.cumsum([0, *(len(file.features) for file in self.files)], dtype=np.int64)

    def look_up(self, keys: Sequence[ItemKey]) -> Float[Tensor, "items dim"]:
        """Features of items of one role, as 32-bit floats.

        Raises
        ------
        BadData
            ids have no row, a row is marked absent, or holds NaN or infinity.
        UsageError
            an id is empty: the content is new.
        """
        if not all(key.id for key in keys):
            raise UsageError(
                "precomputed features cannot embed new content: they are looked up by the id of a known "
                "query or candidate. Use an encoder that reads texts and pictures, such as small or clip"
            )
        rows = self._rows_of(keys)
        if len(self.files) == 1:
            found = self._read(self.files[0], rows, keys)
        else:
            found = torch.empty(len(rows), self.dim)
            for number in np.unique(np.searchsorted(self._starts, rows, side="right") - 1).tolist():
                start, end = self._starts[number : number + 2]
                here = np.flatnonzero((rows >= start) & (rows < end))
                own = [keys[place] for place in here.tolist()]
                found[torch.from_numpy(here)] = self._read(self.files[number], rows[here] - start, own)
        return found

    def _read(self, file: FeatureFile, rows: np.ndarray, keys: Sequence[ItemKey]) -> Tensor:
        if file.present is not None and not file.present[rows].all():
            absent = np.flatnonzero(~file.present[rows])
            raise BadData(
                f"{_listed(keys, absent)} marked as having no {self.what} in {file.file}, and the records "
                "have one; are the features of another data set?"
            )
        found = torch.from_numpy(np.asarray(file.features[rows])).float()
        # A sum is finite where every term is, and much faster to have than a flag per number.
        if not bool(found.sum().isfinite()):
            good = found.isfinite().all(dim=1)
            if not bool(good.all()):
                first = int(good.int().argmin())
                raise BadData(
                    f"{file.file}, row {rows[first]} ({keys[first].role} {keys[first].id}) "
                    "holds NaN or infinity; compute it again"
                )
        return found

    def _rows_of(self, keys: Sequence[ItemKey]) -> Int64[np.ndarray, " items"]:
        if self.ids is None:
            return self._rows_by_number(keys)
        values = self.ids.values
        wanted = numbers_of(keys) if values.dtype.kind in "iu" else np.array([key.id for key in keys])
        place = np.searchsorted(values, wanted).clip(max=len(values) - 1)
        missing = np.flatnonzero(values[place] != wanted) if len(values) else np.arange(len(keys))
        if len(missing):
            some = "it has" if len(missing) == 1 else f"of {len(keys):,} looked up together these have"
            raise BadData(
                f"{_listed(keys, missing)} not among the ids in {self.ids.where}; {some} no features"
            )
        rows: np.ndarray = self.ids.rows[place].astype(np.int64)
        return rows

    def _rows_by_number(self, keys: Sequence[ItemKey]) -> Int64[np.ndarray, " items"]:
        rows = np.array([parse_id(key.id)[1] - 1 for key in keys], dtype=np.int64)
        file, size = self.files[0].file, len(self.files[0].features)
        outside = np.flatnonzero((rows < 0) | (rows >= size))
        if len(outside):
            key = keys[int(outside[0])]
            more = f" (and {len(outside) - 1} more like it)" if len(outside) > 1 else ""
            raise BadData(
                f"{key.role} {key.id} is row {rows[outside[0]]} of {file}, which has {size} "
                f"rows, counted from 0{more}. {self.advice}"
            )
        return rows


def numbers_of(keys: Sequence[ItemKey]) -> Int64[np.ndarray, " items"]:
    """M-BEIR's integers of items of one role, read from all ids in one go."""
    if not keys:
        return np.zeros(0, dtype=np.int64)
    is_query = keys[0].role == "query"
    cap = QUERY_CAP if is_query else CANDIDATE_CAP
    text = "\n".join(key.id for key in keys)
    if _PLAIN_IDS.fullmatch(text):
        pairs = np.fromstring(text.replace(":", "\n"), dtype=np.int64, sep="\n").reshape(-1, 2)
        if len(pairs) == len(keys) and int(pairs[:, 1].max()) < cap:
            return pairs[:, 0] * cap + pairs[:, 1]
    number = query_number if is_query else candidate_number  # says which id is wrong, and how
    return np.array([number(key.id) for key in keys], dtype=np.int64)


def _listed(keys: Sequence[ItemKey], places: np.ndarray) -> str:
    """``query 9:1 is``, or ``7 queries are`` with a few of them."""
    shown = [keys[place].id for place in places[:_IDS_SHOWN].tolist()]
    role = keys[int(places[0])].role
    if len(places) == 1:
        return f"{role} {shown[0]} is"
    roles = "queries" if role == "query" else "candidates"
    more = ", …" if len(places) > len(shown) else ""
    return f"{len(places):,} {roles} ({', '.join(shown)}{more}) are"


ROLES: Final[tuple[Role, ...]] = ("query", "candidate")
PARTS: Final = ("text", "image")


def open_plain(path: Path) -> dict[Held, Table]:
    """The tables of a folder; a file stands for what its name says, which is no split."""
    folder = path.parent if path.suffix == ".npy" else path
    files = {
        (role, part): next((folder / name for name in names if (folder / name).is_file()), None)
        for role in ROLES
        for part in PARTS
        for names in [(f"{role}_{part}_features.npy", f"{part}_features.npy")]
    }
    if path.suffix == ".npy":
        for role, part in _meant_by(path):
            files[role, part] = path
    parts = {file: part for (_, part), file in files.items() if file is not None}
    if not parts:
        raise ArtifactMissing(
            f"{folder} has neither text_features.npy nor image_features.npy, and no published features: "
            "no *_IT_dict.pt (GENIUS), no *_embed.npy (UniIR)"
        )
    opened = {file: _open_table(file, part) for file, part in parts.items()}
    return {Held(role, part): opened[file] for (role, part), file in files.items() if file is not None}


def open_array(file: Path) -> Array:
    """Map an array of numbers or texts.

    Raises
    ------
    BadData
        it is none.
    """
    try:
        array: Array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError) as error:
        raise BadData(f"{file} is not an array that numpy can map: {error}") from error
    return array.view(np.ndarray)


def open_features(file: Path) -> Array:
    """Map an array of floating point numbers, one row per item; raises as :func:`open_array`."""
    features = open_array(file)
    check_features(str(file), features)
    return features


def check_features(what: str, features: Array) -> None:
    """Raise unless these can be features."""
    if features.ndim != 2 or features.dtype.kind != "f" or features.shape[1] == 0:
        raise BadData(
            f"{what} holds {features.dtype} of shape {features.shape}; "
            "expected floating point numbers, one row per item"
        )


def _meant_by(file: Path) -> list[tuple[Role, str]]:
    """What a file's name says it holds: ``text…``, ``image…``, ``query_text…``, ``candidate_image…``."""
    roles = [role for role in ROLES if file.name.startswith(f"{role}_")] or list(ROLES)
    bare = file.name.removeprefix("query_").removeprefix("candidate_")
    for part in PARTS:
        if bare.startswith(part):
            return [(role, part) for role in roles]
    raise UsageError(
        f"precomputed:{file}: the file's name must start with text or image, to say what it holds; "
        "for example text_features.npy"
    )


def _open_table(file: Path, part: str) -> Table:
    features = open_features(file)
    ids_file = next((file.parent / name for name in _ids_names(file) if (file.parent / name).is_file()), None)
    return Table(
        part,
        (FeatureFile(file, features, ids_file=ids_file),),
        None if ids_file is None else _open_ids(ids_file, file, rows=len(features)),
        "If rows do not follow the ids' numbers, put the ids beside it, as " + _ids_names(file)[0],
    )


def _open_ids(file: Path, features: Path, *, rows: int) -> Ids:
    ids = open_array(file)
    if ids.ndim != 1 or ids.dtype.kind not in "iuU":
        raise BadData(f"{file} holds {ids.dtype} of shape {ids.shape}; expected one integer or text per row")
    if len(ids) != rows:
        raise BadData(f"{file} has {len(ids)} ids, but {features} has {rows} rows")
    if ids.dtype.kind in "iu":
        ids = ids.astype(np.int64)
    sorted_ids = Ids.sort(str(file), ids, np.arange(rows))
    if len(sorted_ids.values) < rows:
        values = np.sort(ids, kind="stable")
        repeated = values[1:][values[1:] == values[:-1]]
        raise BadData(f"{file} has the id {repeated[0]} more than once")
    return sorted_ids


def _ids_names(features: Path) -> list[str]:
    kind = features.stem.removesuffix("_features")
    roles = [f"{role}_ids.npy" for role in ROLES if kind.startswith(f"{role}_")]
    return [f"{features.stem}_ids.npy", f"{kind}_ids.npy", *roles, "ids.npy"]
