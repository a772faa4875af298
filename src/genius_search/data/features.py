"""Features on disk, and the pairs of queries and candidates that training draws from them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int8, Int16, Int64, Shaped
from torch import Tensor

from genius_search.artifact import Manifest, open_artifact
from genius_search.errors import ArtifactMismatch, BadData
from genius_search.records import NUM_MODALITIES, Query, candidate_number, query_number
from genius_search.writing import new_folder

KIND: Final = "features"
ABSENT: Final = -1
LEFT_OUT: Final = "left_out.json"


class Shard(NamedTuple):
    """Rows that are written together, and their features without gaps for absent modalities."""

    ids: Int64[np.ndarray, " rows"]
    """Integer id: UniIR's hash of M-BEIR ids, otherwise the row number."""
    variant: Int16[np.ndarray, " rows"]
    """Index of a query's instruction; −1 for none."""
    modality: Int8[np.ndarray, " rows"]
    """Modality code of the record."""
    wanted: Int8[np.ndarray, " rows"]
    """Target modality code of a query; −1 for candidates."""
    image_index: Int64[np.ndarray, " rows"]
    """Row of ``image``; −1 if absent."""
    text_index: Int64[np.ndarray, " rows"]
    """Row of ``text``; −1 if absent."""
    image: Shaped[np.ndarray, "images image_dim"]
    """Stored as 16-bit floats (deviation 21); integers (tokens) are stored unchanged."""
    text: Shaped[np.ndarray, "texts text_dim"]


class FeatureBatch(NamedTuple):
    """Features of a batch; zero for absent modalities."""

    image: Float[Tensor, "items image_dim"]
    text: Float[Tensor, "items text_dim"]
    has_image: Bool[Tensor, " items"]
    has_text: Bool[Tensor, " items"]

    def total(self) -> Float[Tensor, "items dim"]:
        """Return the unnormalised sum of image and text features (score fusion, UniIR's CLIP-SF)."""
        return self.image + self.text

    @staticmethod
    def of_shard(shard: Shard) -> FeatureBatch:
        """Return a shard's rows, rounded as on disk; raises like :func:`write_shard`."""
        image, text = (_stored(shard, name) for name in ("image", "text"))
        return FeatureBatch(
            _gather([image], shard.image_index, np.zeros_like(shard.image_index), image.shape[1]),
            _gather([text], shard.text_index, np.zeros_like(shard.text_index), text.shape[1]),
            torch.from_numpy(shard.image_index != ABSENT),
            torch.from_numpy(shard.text_index != ABSENT),
        )


class LeftOut(NamedTuple):
    """A record that was left out because its image cannot be read."""

    id: int
    file: str
    reason: str


def write_shard(folder: Path, number: int, shard: Shard, left_out: Sequence[LeftOut]) -> None:
    """Write a shard atomically.

    Raises
    ------
    BadData
        Features are not finite.
    ArtifactMismatch
        The folder has been removed. It is not created again, because earlier shards would be missing.
    """
    shard = shard._replace(image=_stored(shard, "image"), text=_stored(shard, "text"))
    if not folder.is_dir():
        raise ArtifactMismatch(f"{folder} was moved or removed by another process; run the command again")
    with new_folder(folder / f"shard-{number:06d}") as temporary:
        for name, array in shard._asdict().items():
            np.save(temporary / f"{name}.npy", array)
        (temporary / LEFT_OUT).write_text(json.dumps(left_out))


