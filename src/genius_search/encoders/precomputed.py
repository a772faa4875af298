"""`precomputed:PATH`: features computed elsewhere, in plain ``.npy`` files, looked up by id.

PATH is a folder, or one of the files in it:

- ``text_features.npy`` and ``image_features.npy``, two-dimensional; either may be absent. Queries and
  candidates share them, unless ``query_text_features.npy``, ``candidate_image_features.npy`` and so on are
  there, which come first.
- beside ``X_features.npy`` its ids, one per row, in ``X_ids.npy`` or ``ids.npy``: ids as text (``"9:12"``),
  or M-BEIR's integers. Without one, row ``r`` (from 0) is number ``r + 1`` of its data set, for queries and
  candidates alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float32, Int64

from genius_search.artifact import file_fingerprint, fingerprint_of
from genius_search.encoders.base import ImageInput, ItemKey, TextInput
from genius_search.errors import ArtifactMissing, BadData, UsageError
from genius_search.records import candidate_number, parse_id, query_number

Array: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[Any]]
Role: TypeAlias = Literal["query", "candidate"]

ROLES: Final[tuple[Role, ...]] = ("query", "candidate")
PARTS: Final = ("text", "image")
_SHOWN: Final = 5


class Held(NamedTuple):
    """The role, part and split whose features a table holds."""

    role: Role
    part: str
    """``image``, ``text`` or ``joint``."""
    split: str | None = None
    """The split of queries; None where the files do not say, and for candidates."""


@dataclass(frozen=True, kw_only=True)
class FeatureFile:
    """One file's features, memory-mapped, and the ids of its rows."""

    file: Path
    features: Array
    """Floating point, one row per item."""
    ids: Array | None = None
    """Sorted ids, as text or as M-BEIR's integers; None where row ``r`` is number ``r + 1``."""
    rows: Array | None = None
    """The row of each id."""
    ids_file: Path | None = None
    """The file of the ids, if that is another."""
    present: Array | None = None
    """False at rows that mark a missing modality; None where all rows count."""

    def stored_ids(self, keys: Sequence[ItemKey]) -> Array:
        """Return ids of items of one role in the form in which this file stores them."""
        if self.ids is None:
            return np.array([parse_id(key.id)[1] - 1 for key in keys], dtype=np.int64)
        if self.ids.dtype.kind == "U":
            return np.array([key.id for key in keys])
        number = query_number if keys[0].role == "query" else candidate_number
        return np.array([number(key.id) for key in keys], dtype=np.int64)

    def find(self, ids: Array) -> Int64[np.ndarray, " items"]:
        """Return the row of each stored id, or −1."""
        if self.ids is None or self.rows is None:
            return np.where((ids >= 0) & (ids < len(self.features)), ids, -1)
        if not len(self.ids):
            return np.full(len(ids), -1, dtype=np.int64)
        places = np.searchsorted(self.ids, ids).clip(max=len(self.ids) - 1)
        return np.where(self.ids[places] == ids, self.rows[places], -1).astype(np.int64)

    def read(
        self, rows: Int64[np.ndarray, " items"], keys: Sequence[ItemKey]
    ) -> Float32[np.ndarray, "items dim"]:
        """Return rows as 32-bit floats; ``keys`` name their items in errors.

        Raises
        ------
        BadData
            A row is marked as missing.
        """
        if self.present is not None and not self.present[rows].all():
            absent = np.flatnonzero(~self.present[rows])
            raise BadData(
                f"{name_items(keys, absent)} marked as missing in {self.file}, and the records have this "
                "modality; are the features of another data set?"
            )
        features: np.ndarray = self.features[rows].astype(np.float32)
        return features


class PrecomputedEncoder:
    """Image and text features looked up by id; nothing that is not in the files can be encoded."""

    kind: str = "precomputed"
    needs_pixels: bool = False

    def __init__(self, path: Path, tables: Mapping[Held, Sequence[FeatureFile]]) -> None:
        self.path = path
        self.tables = tables
        widths = {file.features.shape[1]: file.file for files in tables.values() for file in files}
        if len(widths) > 1:
            listed = ", ".join(f"{file.name} has {width}" for width, file in sorted(widths.items()))
            raise BadData(f"the features in {path} must have one width: {listed}")
        self.dim = int(next(iter(widths)))

    @property
    def spec(self) -> str:
        """``precomputed:PATH``."""
        return f"{self.kind}:{self.path}"

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the contents of the files."""
        hashed = cache(self.hash_file)
        return fingerprint_of(
            {
                " ".join(filter(None, held)): [
                    [hashed(file.file), hashed(file.ids_file) if file.ids_file else "by row"]
                    for file in files
                ]
                for held, files in self.tables.items()
            }
        )

    def hash_file(self, file: Path) -> str:
        """Return a hash of a file's contents."""
        return file_fingerprint(file)

    def image_features(self, images: Sequence[ImageInput]) -> Float32[np.ndarray, "items dim"]:
        """Return the features of known images."""
        return self.look_up("image", [image.key for image in images])

    def text_features(self, texts: Sequence[TextInput]) -> Float32[np.ndarray, "items dim"]:
        """Return the features of known texts, whatever the text says now."""
        return self.look_up("text", [text.key for text in texts])

    def look_up(self, part: str, keys: Sequence[ItemKey]) -> Float32[np.ndarray, "items dim"]:
        """Return the features of items by id; a file that holds an id comes before later ones.

        Raises
        ------
        ArtifactMissing
            No file holds this part of this role.
        BadData
            Ids have no row, or a row is marked as missing.
        UsageError
            An id is empty: the content is new.
        """
        if not all(key.id for key in keys):
            raise UsageError(
                "precomputed features cannot embed new content: they are looked up by the id of a known "
                "query or candidate. Use an encoder that reads texts and images, such as small or clip"
            )
        groups: dict[tuple[Role, str | None], list[int]] = {}
        for place, key in enumerate(keys):
            groups.setdefault((key.role, key.split), []).append(place)
        features = np.empty((len(keys), self.dim), dtype=np.float32)
        for places in groups.values():
            left = np.array(places)
            files = self.files_of(part, keys[places[0]])
            ids = files[0].stored_ids([keys[place] for place in places])
            for file in files:
                rows = file.find(ids)
                known = rows >= 0
                here = left[known]
                features[here] = file.read(rows[known], [keys[place] for place in here])
                left, ids = left[~known], ids[~known]
            if len(left):
                hint = ""
                if files[0].ids is None:
                    hint = (
                        "; its rows are number 1 and on of any data set: if they do not follow the ids' "
                        "numbers, put the ids beside it, as ids.npy"
                    )
                where = files[0].ids_file or files[0].file
                raise BadData(
                    f"{name_items(keys, left)} not among the ids in {where} ({len(left):,} of "
                    f"{len(places):,} looked up), which has {len(files[0].features)} rows{hint}"
                )
        return features

    def files_of(self, part: str, key: ItemKey) -> Sequence[FeatureFile]:
        """Return the files that hold this part of items like this one."""
        files = self.tables.get(Held(key.role, part))
        if files is None:
            folder = self.path if self.path.is_dir() else self.path.parent
            raise self.missing(part, key, f"put {part}_features.npy into {folder}")
        return files

    def missing(self, part: str, key: ItemKey, remedy: str) -> ArtifactMissing:
        """Return the error for a part that no file holds."""
        held = ", ".join(dict.fromkeys(f"{held.part} of {held.role}" for held in self.tables))
        return ArtifactMissing(
            f"{self.spec} has no {part} features for {key.role} {key.id}: {remedy} (there are: {held})"
        )


