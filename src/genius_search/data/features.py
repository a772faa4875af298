"""Features on disk, and the pairs of queries and candidates that training draws from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64, Shaped

from genius_search.artifact import open_artifact
from genius_search.errors import ArtifactMismatch, BadData
from genius_search.records import NUM_MODALITIES, Query, candidate_number, did_of
from genius_search.writing import new_folder

FEATURES_KIND: Final = "features"
ABSENT: Final = -1
"""Row number of a feature that an item lacks."""
CONTENTS: Final = "contents.json"

ROW: Final = np.dtype(
    [
        ("id", np.int64),  # UniIR's hash of M-BEIR ids, otherwise the row number
        ("image", np.int32),  # row in the shard's image features; ABSENT without an image
        ("text", np.int32),  # row in the shard's text features; ABSENT without a text
        ("modality", np.int8),  # code of the record's modality
        ("wanted", np.int8),  # code of a query's target modality; -1 for candidates
        ("key", np.int64),  # hash of the contents, the key of saved features
    ]
)
"""A query or candidate. M-BEIR's 5.6 million candidates take 157 MB. ::

    id     image  text  modality  wanted  key
    70001      0    -1         0      -1  8231…    an image, whose feature is row 0 of ``image``
    70002     -1     0         1      -1  −417…    a text, whose feature is row 0 of ``text``
    70003      1     1         2      -1  5530…    an image-text pair
"""


class LeftOut(NamedTuple):
    """A record that was left out because its image cannot be read."""

    id: int
    """Number of the record, or -1 for a file that is no record."""
    file: str
    reason: str


class Shard(NamedTuple):
    """Rows that are written together, and their features without gaps for absent modalities.

    The features of a shard on disk are mapped or, in a store with many shards, read when they are
    asked for.
    """

    rows: Shaped[np.ndarray, " rows"]
    """Elements of type :data:`ROW`."""
    image: Shaped[np.ndarray, "images image_dim"] | StoredArray
    """16-bit floats (deviation 21), or integers (token numbers)."""
    text: Shaped[np.ndarray, "texts text_dim"] | StoredArray
    left_out: Sequence[LeftOut] = ()
    contents: Sequence[str | None] = ()
    """Content hash of each row's item in an index; empty for a data set."""


class FeatureBatch(NamedTuple):
    """Features of a batch; features of absent modalities are zero."""

    image: Float32[np.ndarray, "items image_dim"]
    text: Float32[np.ndarray, "items text_dim"]
    has_image: Bool[np.ndarray, " items"]
    has_text: Bool[np.ndarray, " items"]

    def total(self) -> Float32[np.ndarray, "items dim"]:
        """Return the unnormalised sum of both features (UniIR's score fusion, CLIP-SF)."""
        return np.asarray(self.image + self.text)


def to_float16(features: Shaped[np.ndarray, "items dim"]) -> Shaped[np.ndarray, "items dim"]:
    """Return features as 16-bit floats, but integers (token numbers) unchanged.

    Raises
    ------
    BadData
        Features are not finite, or too large for 16 bits.
    """
    if not np.issubdtype(features.dtype, np.floating):
        return features
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = features.astype(np.float16)
        total = rounded.sum(dtype=np.float64)  # faster to check than each element
        if not np.isfinite(total):
            raise BadData(
                "features are not finite or too large for 16 bits; check the encoder's output"
            )
    return rounded


def join_shards(shards: Sequence[Shard]) -> Shard:
    """Return several shards as one."""
    rows = np.concatenate([shard.rows for shard in shards])
    shard_sizes = [len(shard.rows) for shard in shards]

    def join(name: str) -> np.ndarray:
        """Concatenate features, and shift the row numbers that refer to them."""
        parts = [getattr(shard, name) for shard in shards]
        starts = np.cumsum([0, *map(len, parts)])[:-1]
        shifts = np.where(rows[name] == ABSENT, 0, np.repeat(starts, shard_sizes))
        rows[name] += shifts.astype(np.int32)
        # Shards without an image may have another width.
        return np.concatenate([part for part in parts if len(part)] or parts[:1])

    contents = [content for shard in shards for content in shard.contents]
    return Shard(rows, join("image"), join("text"), contents=contents)