class Features:
    """Memory-mapped features of a finished folder.

    >>> features = Features.open(Path("features/candidates"))  # doctest: +SKIP
    >>> features.gather(np.array([0, 5])).total().shape  # doctest: +SKIP
    torch.Size([2, 768])
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.image_dim = int(manifest.facts["image_dim"])
        self.text_dim = int(manifest.facts["text_dim"])
        paths = sorted(path for path in manifest.folder.glob("shard-*") if path.is_dir())
        # As plain arrays, because indexing a memmap creates another memmap, which is slow.
        self._image, self._text = (
            [np.load(path / f"{name}.npy", mmap_mode="r").view(np.ndarray) for path in paths]
            for name in ("image", "text")
        )
        ids = [np.load(path / "ids.npy") for path in paths]
        self._starts = np.cumsum([0, *(len(part) for part in ids)], dtype=np.int64)
        self.ids = np.concatenate([np.zeros(0, np.int64), *ids])
        self.variant = _joined(paths, "variant", np.int16)
        self.modality = _joined(paths, "modality", np.int8)
        self.wanted = _joined(paths, "wanted", np.int8)
        # Positions within a shard fit into 32 bits; for 5.6 million rows, all of this takes 110 MB.
        self._image_index = _joined(paths, "image_index", np.int32)
        self._text_index = _joined(paths, "text_index", np.int32)
        self.left_out = [
            LeftOut(*fields) for path in paths for fields in json.loads((path / LEFT_OUT).read_text())
        ]
        """Records that were skipped, with the reason."""
        if len(self.ids) != manifest.facts["rows"]:
            raise ArtifactMismatch(
                f"{manifest.folder} holds {len(self.ids)} rows, its manifest says {manifest.facts['rows']}"
            )

    @staticmethod
    def open(folder: Path) -> Features:
        """Open a finished folder of features."""
        return Features(open_artifact(folder, kind=KIND))

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
        shards = np.searchsorted(self._starts, rows, side="right") - 1
        image, text = self._image_index[rows], self._text_index[rows]
        return FeatureBatch(
            _gather(self._image, image, shards, self.image_dim),
            _gather(self._text, text, shards, self.text_dim),
            torch.from_numpy(image != ABSENT),
            torch.from_numpy(text != ABSENT),
        )

    def shards(self) -> Iterator[Shard]:
        """Yield the shards as they were written."""
        for path in sorted(self.manifest.folder.glob("shard-*")):
            yield Shard(*(np.load(path / f"{name}.npy", mmap_mode="r") for name in Shard._fields))

    def batches(self, size: int) -> Iterator[tuple[slice, FeatureBatch]]:
        """Yield all rows in order, ``size`` at a time."""
        for start in range(0, len(self), size):
            rows = np.arange(start, min(start + size, len(self)))
            yield slice(start, start + len(rows)), self.gather(rows)


def _gather(
    arrays: Sequence[np.ndarray], places: np.ndarray, shards: np.ndarray, dim: int
) -> Float[Tensor, "items dim"]:
    """Return the features at places in the arrays of shards; zeros where a place is −1."""
    output = torch.zeros(len(places), dim)
    order = np.argsort(shards, kind="stable")  # fast if they are sorted
    bounds = np.searchsorted(shards[order], np.arange(len(arrays) + 1))
    for shard in np.unique(shards).tolist():
        inside = order[bounds[shard] : bounds[shard + 1]]
        inside = inside[places[inside] != ABSENT]
        if len(inside):
            output[torch.from_numpy(inside)] = torch.from_numpy(arrays[shard][places[inside]]).float()
    return output


def _stored(shard: Shard, name: Literal["image", "text"]) -> np.ndarray:
    """Convert features to their stored type, floats to 16 bits; torch does it ten times as fast as numpy."""
    features: np.ndarray = getattr(shard, name)
    if not np.issubdtype(features.dtype, np.floating):
        return features
    half = torch.from_numpy(np.require(features, requirements="W")).half()
    # Checking whether the sum is finite is much faster than checking every element.
    if not half.sum(dtype=torch.float64).isfinite():
        raise BadData(f"{name} features are not finite or too large for 16 bits; check the encoder's output")
    stored: np.ndarray = half.numpy()
    return stored


def _joined(paths: list[Path], name: str, kind: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.zeros(0, kind), *(np.load(path / f"{name}.npy") for path in paths)], dtype=kind)


class Batch(NamedTuple):
    """Rows of queries and their positives, in pairs."""

    query_rows: Int64[np.ndarray, " batch"]
    """Rows of queries, each with one of its instructions."""
    candidate_rows: Int64[np.ndarray, " batch"]
    """A positive of each."""
    false_negatives: Bool[Tensor, "batch batch"]
    """True where another pair's candidate is also relevant to the query."""


class Pairs:
    """Training queries and their positives, as rows of query and candidate features.

    M-BEIR's 1.3 million training lines take 50 MB.
    """

    def __init__(self, lines: Iterable[Query], queries: Features, candidates: Features) -> None:
        self.queries = queries
        self.candidates = candidates
        numbers: list[int] = []
        positives: list[int] = []
        counts: list[int] = []
        for query in lines:
            if not query.positives:
                raise BadData(f"training query {query.qid} has no positive; leave it out or name one")
            numbers.append(query_number(query.qid))
            positives.extend(candidate_number(did) for did in query.positives)
            counts.append(len(query.positives))
        if not numbers:
            raise BadData("there are no training queries; give a query file that has some")
        order = np.argsort(candidates.ids, kind="stable")
        self._positives, exists = look_up(candidates.ids, order, np.array(positives, dtype=np.int64))
        if not exists.all():
            missing = int((~exists).sum())
            example = positives[int(np.flatnonzero(~exists)[0])]
            raise BadData(
                f"{missing} positives of the training queries are not in the training pool, the first has "
                f"number {example}; run `genius data check` on the data set"
            )
        self._counts = np.array(counts, dtype=np.int64)
        self._starts = np.concatenate([[0], np.cumsum(self._counts)[:-1]]).astype(np.int64)
        self._modality = candidates.modality
        self._epoch: tuple[int, int] | None = None
        self._first, self._variants = _variants(queries, np.array(numbers, dtype=np.int64))
        owner = np.repeat(np.arange(len(counts)), counts)
        lacking = owner[self._variants[owner, self._modality[self._positives]] == 0]
        if len(lacking):
            raise BadData(
                f"{len(np.unique(lacking))} training queries have no features for the modality of a "
                f"positive, the first has number {numbers[lacking[0]]}; embed them again"
            )

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

    def _false_negatives(self, lines: np.ndarray, candidate_rows: np.ndarray) -> Tensor:
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
        return torch.from_numpy(mask)


def look_up(ids: np.ndarray, order: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of wanted ids, and a mask of those that exist; ``order`` sorts ``ids``."""
    place = np.searchsorted(ids, wanted, sorter=order).clip(max=max(0, len(ids) - 1))
    rows = order[place]
    return rows, ids[rows] == wanted


def _variants(features: Features, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first row and the number of rows of each query and target modality.

    The rows of one query and target modality, one for each instruction, are adjacent.
    """
    key = features.ids * NUM_MODALITIES + features.wanted
    starts = (
        np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]])) if len(key) else np.zeros(0, np.int64)
    )
    counts = np.diff(np.concatenate([starts, [len(key)]]))
    order = np.argsort(key[starts], kind="stable")
    first = np.zeros((len(numbers), NUM_MODALITIES), dtype=np.int64)
    variants = np.zeros((len(numbers), NUM_MODALITIES), dtype=np.int64)
    for modality in range(NUM_MODALITIES):
        place, found = look_up(key[starts], order, numbers * NUM_MODALITIES + modality)
        first[:, modality] = np.where(found, starts[place], 0)
        variants[:, modality] = np.where(found, counts[place], 0)
    return first, variants
