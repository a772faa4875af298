"""What an index does with a pool: read it into items, and turn the items into IDs."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from genius.artifact import fingerprint_of
from genius.data.features import LeftOut
from genius.data.folder import read_folder
from genius.data.mbeir import read_pool
from genius.data.records import Candidate, format_text
from genius.encoders.protocol import ItemKey
from genius.errors import BadData
from genius.model import Genius
from genius.search.items import Item
from genius.search.snapshot import ItemArrays
from genius.stages.embed import FeatureRow, embed
from genius.stages.progress import Progress

REASONS_SHOWN: Final = 5
"""Files that an error names."""
WORK: Final = ".work"
"""Folder inside the index for what has to survive a kill."""


class PoolItems(NamedTuple):
    """A pool as items."""

    items: list[Item]
    left_out: list[LeftOut]
    """Files that cannot be items, each with its reason."""


class EncodedItems(NamedTuple):
    """Items and what the model says of them, row by row."""

    items: list[Item]
    arrays: ItemArrays
    left_out: list[LeftOut]
    """Pictures that could not be read; their items are not among ``items``."""


def read_items(pool: Path, *, captions: bool) -> PoolItems:
    """The items of a pool: a folder of pictures and texts, or a ``.jsonl`` file of M-BEIR candidates.

    Raises
    ------
    BadData
        it is no pool, or nothing in it can be an item.
    """
    found = _scan(pool, captions=captions)
    if not found.items:
        reasons = "; ".join(f"{entry.file}: {entry.reason}" for entry in found.left_out[:REASONS_SHOWN])
        advice = f" ({len(found.left_out)} files were left out: {reasons})" if found.left_out else ""
        raise BadData(f"there is nothing to index in {pool}: no picture or text that can be used{advice}")
    return found


def encode_items(
    model: Genius, items: Sequence[Item], folder: Path, *, store_embeddings: bool, progress: Progress
) -> EncodedItems:
    """Embed and encode items; those without a readable picture are left out.

    Features wait in ``.work/`` inside ``folder``, so that a killed run goes on where it stopped.
    :func:`remove_work` takes them away.

    Raises
    ------
    BadData
        no item is left; there is nothing to go on with then, and ``.work/`` is gone.
    """
    rows = [
        FeatureRow(
            id=number,
            key=ItemKey("candidate", item.item_id),
            modality=item.modality,
            image=None if item.image is None else Path(item.image),
            text=format_text(item.text),
        )
        for number, item in enumerate(items)
    ]
    try:
        features = embed(
            rows,
            model.encoder,
            folder / WORK / "features",
            inputs={"items": _state_of(items)},
            expected=len(rows),
            progress=progress,
            skip_bad_images=True,
        )
    except BadData:
        remove_work(folder)
        raise
    codes, typicality, embeddings = [], [], []
    for part, batch in features.batches(4096):
        encoded = model.encode(batch, features.modality[part].astype(np.int64))
        codes.append(encoded.codes.numpy())
        typicality.append(encoded.typicality.numpy())
        if store_embeddings:
            embeddings.append(encoded.embeddings.half().numpy())
    arrays = ItemArrays(
        np.concatenate(codes),
        np.concatenate(typicality),
        np.concatenate(embeddings) if store_embeddings else None,
    )
    return EncodedItems([items[int(number)] for number in features.ids], arrays, features.left_out)


def remove_work(folder: Path) -> None:
    """Take away what :func:`encode_items` kept for the case of a kill."""
    shutil.rmtree(folder / WORK, ignore_errors=True)


def _scan(pool: Path, *, captions: bool) -> PoolItems:
    if pool.is_dir():
        scan = read_folder(pool, captions=captions)
        return PoolItems(
            [_item(candidate, pool) for candidate in scan.candidates],
            [
                LeftOut(-1, str(problem.file), getattr(problem, "reason", str(problem)))
                for problem in scan.problems
            ],
        )
    if pool.suffix != ".jsonl" or not pool.exists():
        raise BadData(
            f"{pool} is not a pool: give a folder of pictures and texts, or a .jsonl file of candidates in "
            "M-BEIR's layout"
        )
    root = _data_root(pool)
    return PoolItems([_item(candidate, root) for candidate in read_pool([pool])], [])


def _item(candidate: Candidate, root: Path) -> Item:
    return Item(
        candidate.did,
        candidate.modality,
        candidate.text,
        None if candidate.image is None else str((root / candidate.image).resolve()),
        candidate.source,
    )


def _data_root(pool: Path) -> Path:
    """M-BEIR's paths start at the folder that holds ``cand_pool``; other pools' at their own folder."""
    for folder in pool.resolve().parents:
        if folder.name == "cand_pool":
            return folder.parent
    return pool.resolve().parent


def _state_of(items: Sequence[Item]) -> str:
    """Changes whenever an item or its picture does, so that left-over work is only reused if it fits."""
    digest = hashlib.sha256()
    for item in items:
        stamp = None
        if item.image is not None:
            with contextlib.suppress(OSError):  # a missing picture is named when it is to be opened
                status = Path(item.image).stat()
                stamp = (status.st_size, status.st_mtime_ns)
        digest.update(fingerprint_of([item.item_id, item.text, item.image, stamp]).encode())
    return digest.hexdigest()