def write_shard(folder: Path, name: str, shard: Shard) -> None:
    """Write a shard atomically.

    Raises
    ------
    ArtifactMismatch
        The folder has been removed. It is not created again, because earlier shards would be
        missing.
    """
    if not folder.is_dir():
        raise ArtifactMismatch(
            f"{folder} was moved or removed by another process; run the command again"
        )
    with new_folder(folder / name) as temporary:
        for array_name in ("rows", "image", "text"):
            np.save(temporary / f"{array_name}.npy", getattr(shard, array_name))
        if shard.contents:
            (temporary / CONTENTS).write_text(json.dumps(shard.contents))


class StoredArray:
    """An array in a file that is opened for each read.

    A mapped file occupies a descriptor, and a process may have only a thousand; an encoder that
    runs for hours saves more parts.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self.shape: tuple[int, ...] = self._open().shape
        self.dtype = self._open().dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Int64[np.ndarray, " rows"]) -> Shaped[np.ndarray, "rows dim"]:
        return np.asarray(self._open()[rows])

    def _open(self) -> np.ndarray:
        return np.asarray(np.load(self._file, mmap_mode="r"))


def map_array(file: Path) -> np.ndarray:
    """Return the mapped array in a file."""
    # A view as an array, because indexing a memmap creates another memmap, which is slow.
    return np.asarray(np.load(file, mmap_mode="r").view(np.ndarray))


def read_shards(
    folder: Path, open_array: Callable[[Path], np.ndarray | StoredArray] = map_array
) -> Iterator[Shard]:
    """Yield the shards of a folder, with mapped features.

    For a folder with any number of shards, ``open_array`` is :class:`StoredArray`.
    """
    for path in sorted(folder.glob("shard-*/")):
        contents = path / CONTENTS
        yield Shard(
            np.load(path / "rows.npy"),
            open_array(path / "image.npy"),
            open_array(path / "text.npy"),
            contents=json.loads(contents.read_text()) if contents.exists() else (),
        )


class Features:
    """Features of queries or candidates, in shards, which may be memory-mapped.

    A row number counts the items of all shards.

    >>> features = Features.open(Path("features/candidates"))  # doctest: +SKIP
    >>> features.gather(np.array([0, 5])).total().shape  # doctest: +SKIP
    (2, 768)
    """

    fingerprint: str = ""
    """Hash that changes with the features; a training that depends on them begins again then."""
    folder: Path | None = None
    """Folder that the features were read from, if it is finished."""
    left_out: Sequence[LeftOut] = ()
    """Records that were skipped, with the reason."""

    def __init__(self, shards: Iterable[Shard]) -> None:
        self._image: list[np.ndarray | StoredArray] = []
        self._text: list[np.ndarray | StoredArray] = []
        self.contents: list[str | None] = []
        """Content hash of the item of each row, if the features are those of an index."""
        rows_of_shards: list[np.ndarray] = []
        for shard in shards:
            rows_of_shards.append(shard.rows)
            self._image.append(shard.image)
            self._text.append(shard.text)
            self.contents += shard.contents
        shard_sizes = np.array([len(rows) for rows in rows_of_shards], dtype=np.int64)
        self._shards = np.repeat(np.arange(len(shard_sizes), dtype=np.int32), shard_sizes)
        """Number of the shard that holds each row."""
        self._set_rows(np.concatenate([np.zeros(0, ROW), *rows_of_shards]))
        # Shards without any image (or text) may have width 0 there, so take the maximum.
        self.image_dim = max((array.shape[1] for array in self._image), default=0)
        self.text_dim = max((array.shape[1] for array in self._text), default=0)

    def _set_rows(self, rows: Shaped[np.ndarray, " rows"]) -> None:
        self._rows = rows
        # Copies, since columns of a structured array are slow to search.
        self.ids = rows["id"].copy()
        self.modality = rows["modality"].copy()
        self.target_modality = rows["wanted"].copy()
        self.keys = rows["key"].copy()

    def select(self, rows: Int64[np.ndarray, " rows"]) -> None:
        """Keep only the given rows, in this order."""
        self._shards = self._shards[rows]
        self._set_rows(self._rows[rows])
        if self.contents:
            self.contents = [self.contents[row] for row in rows.tolist()]

    @staticmethod
    def open(folder: Path) -> Features:
        """Open a finished folder of features.

        Raises
        ------
        ArtifactMismatch
            The folder is damaged, or was written with other columns.
        """
        manifest = open_artifact(folder, kind=FEATURES_KIND)
        columns = manifest.config.get("columns")
        if columns != [*(ROW.names or ())]:
            raise ArtifactMismatch(
                f"{folder} has the columns {columns}, which this version does not read; embed the "
                "records again"
            )
        features = Features(read_shards(folder))
        features.fingerprint, features.folder = manifest.fingerprint, folder
        return features

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def dim(self) -> int:
        """The common width of image and text features.

        Raises
        ------
        ArtifactMismatch
            The widths differ.
        """
        if self.image_dim != self.text_dim:
            raise ArtifactMismatch(
                f"{self.folder or 'this index'}: image features have {self.image_dim} "
                f"numbers and text features {self.text_dim}; they must have the same width"
            )
        return self.image_dim

    def gather(self, rows: Int64[np.ndarray, " items"]) -> FeatureBatch:
        """Return the features of rows as float32."""
        shards, columns = self._shards[rows], self._rows[rows]
        image = np.zeros((len(rows), self.image_dim), dtype=np.float32)
        text = np.zeros((len(rows), self.text_dim), dtype=np.float32)
        _gather(self._image, columns["image"], shards, image)
        _gather(self._text, columns["text"], shards, text)
        return FeatureBatch(image, text, columns["image"] != ABSENT, columns["text"] != ABSENT)

    def shard(self, rows: Int64[np.ndarray, " items"]) -> Shard:
        """Return rows as one shard, in which rows that share a feature share it again."""
        columns, shards = self._rows[rows], self._shards[rows]
        image = _share_features(self._image, columns["image"], shards, self.image_dim)
        text = _share_features(self._text, columns["text"], shards, self.text_dim)
        return Shard(columns, image, text)

    def batches(
        self, size: int, rows: Int64[np.ndarray, " rows"] | None = None
    ) -> Iterator[tuple[Int64[np.ndarray, " items"], FeatureBatch]]:
        """Yield rows (all by default) and their features, ``size`` rows at a time."""
        rows = np.arange(len(self)) if rows is None else rows
        for start in range(0, len(rows), size):
            batch = rows[start : start + size]
            yield batch, self.gather(batch)


def _share_features(
    arrays: Sequence[np.ndarray | StoredArray],
    array_rows: Int32[np.ndarray, " items"],
    shards: Int32[np.ndarray, " items"],
    dim: int,
) -> Shaped[np.ndarray, "features dim"]:
    """Return the distinct features of items in order, and renumber ``array_rows`` accordingly."""
    present = np.flatnonzero(array_rows != ABSENT)
    # One number for each feature: its shard in the upper half, its row in the lower half.
    features = (shards[present].astype(np.int64) << 32) | array_rows[present]
    distinct, first, numbers = np.unique(features, return_index=True, return_inverse=True)
    order = np.argsort(first)  # of first occurrence
    array_rows[present] = np.argsort(order)[numbers]
    distinct = distinct[order]
    filled = [array.dtype for array in arrays if len(array)] or [array.dtype for array in arrays]
    output = np.zeros((len(distinct), dim), dtype=filled[0] if filled else np.float16)
    _gather(arrays, distinct & 0xFFFFFFFF, distinct >> 32, output)
    return output


def _gather(
    arrays: Sequence[np.ndarray | StoredArray],
    array_rows: np.ndarray,
    shards: np.ndarray,
    output: Shaped[np.ndarray, "items dim"],
) -> None:
    """Fill ``output`` with the features of items; those of ABSENT rows stay zero.

    Item i is ``arrays[shards[i]][array_rows[i]]``.
    """
    # Items in the order of their shards: those of shard s are order[bounds[s] : bounds[s + 1]].
    order = np.argsort(shards, kind="stable")  # fast if the shards are sorted
    bounds = np.searchsorted(shards[order], np.arange(len(arrays) + 1))
    for shard in np.unique(shards).tolist():
        items = order[bounds[shard] : bounds[shard + 1]]
        items = items[array_rows[items] != ABSENT]
        if len(items):
            output[items] = arrays[shard][array_rows[items]]


class Batch(NamedTuple):
    """Pairs of queries and positives, as rows of features."""

    query_rows: Int64[np.ndarray, " batch"]
    """Rows of queries, each with one of the query's instructions."""
    candidate_rows: Int64[np.ndarray, " batch"]
    """The row of one positive for each query."""
    false_negatives: Bool[np.ndarray, "batch batch"]
    """True where another pair's candidate is also relevant to the query."""


