"""Which files of a stranger's repository are fetched: those that the model or the index names, no others.

To know them, its few small lists are read before anything is planned.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path, PurePosixPath
from typing import Final

from genius.artifact import MANIFEST
from genius.encoders.checkpoint import PATTERNS
from genius.errors import ArtifactError, ArtifactMismatch, ArtifactMissing
from genius.hub.fetch import fetch
from genius.hub.listing import Listing
from genius.hub.store import cached_file
from genius.search.manifest import CURRENT, DELETED, SEGMENTS
from genius.stages.model_file import MODEL_FILE
from genius.stages.pulled import What, encoder_folder, manifest_files, strangers_index
from genius.stages.replace import CONFIG
from genius.stages.save import CARD

__all__ = ["wanted_of"]

SUFFIXES: Final = frozenset(
    {".json", ".jsonl", ".safetensors", ".npy", ".sqlite", ".txt", ".model", ".tsv", ".md", ".gz"}
)
"""What is fetched of what is named. Never pickles, never programs."""
LARGEST_LIST: Final = 16_000_000
"""Bytes of a list of files; ours have a few thousand."""


def wanted_of(listing: Listing, what: What, *, token: str | None) -> Listing:
    """The same repository with the wanted files only.

    Raises
    ------
    ArtifactMissing, ArtifactMismatch
        a list of files is not there, or names what it may not name.
    """
    if what == "encoder":
        return listing.only(tuple(file for file in listing.files if _is_of_encoder(file.path)))
    with tempfile.TemporaryDirectory() as place:
        lists = _Lists(listing, Path(place), token)
        try:
            named = _of_model(lists) if what == "model" else _of_index(lists)
        except ArtifactError as error:  # by the name that a person knows it by
            raise type(error)(str(error).replace(place, listing.repository)) from None
    return listing.only(
        tuple(
            file
            for file in listing.files
            if file.path in named and PurePosixPath(file.path).suffix in SUFFIXES
        )
    )


class _Lists:
    """The small files of a repository that name the others, as far as they were read."""

    def __init__(self, listing: Listing, folder: Path, token: str | None) -> None:
        self.listing = listing
        self.folder = folder
        self._token = token
        self._files = {file.path: file for file in listing.files}

    def bring(self, path: str) -> None:
        """Have one of them in the folder: out of the cache, or fetched."""
        if path not in self._files:
            raise ArtifactMissing(f"{self.listing.repository} is not complete: it has no {path}")
        file = self._files[path]
        if file.bytes > LARGEST_LIST:
            raise ArtifactMismatch(
                f"{path} of {self.listing.repository} has {file.bytes:,} bytes, and no such list is so large"
            )
        here = cached_file(self.listing, file)
        place = self.folder / path
        if here is None:
            fetch(self.listing, file, place, token=self._token, arrived=_nobody)
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(here, place)

    def part(self, folder: str) -> set[str]:
        """All that a part's manifest names, and the manifest."""
        manifest = f"{folder}/{MANIFEST}"
        self.bring(manifest)
        return {manifest, *(f"{folder}/{name}" for name in manifest_files(self.folder / manifest))}


def _of_model(lists: _Lists) -> set[str]:
    lists.bring(MODEL_FILE)
    encoder = encoder_folder(lists.folder)
    named = {MODEL_FILE, CONFIG, CARD} | lists.part("quantizer") | lists.part("generator")
    if encoder is None:
        return named
    inside = PurePosixPath(encoder)
    if f"{inside}/{MANIFEST}" in lists.listing.names():
        return named | lists.part(str(inside))
    return named | {
        name
        for name in lists.listing.names()
        if PurePosixPath(name).is_relative_to(inside) and _is_of_encoder(name)
    }


def _of_index(lists: _Lists) -> set[str]:
    lists.bring(CURRENT)
    named = {CURRENT, CARD}
    for entry in strangers_index(lists.folder).segments:
        named |= lists.part(f"{SEGMENTS}/{entry.name}")
        if entry.deleted is not None:
            named.add(f"{DELETED}/{entry.deleted}")
    return named


def _is_of_encoder(path: str) -> bool:
    return any(PurePosixPath(path).match(pattern) for pattern in PATTERNS)


def _nobody(_: int) -> None:
    """Nobody counts what is this small."""
