"""Features on disk, and the pairs of queries and candidates that training draws from them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int64, Shaped

from genius_search.artifact import Manifest, open_artifact
from genius_search.errors import ArtifactMismatch, BadData
from genius_search.records import NUM_MODALITIES, Query, candidate_number, did_of, query_number
from genius_search.writing import new_folder

KIND: Final = "features"
ABSENT: Final = -1
CONTENTS: Final = "contents.json"

ROW: Final = np.dtype(
    [
        ("id", np.int64),  # UniIR's hash of M-BEIR ids, otherwise the row number
        ("image", np.int32),  # row of the shard's image features; -1 if absent
        ("text", np.int32),
        ("modality", np.int8),  # code of the record's modality
        ("wanted", np.int8),  # code of the modality that a query asks for; -1 for candidates
    ]
)
"""A query or candidate; M-BEIR's 5.6 million candidates take 112 MB."""


class LeftOut(NamedTuple):
    """A record that was left out because its image cannot be read."""

    id: int
    file: str
    reason: str


class Shard(NamedTuple):
    """Rows that are written together, and their features without gaps for absent modalities."""

    rows: Shaped[np.ndarray, " rows"]
    """Of type :data:`ROW`."""
    image: Shaped[np.ndarray, "images image_dim"]
    """16-bit floats (deviation 21), or integers (tokens)."""
    text: Shaped[np.ndarray, "texts text_dim"]
    left_out: Sequence[LeftOut] = ()


class FeatureBatch(NamedTuple):
    """Features of a batch; zero for absent modalities."""

    image: Float32[np.ndarray, "items image_dim"]
    text: Float32[np.ndarray, "items text_dim"]
    has_image: Bool[np.ndarray, " items"]
    has_text: Bool[np.ndarray, " items"]

    def total(self) -> Float32[np.ndarray, "items dim"]:
        """Return the unnormalised sum of image and text features (score fusion, UniIR's CLIP-SF)."""
        return np.asarray(self.image + self.text)


def half(features: Shaped[np.ndarray, "items dim"]) -> Shaped[np.ndarray, "items dim"]:
    """Return features as 16-bit floats, but integers (tokens) unchanged.

    Raises
    ------
    BadData
        Features are not finite, or too large for 16 bits.
    """
    if not np.issubdtype(features.dtype, np.floating):
        return features
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = features.astype(np.float16)
        if not np.isfinite(
            rounded.sum(dtype=np.float64)
        ):  # a sum is checked faster than every element
            raise BadData(
                "features are not finite or too large for 16 bits; check the encoder's output"
            )
    return rounded


def join_shards(shards: Sequence[Shard]) -> Shard:
    """Return several shards as one."""
    rows = np.concatenate([shard.rows for shard in shards])

    def join(name: str) -> np.ndarray:
        parts = [getattr(shard, name) for shard in shards]
        starts = np.repeat(
            np.cumsum([0, *map(len, parts)])[:-1], [len(shard.rows) for shard in shards]
        )
        rows[name] += np.where(rows[name] == ABSENT, 0, starts).astype(np.int32)
        return np.concatenate([part for part in parts if len(part)] or parts[:1])

    return Shard(rows, join("image"), join("text"))


def write_shard(
    folder: Path, number: int, shard: Shard, *, contents: Sequence[str | None] | None = None
) -> None:
    """Write a shard atomically.

    Parameters
    ----------
    contents
        what else is known of each row, in the file :data:`CONTENTS`.

    Raises
    ------
    ArtifactMismatch
        The folder has been removed. It is not created again, because earlier shards would be missing.
    """
    if not folder.is_dir():
        raise ArtifactMismatch(
            f"{folder} was moved or removed by another process; run the command again"
        )
    with new_folder(folder / f"shard-{number:06d}") as temporary:
        for name in ("rows", "image", "text"):
            np.save(temporary / f"{name}.npy", getattr(shard, name))
        if contents is not None:
            (temporary / CONTENTS).write_text(json.dumps(contents))


def read_shards(folder: Path) -> Iterator[Shard]:
    """Yield the shards of a folder, with mapped features."""
    for path in sorted(path for path in folder.glob("shard-*") if path.is_dir()):
        # As plain arrays, because indexing a memmap creates another memmap, which is slow.
        image, text = (
            np.load(path / f"{name}.npy", mmap_mode="r").view(np.ndarray)
            for name in ("image", "text")
        )
        yield Shard(np.load(path / "rows.npy"), image, text)


