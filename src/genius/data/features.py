"""Features on disk: what an encoder gave, image and text apart, in shards (specification, section 2).

A row is one candidate, or one query under one instruction. Rows point into packed arrays of image and text
features, so an absent modality costs nothing and a picture asked about four times is stored once.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int8, Int16, Int64, Shaped
from torch import Tensor

from genius.artifact import Manifest, open_artifact
from genius.errors import ArtifactMismatch, BadData

KIND: Final = "features"
ABSENT: Final = -1
LEFT_OUT: Final = "left_out.json"


class Shard(NamedTuple):
    """Rows that are written together."""

    ids: Int64[np.ndarray, " rows"]
    """The item's integer: UniIR's hash for M-BEIR ids, else the row number."""
    variant: Int16[np.ndarray, " rows"]
    """Which instruction a query row was given; −1 for none."""
    modality: Int8[np.ndarray, " rows"]
    """Code of the item's own modality."""
    wanted: Int8[np.ndarray, " rows"]
    """Code of the modality that a query row asks for; −1 for candidates."""
    image_index: Int64[np.ndarray, " rows"]
    """Row of ``image``, −1 without one."""
    text_index: Int64[np.ndarray, " rows"]
    """Row of ``text``, −1 without one."""
    image: Shaped[np.ndarray, "images image_dim"]
    """Stored as 16-bit floats (deviation 21); whole numbers (tokens) as they come."""
    text: Shaped[np.ndarray, "texts text_dim"]


class FeatureBatch(NamedTuple):
    """Features of some rows, zero where a modality is absent."""

    image: Float[Tensor, "items image_dim"]
    text: Float[Tensor, "items text_dim"]
    has_image: Bool[Tensor, " items"]
    has_text: Bool[Tensor, " items"]

    def total(self) -> Float[Tensor, "items dim"]:
        """The encoder's own score fusion: the unnormalised sum (UniIR's CLIP-SF)."""
        return self.image + self.text

    @staticmethod
    def of(image: Tensor, text: Tensor, image_places: np.ndarray, text_places: np.ndarray) -> FeatureBatch:
        """Spread packed features over rows; a place of −1 is an absent modality."""
        return FeatureBatch(
            _spread(image, image_places),
            _spread(text, text_places),
            torch.from_numpy(image_places != ABSENT),
            torch.from_numpy(text_places != ABSENT),
        )

    @staticmethod
    def of_shard(shard: Shard) -> FeatureBatch:
        """The rows of a shard as they would be read back from the disk; raises as :func:`write_shard`."""
        stored = _to_write(shard)
        image, text = (torch.from_numpy(packed).float() for packed in (stored.image, stored.text))
        return FeatureBatch.of(image, text, shard.image_index, shard.text_index)


class LeftOut(NamedTuple):
    """A record whose picture could not be read, so that it has no row."""

    id: int
    file: str
    reason: str


def write_shard(folder: Path, number: int, shard: Shard, left_out: Sequence[LeftOut]) -> None:
    """Write one shard in one step: it is there whole or not at all.

    Raises
    ------
    BadData
        features are not finite.
    ArtifactMismatch
        the folder is gone: it is not made again, since the shards that were in it would be missing.
    """
    shard = _to_write(shard)
    temporary = folder / f".shard-{number:06d}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
    except FileNotFoundError:
        raise ArtifactMismatch(
            f"{folder} was moved or removed by another writer meanwhile; run the same again"
        ) from None
    for name, array in shard._asdict().items():
        np.save(temporary / f"{name}.npy", array)
    (temporary / LEFT_OUT).write_text(json.dumps(left_out))
    temporary.rename(folder / _shard_name(number))


def has_shard(folder: Path, number: int) -> bool:
    """Whether this shard was finished."""
    return (folder / _shard_name(number)).is_dir()


def num_records(folder: Path) -> dict[int, int]:
    """Finished shards by number, and how many records each stands for: its rows, and what was left out."""
    return {
        int(path.name.rpartition("-")[2]): len(np.load(path / "ids.npy", mmap_mode="r"))
        + len(json.loads((path / LEFT_OUT).read_text()))
        for path in folder.glob("shard-*")
    }


def num_rows(folder: Path) -> int:
    """Rows in the finished shards of a folder."""
    return sum(len(np.load(path, mmap_mode="r")) for path in folder.glob("shard-*/ids.npy"))