def open_precomputed(path: Path) -> PrecomputedEncoder:
    """Open the features of a folder, or of the folder of one of their files.

    Raises
    ------
    ArtifactMissing
        No features are at the path.
    BadData
        A file is not what it should be, or files do not fit together.
    """
    if not path.exists():
        raise ArtifactMissing(f"precomputed:{path}: no such file or folder")
    folder = path if path.is_dir() else path.parent
    files = {
        Held(role, part): file
        for role in ROLES
        for part in PARTS
        for name in (f"{part}_features.npy", f"{role}_{part}_features.npy")
        if (file := folder / name).is_file()
    }
    if not files or (path.is_file() and path not in files.values()):
        raise ArtifactMissing(
            f"{path} holds neither text_features.npy nor image_features.npy, nor is it one of them"
        )
    opened = {file: _open_features(file) for file in dict.fromkeys(files.values())}
    return PrecomputedEncoder(path, {held: [opened[file]] for held, file in files.items()})


def _open_features(file: Path) -> FeatureFile:
    features = map_features(file)
    names = (f"{file.stem.removesuffix('_features')}_ids.npy", "ids.npy")
    ids_file = next((file.parent / name for name in names if (file.parent / name).is_file()), None)
    if ids_file is None:
        return FeatureFile(file=file, features=features)
    ids = map_array(ids_file)
    if ids.ndim != 1 or ids.dtype.kind not in "iuU":
        raise BadData(
            f"{ids_file} holds {ids.dtype} of shape {ids.shape}; expected one integer or text per row"
        )
    if len(ids) != len(features):
        raise BadData(f"{ids_file} has {len(ids)} ids, but {file} has {len(features)} rows")
    values, rows = sort_ids(ids if ids.dtype.kind == "U" else ids.astype(np.int64))
    if len(values) < len(ids):
        listed, counts = np.unique(ids, return_counts=True)
        raise BadData(f"{ids_file} has the id {listed[counts > 1][0]} more than once")
    return FeatureFile(file=file, features=features, ids=values, rows=rows, ids_file=ids_file)


def map_array(file: Path) -> Array:
    """Memory-map an array of numbers or texts; raise :class:`BadData` where the file is none."""
    try:
        array: Array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError) as error:
        raise BadData(f"{file} is not an array that numpy can map: {error}") from error
    return array.view(np.ndarray)


def map_features(file: Path) -> Array:
    """Memory-map an array of floating point numbers, one row per item."""
    return check_features(str(file), map_array(file))


def check_features(name: str, features: Array) -> Array:
    """Return an array that can hold features; raise :class:`BadData` for any other."""
    if features.ndim != 2 or features.dtype.kind != "f" or features.shape[1] == 0:
        raise BadData(
            f"{name} holds {features.dtype} of shape {features.shape}; "
            "expected floating point numbers, one row per item"
        )
    return features


def sort_ids(ids: Array, rows: Array | None = None) -> tuple[Array, Array]:
    """Sort ids and their rows (by default their places); of an id that occurs twice the first stays."""
    values, first = np.unique(ids, return_index=True)
    return values, first if rows is None else rows[first]


def name_items(keys: Sequence[ItemKey], places: Array) -> str:
    """Return ``query 9:1 is``, or ``7 queries (9:1, 9:2, …) are``."""
    shown = [keys[place].id for place in places[:_SHOWN].tolist()]
    role = keys[int(places[0])].role
    if len(places) == 1:
        return f"{role} {shown[0]} is"
    roles = "queries" if role == "query" else "candidates"
    more = ", …" if len(places) > len(shown) else ""
    return f"{len(places):,} {roles} ({', '.join(shown)}{more}) are"
