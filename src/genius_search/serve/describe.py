"""Describe indexes and items for clients, with paths of this server in place of file names."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import PurePath
from typing import Any, Final
from urllib.parse import quote_plus

import numpy as np
from pydantic_core import PydanticSerializationError, to_json

from genius_search.config import SearchSettings
from genius_search.encoders.base import reads_images
from genius_search.index.filters import spell_fields
from genius_search.index.hits import SearchHit
from genius_search.index.index import Index, current_state
from genius_search.index.items import Item
from genius_search.index.snapshot import Snapshot
from genius_search.records import Modality
from genius_search.serve import schemas

MAX_DESCRIBED_FIELDS: Final = 100
"""Maximum number of fields that the description of an index lists."""
NUM_EXAMPLE_ITEMS: Final = 16
"""Number of items to return as examples of an index."""


def picture_path(item: SearchHit | Item, index: str) -> str | None:
    """Return the path of an item's thumbnail on this server, or None if it has no picture.

    That of a video which was found shows the moment of the hit.
    """
    if item.image is None:
        return None
    query = f"index={quote_plus(index)}&id={quote_plus(item.id)}&size={schemas.THUMBNAIL}"
    moment = getattr(item, "moment", None)
    return f"/v1/items/picture?{query}" + ("" if moment is None else f"&moment={moment:g}")


def describe_item(item: Item, index: str) -> dict[str, Any]:
    """Return the public properties of an item, for :func:`written`."""
    names = ("id", "modality", "text")
    return {name: getattr(item, name) for name in names} | {"image": picture_path(item, index)}


def sample_items(snapshot: Snapshot) -> list[Item]:
    """Return a few items, evenly spaced in the order in which they were added."""
    if not snapshot.num_alive:
        return []
    # Location of each item that is not deleted: segment number and row.
    rows = np.concatenate([segment.alive_rows() for segment in snapshot.segments])
    segments = np.arange(len(snapshot.segments)).repeat(
        [segment.num_alive for segment in snapshot.segments]
    )
    chosen = np.unique(np.linspace(0, len(rows) - 1, NUM_EXAMPLE_ITEMS, dtype=np.int64))
    return snapshot.items_at(segments[chosen], rows[chosen])


def written(value: Any) -> bytes:
    """Write values and data classes as JSON, with null for numbers that are not finite.

    Lone surrogates, which an index from someone else may contain, are replaced.
    """
    try:
        return to_json(value, inf_nan_mode="null")
    except PydanticSerializationError:  # a lone surrogate
        valid = json.dumps(value, ensure_ascii=False, default=dataclasses.asdict).encode(
            "utf-8", "replace"
        )
        return to_json(json.loads(valid), inf_nan_mode="null")


def describe_index(name: str, index: Index, *, writable: bool) -> schemas.IndexInfo:
    """Describe an index for clients."""
    model, snapshot = current_state(index)
    fields = spell_fields(key for segment in snapshot.segments for key in segment.items.field_names)
    counts = snapshot.count_by_modality()
    return schemas.IndexInfo(
        name=name,
        items=snapshot.num_alive,
        modalities={modality: counts[modality] for modality in Modality if modality in counts},
        levels=list(model.codebooks.sizes),
        fields=fields[:MAX_DESCRIBED_FIELDS],
        instructions=list(dict.fromkeys(row.text for row in model.instructions)),
        reads_images=reads_images(model.encoder),
        encoder=public_spec(model.encoder.spec),
        dim=model.encoder.dim,
        stores_embeddings=snapshot.manifest.embeddings != "none",
        calibrated=index.calibration is not None,
        writable=writable and os.access(index.folder, os.W_OK),
        settings=describe_settings(index, index.settings),
    )


def public_spec(spec: str) -> str:
    """Return the spec of an encoder with only the last part of each path of this server.

    >>> public_spec("clip:/models/clip")
    'clip:clip'
    """
    adapter, colon, source = spec.partition(":")
    names = [
        PurePath(name).name if PurePath(name).is_absolute() else name for name in source.split(",")
    ]
    return adapter + colon + ",".join(names)


def describe_settings(index: Index, config: SearchSettings, k: int = 1) -> schemas.SearchSettings:
    """Return the settings of a search. The beam is at least as wide as the number of hits ``k``."""
    return schemas.SearchSettings(
        beam=max(config.beam, k),
        candidates=config.candidates,
        rerank=config.rerank,
        router="generator" if index.model.uses_generator(config) else "geometry",
    )