class Pairs:
    """Training queries and their positives, as rows of query and candidate features.

    M-BEIR's 1.3 million training lines take 50 MB.
    """

    def __init__(self, lines: Iterable[Query], queries: Features, candidates: Features) -> None:
        self.queries = queries
        self.candidates = candidates
        lines = list(lines)
        if not lines:
            raise BadData("there are no training queries; give a query file that has some")
        # Positives of line i: self._positives[self._starts[i] : self._starts[i] + self._counts[i]]
        self._positives, self._counts = find_positives(lines, candidates)
        self._starts = np.cumsum(self._counts) - self._counts
        self._modality = candidates.modality
        self._epoch: tuple[int, int] | None = None
        numbers = np.array([query.number for query in lines])
        # Rows of line i for target modality m: from self._first_row[i, m], self._num_variants[i, m]
        self._first_row, self._num_variants = _find_variants(queries, numbers)

    def __len__(self) -> int:
        return len(self._counts)

    def with_features(self, queries: Features, candidates: Features) -> Pairs:
        """Return the same pairs with other features, of the same rows in the same order."""
        pairs = copy(self)
        pairs.queries, pairs.candidates = queries, candidates
        return pairs

    @property
    def fingerprints(self) -> dict[str, str]:
        """Fingerprints of both sets of features, for the manifest of a training stage."""
        return {
            "queries": self.queries.fingerprint,
            "candidates": self.candidates.fingerprint,
        }

    def _epoch_order(self, seed: int, epoch: int) -> Int64[np.ndarray, " pairs"]:
        """Return the random order of queries in an epoch; the last result is cached."""
        if self._epoch != (seed, epoch):
            self._epoch = (seed, epoch)
            self._order = np.random.default_rng([seed, epoch]).permutation(len(self))
        return self._order

    def draw(self, step: int, batch_size: int, *, seed: int) -> Batch:
        """Draw the batch of a step, with a random positive and instruction for each query.

        Deviation 9: the released code draws them once per query and keeps them for all epochs.
        """
        # Steps draw consecutive positions; position p is query p % n of epoch p // n.
        positions = np.arange(step * batch_size, (step + 1) * batch_size)
        epochs = positions // len(self)
        lines_by_epoch = []
        for epoch in np.unique(epochs):
            order = self._epoch_order(seed, int(epoch))
            lines_by_epoch.append(order[positions[epochs == epoch] % len(self)])
        lines = np.concatenate(lines_by_epoch)
        fractions = np.random.default_rng([seed, step, 1]).random((2, batch_size))
        positives = self._starts[lines] + (fractions[0] * self._counts[lines]).astype(np.int64)
        candidate_rows = self._positives[positives]
        targets = self._modality[candidate_rows]
        variants = (fractions[1] * self._num_variants[lines, targets]).astype(np.int64)
        query_rows = self._first_row[lines, targets] + variants
        return Batch(query_rows, candidate_rows, self._false_negatives(lines, candidate_rows))

    def _false_negatives(
        self, lines: np.ndarray, candidate_rows: np.ndarray
    ) -> Bool[np.ndarray, "batch batch"]:
        """Return which candidates of the batch are also positives of its other queries.

        All positives of all queries are looked up among the batch's candidates, which takes less
        than quadratic time.
        """
        candidates, inverse = np.unique(candidate_rows, return_inverse=True)
        # For counts (2, 1): query 0 0 1, offset 0 1 0.
        counts = self._counts[lines]
        queries = np.repeat(np.arange(len(lines)), counts)
        offsets = np.arange(len(queries)) - np.repeat(np.cumsum(counts) - counts, counts)
        positives = self._positives[np.repeat(self._starts[lines], counts) + offsets]
        columns = np.searchsorted(candidates, positives).clip(max=len(candidates) - 1)
        is_in_batch = candidates[columns] == positives
        mask = np.zeros((len(lines), len(candidates)), dtype=bool)
        mask[queries[is_in_batch], columns[is_in_batch]] = True
        mask = mask[:, inverse]  # from distinct candidates to the batch's columns
        np.fill_diagonal(mask, val=False)
        return mask


