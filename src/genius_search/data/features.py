"""Features on disk."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int8, Int16, Int64, Shaped
from torch import Tensor

from genius_search.artifact import Manifest, open_artifact
from genius_search.errors import ArtifactMismatch, BadData
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
    def of(image: Tensor, text: Tensor, image_places: np.ndarray, text_places: np.ndarray) -> FeatureBatch:
        """Gather features by position; −1 is an absent modality."""
        return FeatureBatch(
            _spread(image, image_places),
            _spread(text, text_places),
            torch.from_numpy(image_places != ABSENT),
            torch.from_numpy(text_places != ABSENT),
        )

    @staticmethod
    def of_shard(shard: Shard) -> FeatureBatch:
        """Return a shard's rows, rounded as on disk; raises like :func:`write_shard`."""
        image, text = (torch.from_numpy(_stored(shard, name)).float() for name in ("image", "text"))
        return FeatureBatch.of(image, text, shard.image_index, shard.text_index)


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


def has_shard(folder: Path, number: int) -> bool:
    """Return whether a shard is finished."""
    return (folder / f"shard-{number:06d}").is_dir()


def num_rows(folder: Path) -> int:
    """Return the number of rows in a folder's finished shards."""
    return sum(len(np.load(path, mmap_mode="r")) for path in folder.glob("shard-*/ids.npy"))


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
        return FeatureBatch(
            image=self._packed(rows, self._image, self._image_index, self.image_dim),
            text=self._packed(rows, self._text, self._text_index, self.text_dim),
            has_image=torch.from_numpy(self._image_index[rows] != ABSENT),
            has_text=torch.from_numpy(self._text_index[rows] != ABSENT),
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

    def _packed(
        self, rows: np.ndarray, arrays: list[np.ndarray], index: np.ndarray, dim: int
    ) -> Float[Tensor, "items dim"]:
        output = torch.zeros(len(rows), dim)
        places = index[rows]
        shards = np.searchsorted(self._starts, rows, side="right") - 1
        order = np.argsort(shards, kind="stable")  # fast if rows are sorted
        bounds = np.searchsorted(shards[order], np.arange(len(arrays) + 1))
        for shard in np.unique(shards).tolist():
            inside = order[bounds[shard] : bounds[shard + 1]]
            inside = inside[places[inside] != ABSENT]
            if len(inside):
                packed = arrays[shard][places[inside]]
                output[torch.from_numpy(inside)] = torch.from_numpy(packed).float()
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


def _spread(packed: Tensor, places: np.ndarray) -> Tensor:
    output = torch.zeros(len(places), packed.shape[1])
    present = np.flatnonzero(places != ABSENT)
    output[torch.from_numpy(present)] = packed[torch.from_numpy(places[present])].float()
    return output


def _joined(paths: list[Path], name: str, kind: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.zeros(0, kind), *(np.load(path / f"{name}.npy") for path in paths)], dtype=kind)