class Features:
    """A finished folder of features, memory-mapped.

    >>> features = Features.open(Path("features/candidates"))  # doctest: +SKIP
    >>> features.gather(np.array([0, 5])).total().shape  # doctest: +SKIP
    torch.Size([2, 768])
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.image_dim = int(manifest.facts["image_dim"])
        self.text_dim = int(manifest.facts["text_dim"])
        paths = sorted(path for path in manifest.folder.glob("shard-*") if path.is_dir())
        self._image = [_mapped(path / "image.npy") for path in paths]
        self._text = [_mapped(path / "text.npy") for path in paths]
        ids = [np.load(path / "ids.npy") for path in paths]
        self._starts = np.cumsum([0, *(len(part) for part in ids)], dtype=np.int64)
        self.ids = np.concatenate([np.zeros(0, np.int64), *ids])
        self.variant = _joined(paths, "variant", np.int16)
        self.modality = _joined(paths, "modality", np.int8)
        self.wanted = _joined(paths, "wanted", np.int8)
        # Places within a shard, so that 32 bits are plenty: at 5.6 million rows all of this is 110 MB.
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
        """Open a finished folder."""
        return Features(open_artifact(folder, kind=KIND))

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def dim(self) -> int:
        """Width of image and text features alike."""
        if self.image_dim != self.text_dim:
            raise ArtifactMismatch(
                f"{self.manifest.folder}: image features have {self.image_dim} numbers and text features "
                f"{self.text_dim}; one space needs one width"
            )
        return self.image_dim

    def gather(self, rows: Int64[np.ndarray, " items"]) -> FeatureBatch:
        """Features of these rows, as float32."""
        return FeatureBatch(
            image=self._packed(rows, self._image, self._image_index, self.image_dim),
            text=self._packed(rows, self._text, self._text_index, self.text_dim),
            has_image=torch.from_numpy(self._image_index[rows] != ABSENT),
            has_text=torch.from_numpy(self._text_index[rows] != ABSENT),
        )

    def shards(self) -> Iterator[Shard]:
        """The shards as they were written."""
        for path in sorted(self.manifest.folder.glob("shard-*")):
            yield Shard(*(np.load(path / f"{name}.npy", mmap_mode="r") for name in Shard._fields))

    def batches(self, size: int) -> Iterator[tuple[slice, FeatureBatch]]:
        """All rows in order, so many at a time."""
        for start in range(0, len(self), size):
            rows = np.arange(start, min(start + size, len(self)))
            yield slice(start, start + len(rows)), self.gather(rows)

    def _packed(
        self, rows: np.ndarray, arrays: list[np.ndarray], index: np.ndarray, dim: int
    ) -> Float[Tensor, "items dim"]:
        output = torch.zeros(len(rows), dim)
        places = index[rows]
        shards = np.searchsorted(self._starts, rows, side="right") - 1
        order = np.argsort(shards, kind="stable")  # at once for rows in order
        bounds = np.searchsorted(shards[order], np.arange(len(arrays) + 1))
        for shard in np.unique(shards).tolist():
            here = order[bounds[shard] : bounds[shard + 1]]
            here = here[places[here] != ABSENT]
            if len(here):
                found = np.asarray(arrays[shard][places[here]])
                output[torch.from_numpy(here)] = torch.from_numpy(found).float()
        return output


def _to_write(shard: Shard) -> Shard:
    shard = shard._replace(image=_stored(shard.image), text=_stored(shard.text))
    for name in ("image", "text"):
        if not _all_finite(getattr(shard, name)):
            raise BadData(
                f"{name} features are not finite or too large for 16 bits; check the encoder's output"
            )
    return shard


def _mapped(path: Path) -> np.ndarray:
    return np.load(path, mmap_mode="r").view(np.ndarray)  # type: ignore[no-any-return]


def _stored(features: np.ndarray) -> np.ndarray:
    """Floats as 16 bits; through torch, since numpy takes ten times as long."""
    if not np.issubdtype(features.dtype, np.floating) or features.dtype == np.float16:
        return features
    half: np.ndarray = torch.from_numpy(np.require(features, requirements="W")).half().numpy()
    return half


def _all_finite(features: np.ndarray) -> bool:
    """A sum of 16-bit floats is finite where each of them is, and much faster than a flag for each."""
    if features.dtype != np.float16:
        return True
    total = torch.from_numpy(np.require(features, requirements="W")).sum(dtype=torch.float64)
    return bool(total.isfinite())


def _spread(packed: Tensor, places: np.ndarray) -> Tensor:
    output = torch.zeros(len(places), packed.shape[1])
    present = np.flatnonzero(places != ABSENT)
    output[torch.from_numpy(present)] = packed[torch.from_numpy(places[present])].float()
    return output


def _joined(paths: list[Path], name: str, kind: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.zeros(0, kind), *(np.load(path / f"{name}.npy") for path in paths)], dtype=kind)


def _shard_name(number: int) -> str:
    return f"shard-{number:06d}"