class Features:
    """Features of queries or candidates, in shards: memory-mapped ones of a finished folder, or given ones.

    >>> features = Features.open(Path("features/candidates"))  # doctest: +SKIP
    >>> features.gather(np.array([0, 5])).total().shape  # doctest: +SKIP
    (2, 768)
    """

    manifest: Manifest
    """Of the folder; given shards have none."""
    left_out: Sequence[LeftOut] = ()
    """Records that were skipped, with the reason."""

    def __init__(self, shards: Iterable[Shard]) -> None:
        self._image: list[np.ndarray] = []
        self._text: list[np.ndarray] = []
        parts = [np.zeros(0, ROW)]
        for shard in shards:
            parts.append(shard.rows)
            self._image.append(shard.image)
            self._text.append(shard.text)
        self._shards = np.repeat(np.arange(len(parts)) - 1, [len(part) for part in parts]).astype(
            np.int32
        )
        self._set_rows(np.concatenate(parts))
        # Shards without any image (or text) may have width 0 there, so take the maximum.
        self.image_dim, self.text_dim = (
            max((array.shape[1] for array in arrays), default=0)
            for arrays in (self._image, self._text)
        )

    def _set_rows(self, rows: Shaped[np.ndarray, " rows"]) -> None:
        self._rows = rows
        self.ids, self.modality, self.wanted = (
            rows[name].copy() for name in ("id", "modality", "wanted")
        )

    def choose(self, rows: Int64[np.ndarray, " chosen"], ids: Int64[np.ndarray, " chosen"]) -> None:
        """Keep only some rows, in this order, and give them other ids."""
        self._shards = self._shards[rows]
        self._set_rows(self._rows[rows])
        self._rows["id"] = self.ids = ids

    @staticmethod
    def open(folder: Path) -> Features:
        """Open a finished folder of features."""
        manifest = open_artifact(folder, kind=KIND)
        features = Features(read_shards(manifest.folder))
        features.manifest = manifest
        return features

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def dim(self) -> int:
        """Width of image and text features, which must be equal."""
        if self.image_dim != self.text_dim:
            raise ArtifactMismatch(
                f"{self.manifest.folder}: image features have {self.image_dim} numbers and text features "
                f"{self.text_dim}; they must have the same width"
            )
        return self.image_dim

    def gather(self, rows: Int64[np.ndarray, " items"]) -> FeatureBatch:
        """Return the features of rows as float32."""
        shards = self._shards[rows]
        image, text = self._rows["image"][rows], self._rows["text"][rows]
        return FeatureBatch(
            _gather(self._image, image, shards, self.image_dim),
            _gather(self._text, text, shards, self.text_dim),
            image != ABSENT,
            text != ABSENT,
        )

    def batches(
        self, size: int, rows: Int64[np.ndarray, " rows"] | None = None
    ) -> Iterator[tuple[Int64[np.ndarray, " items"], FeatureBatch]]:
        """Yield rows, by default all, and their features, ``size`` at a time."""
        rows = np.arange(len(self)) if rows is None else rows
        for own in (rows[start : start + size] for start in range(0, len(rows), size)):
            yield own, self.gather(own)


def _gather(
    arrays: Sequence[np.ndarray], places: np.ndarray, shards: np.ndarray, dim: int
) -> Float32[np.ndarray, "items dim"]:
    """Return the features at places in the arrays of shards; zeros where a place is −1."""
    output = np.zeros((len(places), dim), dtype=np.float32)
    order = np.argsort(shards, kind="stable")  # fast if they are sorted
    bounds = np.searchsorted(shards[order], np.arange(len(arrays) + 1))
    for shard in np.unique(shards).tolist():
        inside = order[bounds[shard] : bounds[shard + 1]]
        inside = inside[places[inside] != ABSENT]
        if len(inside):
            output[inside] = arrays[shard][places[inside]]
    return output