def find_positives(
    lines: Sequence[Query], candidates: Features
) -> tuple[Int64[np.ndarray, " positives"], Int64[np.ndarray, " queries"]]:
    """Return the rows of all positives, grouped by query, and the number of positives per query.

    Raises
    ------
    BadData
        A query has no positive, or a positive is not among the candidates.
    """
    counts = np.array([len(query.positives) for query in lines], dtype=np.int64)
    if not counts.all():
        qid = lines[int(np.argmin(counts))].qid
        raise BadData(f"training query {qid} has no positive; leave it out or name one")
    numbers = np.array(
        [candidate_number(did) for query in lines for did in query.positives], dtype=np.int64
    )
    rows, exists = rows_of_ids(candidates.ids, numbers)
    if not exists.all():
        first_missing = int(np.argmin(exists))
        query = lines[int(np.searchsorted(np.cumsum(counts), first_missing, side="right"))]
        raise BadData(
            f"training query {query.qid} has the positive {did_of(int(numbers[first_missing]))}, "
            f"which is not in the training pool, and {int((~exists).sum()) - 1} others are not; "
            "run `genius data check`"
        )
    return rows, counts


def rows_of_ids(
    ids: Int64[np.ndarray, " rows"], requested_ids: Int64[np.ndarray, "*requested"]
) -> tuple[Int64[np.ndarray, "*requested"], Bool[np.ndarray, "*requested"]]:
    """Return the rows of requested ids, and whether each id exists."""
    order = np.argsort(ids, kind="stable")
    positions = np.searchsorted(ids, requested_ids, sorter=order)
    rows = order[positions.clip(max=max(0, len(ids) - 1))]
    return rows, ids[rows] == requested_ids


def _find_variants(features: Features, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first row and the number of rows of each query and target modality.

    The rows of a query and a target modality, one for each instruction, are adjacent.
    """
    keys = features.ids * NUM_MODALITIES + features.target_modality
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    counts = np.diff(starts, append=len(keys))
    requested_keys = numbers[:, None] * NUM_MODALITIES + np.arange(NUM_MODALITIES)
    groups, exists = rows_of_ids(keys[starts], requested_keys)
    return np.where(exists, starts[groups], 0), np.where(exists, counts[groups], 0)
