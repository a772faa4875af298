"""Rows of features in mapped files, found by the ids of queries or candidates, a batch at a time.

Nothing is read but the rows that are asked for and, once, the ids: 12 bytes a row, for M-BEIR's 5.6 million
candidates some 70 MB.
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

from genius.data.records import CANDIDATE_CAP, QUERY_CAP, candidate_number, parse_id, query_number
from genius.encoders.protocol import ItemKey
from genius.errors import BadData, UsageError

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