class Batch(NamedTuple):
    """Rows of queries and their positives, in pairs."""

    query_rows: Int64[np.ndarray, " batch"]
    """Rows of queries, each with one of its instructions."""
    candidate_rows: Int64[np.ndarray, " batch"]
    """A positive of each."""
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
        self._positives, self._counts = find_positives(lines, candidates)
        self._starts = np.cumsum(self._counts) - self._counts
        self._modality = candidates.modality
        self._epoch: tuple[int, int] | None = None
        numbers = np.array([query_number(query.qid) for query in lines])
        self._first, self._variants = _variants(queries, numbers)

    def __len__(self) -> int:
        return len(self._counts)

    @property
    def fingerprints(self) -> dict[str, str]:
        """Fingerprints of both features, as inputs of what is trained on them."""
        return {
            "queries": self.queries.manifest.fingerprint,
            "candidates": self.candidates.manifest.fingerprint,
        }

    def _epoch_order(self, seed: int, epoch: int) -> Int64[np.ndarray, " pairs"]:
        """Return the random order of queries in an epoch; the last one is kept."""
        if self._epoch != (seed, epoch):
            self._epoch = (seed, epoch)
            self._order = np.random.default_rng([seed, epoch]).permutation(len(self))
        return self._order

    def draw(self, step: int, batch_size: int, *, seed: int) -> Batch:
        """Draw the batch of a step, with a random positive and instruction for each query.

        Deviation 9: the released code draws them once per query and keeps them for all epochs.
        """
        places = np.arange(step * batch_size, (step + 1) * batch_size)
        epochs = places // len(self)
        lines = np.concatenate(
            [
                self._epoch_order(seed, int(epoch))[places[epochs == epoch] % len(self)]
                for epoch in np.unique(epochs)
            ]
        )
        random = np.random.default_rng([seed, step, 1])
        share = random.random((2, batch_size))
        positive = self._starts[lines] + (share[0] * self._counts[lines]).astype(np.int64)
        candidate_rows = self._positives[positive]
        wanted = self._modality[candidate_rows]
        variants = self._variants[lines, wanted]
        query_rows = self._first[lines, wanted] + (share[1] * variants).astype(np.int64)
        return Batch(query_rows, candidate_rows, self._false_negatives(lines, candidate_rows))

    def _false_negatives(
        self, lines: np.ndarray, candidate_rows: np.ndarray
    ) -> Bool[np.ndarray, "batch batch"]:
        """Find the batch's candidates among each query's positives, in less than quadratic time."""
        unique, inverse = np.unique(candidate_rows, return_inverse=True)
        counts = self._counts[lines]
        owner = np.repeat(np.arange(len(lines)), counts)
        offsets = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = self._positives[np.repeat(self._starts[lines], counts) + offsets]
        place = np.searchsorted(unique, rows).clip(max=len(unique) - 1)
        hit = unique[place] == rows
        mask = np.zeros((len(lines), len(unique)), dtype=bool)
        mask[owner[hit], place[hit]] = True
        mask = mask[:, inverse]
        np.fill_diagonal(mask, val=False)
        return mask


def find_positives(
    lines: Sequence[Query], candidates: Features
) -> tuple[Int64[np.ndarray, " positives"], Int64[np.ndarray, " queries"]]:
    """Return the rows of queries' positives, one query's after another's, and how many each query has.

    Raises
    ------
    BadData
        a query has no positive, or one that is not among the candidates.
    """
    counts = np.array([len(query.positives) for query in lines], dtype=np.int64)
    if not counts.all():
        qid = lines[int(np.argmin(counts))].qid
        raise BadData(f"training query {qid} has no positive; leave it out or name one")
    numbers = np.array(
        [candidate_number(did) for query in lines for did in query.positives], dtype=np.int64
    )
    rows, exists = look_up(candidates.ids, numbers)
    if not exists.all():
        place = int(np.argmin(exists))
        query = lines[int(np.searchsorted(np.cumsum(counts), place, side="right"))]
        raise BadData(
            f"training query {query.qid} has the positive {did_of(int(numbers[place]))}, which is not in the "
            f"training pool, and {int((~exists).sum()) - 1} others are not; run `genius data check`"
        )
    return rows, counts


def look_up(
    ids: Int64[np.ndarray, " rows"], wanted: Int64[np.ndarray, "*wanted"]
) -> tuple[Int64[np.ndarray, "*wanted"], Bool[np.ndarray, "*wanted"]]:
    """Return the rows of wanted ids, and a mask of those that exist."""
    order = np.argsort(ids, kind="stable")
    rows = order[np.searchsorted(ids, wanted, sorter=order).clip(max=max(0, len(ids) - 1))]
    return rows, ids[rows] == wanted


def _variants(features: Features, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first row and the number of rows of each query and target modality.

    The rows of one query and target modality, one for each instruction, are adjacent.
    """
    key = features.ids * NUM_MODALITIES + features.wanted
    starts = np.flatnonzero(np.diff(key, prepend=-1))
    counts = np.diff(starts, append=len(key))
    wanted = numbers[:, None] * NUM_MODALITIES + np.arange(NUM_MODALITIES)
    place, found = look_up(key[starts], wanted)
    return np.where(found, starts[place], 0), np.where(found, counts[place], 0)
