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

from pathlib import Path
from typing import Final

import numpy as np

from genius.encoders.precomputed_table import Array, FeatureFile, Held, Ids, Role, Table
from genius.errors import ArtifactMissing, BadData, UsageError

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
