"""`precomputed:PATH`: features that were computed elsewhere, looked up by id.

PATH is a folder or a file, in one of three layouts:

- plain ``.npy`` files of one's own (:mod:`genius_search.encoders.precomputed_table`);
- GENIUS's ``*_IT_dict.pt`` files, image and text apart;
- UniIR's ``*_embed.npy`` files with their ``*_ids.npy``, one vector for both
  (:mod:`genius_search.encoders.precomputed_published`).
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from genius_search.artifact import file_fingerprint, fingerprint_of
from genius_search.encoders.base import ImageInput, ItemKey, JointInput, TextInput
from genius_search.encoders.precomputed_published import (
    GENIUS_FILES,
    UNIIR_FILES,
    find_published,
    open_genius,
    open_uniir,
)
from genius_search.encoders.precomputed_table import Held, Role, Table, open_plain
from genius_search.errors import ArtifactMissing, BadData, UsageError

__all__ = ["PrecomputedEncoder", "PrecomputedJointEncoder", "open_precomputed"]


def open_precomputed(path: Path) -> PrecomputedEncoder | PrecomputedJointEncoder:
    """Open the features at a path, whatever their layout.

    Raises
    ------
    ArtifactMissing
        no features are at the path.
    BadData
        a file is not what it should be, or files do not fit together.
    ArtifactMismatch
        a torch file is damaged, or asks for code to be run.
    UsageError
        a file's name does not say what it holds, or the folder holds several layouts.
    """
    if not path.exists():
        raise ArtifactMissing(f"precomputed:{path}: no such file or folder")
    if not path.is_dir() and path.suffix not in (".npy", ".pt"):
        raise UsageError(f"precomputed:{path} is neither a folder nor a .npy or .pt file")
    if path.is_dir() and any(path.glob("*_features.npy")):
        return PrecomputedEncoder(path, open_plain(path))
    genius, uniir = find_published(path, GENIUS_FILES), find_published(path, UNIIR_FILES)
    if genius and uniir:
        raise UsageError(
            f"precomputed:{path} holds features of GENIUS ({genius[0].name}) and of UniIR ({uniir[0].name}); "
            "give the folder of one"
        )
    if uniir:
        return PrecomputedJointEncoder(path, open_uniir(uniir))
    return PrecomputedEncoder(path, open_genius(genius) if genius else open_plain(path))


class _Precomputed:
    """What both kinds share: where the features are and how wide."""

    def __init__(self, path: Path, tables: Mapping[Held, Table]) -> None:
        self._path = path
        self._tables = tables
        widths = {file.features.shape[1]: file.file for table in tables.values() for file in table.files}
        if len(widths) > 1:
            said = ", ".join(f"{file.name} has {width}" for width, file in sorted(widths.items()))
            raise BadData(f"the features in {path} must have one width: {said}")

    @property
    def spec(self) -> str:
        """``precomputed:PATH``."""
        return f"precomputed:{self._path}"

    @property
    def dim(self) -> int:
        """Width of its features."""
        return next(iter(self._tables.values())).dim

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the contents of its files."""
        known: dict[Path, str] = {}

        def read(file: Path | None) -> str:
            if file is None:
                return "by row"
            if file not in known:
                known[file] = _fingerprint(file)
            return known[file]

        return fingerprint_of(
            {
                " ".join(filter(None, held)): [[read(file.file), read(file.ids_file)] for file in table.files]
                for held, table in self._tables.items()
            }
        )

    @property
    def needs_pixels(self) -> bool:
        """It needs ids only."""
        return False

    def _look_up(self, part: str, keys: Sequence[ItemKey]) -> Float[Tensor, "items dim"]:
        places: dict[tuple[Role, str | None], list[int]] = {}
        for place, key in enumerate(keys):
            places.setdefault((key.role, key.split), []).append(place)
        if len(places) == 1:
            return self._table(part, keys[0]).look_up(keys)
        features = torch.zeros(len(keys), self.dim)
        for here in places.values():
            own = [keys[place] for place in here]
            features[here] = self._table(part, own[0]).look_up(own)
        return features

    def _table(self, part: str, key: ItemKey) -> Table:
        """What holds this item's features: of its own split, where files say theirs."""
        tables = {held.split: table for held, table in self._tables.items() if held[:2] == (key.role, part)}
        if not tables:
            there = ", ".join(dict.fromkeys(f"{held.part} of {held.role}" for held in self._tables))
            raise ArtifactMissing(
                f"{self.spec} has no {part} features for {key.role} {key.id}: {self._remedy(key.role, part)} "
                f"(there are: {there})"
            )
        found = tables.get(key.split) or tables.get(None)
        if found is not None:
            return found
        others = " and ".join(f"{table.files[0].file} ({split})" for split, table in tables.items())
        if key.split is not None:
            raise BadData(
                f"query {key.id} is of split {key.split}, and {self.spec} holds queries of another: "
                f"{others}. Their numbers mean other queries; give a folder that holds this split too, in "
                f"files or folders whose names end in {key.split}"
            )
        if len(tables) == 1:
            return next(iter(tables.values()))
        raise UsageError(
            f"{self.spec} holds queries of several splits, {others}, and nothing says of which query "
            f"{key.id} is; give the folder of one"
        )

    def _remedy(self, role: Role, part: str) -> str:
        folder = self._path if self._path.is_dir() else self._path.parent
        published = self._path.suffix == ".pt" or not any(folder.glob("*_features.npy"))
        if not published:
            return f"put {part}_features.npy into {folder}"
        which = "query files" if role == "query" else "candidate pools' files"
        return f"give a folder that holds the {which} too"


class PrecomputedEncoder(_Precomputed):
    """Looks image and text features up by id; cannot embed anything that is not in its files."""

    def image_features(self, images: Sequence[ImageInput]) -> Float[Tensor, "items dim"]:
        """Features of known images."""
        return self._look_up("image", [image.key for image in images])

    def text_features(self, texts: Sequence[TextInput]) -> Float[Tensor, "items dim"]:
        """Features of known texts, whatever the text says now."""
        return self._look_up("text", [text.key for text in texts])


class PrecomputedJointEncoder(_Precomputed):
    """Looks up one vector for image and text together by id."""

    def joint_features(self, items: Sequence[JointInput]) -> Float[Tensor, "items dim"]:
        """Vectors of known queries or candidates, whatever they hold now."""
        return self._look_up("joint", [item.key for item in items])

    def image_features(self, images: Sequence[ImageInput]) -> Float[Tensor, "items dim"]:
        """Refused: image and text are not apart."""
        raise self._not_apart("image", len(images))

    def text_features(self, texts: Sequence[TextInput]) -> Float[Tensor, "items dim"]:
        """Refused: image and text are not apart."""
        raise self._not_apart("text", len(texts))

    def _not_apart(self, part: str, count: int) -> UsageError:
        return UsageError(
            f"{self.spec} holds one vector for image and text together and has no {part} features, of which "
            f"{count} were asked for; what needs them apart needs GENIUS's own feature files"
        )


def _fingerprint(file: Path) -> str:
    """A torch file says the checksums of its tensors, so that not all of it needs to be read.

    Unless it was saved without (``torch.serialization.set_crc32_options``): then all of them are 0.
    """
    if not zipfile.is_zipfile(file):
        return file_fingerprint(file)
    with zipfile.ZipFile(file) as container:
        entries = container.infolist()
    if not all(entry.CRC for entry in entries if entry.file_size):
        return file_fingerprint(file)
    return fingerprint_of(
        sorted([entry.filename.partition("/")[2], entry.file_size, entry.CRC] for entry in entries)
    )
