"""Several segments become one, without what was deleted; read in order, a block at a time."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float16

from genius.search.arrays import GrowingArray, open_array
from genius.search.embedding_file import EmbeddingType, EmbeddingWriter, read_blocks
from genius.search.items import Item, write_items
from genius.search.merge import Source, merge_tables
from genius.search.segment import (
    DENSITIES,
    EMBEDDINGS,
    MEMORY_BYTES,
    SCALES,
    TYPICALITY,
    ItemArrays,
    Segment,
    fill_arrays,
)
from genius.search.table import IdTable

_NEW: Final = "new"
"""Where the arrays of new items are written first when they are merged with others."""


class _Part(NamedTuple):
    """Arrays to merge."""

    folder: Path
    table: IdTable
    typicality: Float16[np.ndarray, " items"]
    alive: Bool[np.ndarray, " items"] | None
    """Which items are kept; None keeps all."""


def merge_segments(folder: Path, segments: Sequence[Segment], *, memory_bytes: int = MEMORY_BYTES) -> None:
    """Write the files of one segment that holds what is alive in these, in their order."""
    write_items(folder, itertools.chain.from_iterable(map(alive_items, segments)))
    _merge(folder, list(map(_part, segments)), memory_bytes)


def merge_arrays(folder: Path, arrays: ItemArrays, segments: Sequence[Segment], kind: EmbeddingType) -> None:
    """Write the arrays of new items, and behind them what is alive in some segments; not the item store."""
    new = folder / _NEW
    new.mkdir()
    fill_arrays(new, arrays, kind)
    first = _Part(new, IdTable.open(new), open_array(new / TYPICALITY, np.float16), None)
    _merge(folder, [first, *map(_part, segments)], MEMORY_BYTES)
    shutil.rmtree(new)


def alive_items(segment: Segment) -> Iterator[Item]:
    """Items that are not deleted, by row."""
    alive = segment.alive()
    items = segment.items.all()
    return items if alive is None else itertools.compress(items, alive)


def _part(segment: Segment) -> _Part:
    return _Part(segment.folder, segment.table, segment.typicality, segment.alive())


def _merge(folder: Path, parts: Sequence[_Part], memory_bytes: int) -> None:
    sources = [Source(part.table, part.typicality, part.alive) for part in parts]
    merge_tables(sources, folder, memory_bytes=memory_bytes)
    with closing(GrowingArray(folder / TYPICALITY, np.float16)) as file:
        for part in parts:
            file.append(part.typicality if part.alive is None else part.typicality[part.alive])
    if (parts[0].folder / EMBEDDINGS).exists():
        _merge_embeddings(folder, parts)
    if all((part.folder / DENSITIES).exists() for part in parts):
        with closing(GrowingArray(folder / DENSITIES, np.uint8)) as file:
            for part in parts:
                densities = open_array(part.folder / DENSITIES, np.uint8)
                file.append(densities if part.alive is None else densities[part.alive])


def _merge_embeddings(folder: Path, parts: Sequence[_Part]) -> None:
    dim = open_array(parts[0].folder / EMBEDDINGS, np.float16, np.int8, dimensions=2).shape[1]
    kind: EmbeddingType = "int8" if (parts[0].folder / SCALES).exists() else "float16"
    with closing(EmbeddingWriter(folder / EMBEDDINGS, folder / SCALES, dim=dim, kind=kind)) as out:
        for part in parts:
            scales = open_array(part.folder / SCALES, np.float16) if kind == "int8" else None
            start = 0
            for block in read_blocks(part.folder / EMBEDDINGS):
                rows = slice(start, start + len(block))
                kept = slice(None) if part.alive is None else part.alive[rows]
                out.append_stored(block[kept], None if scales is None else scales[rows][kept])
                start += len(block)
