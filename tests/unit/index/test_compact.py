from __future__ import annotations

import itertools
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from genius_search.index import segment_writer
from genius_search.index.items import Item
from genius_search.index.segment_writer import ArraysWriter, write_items
from genius_search.index.store import NOTHING, ItemArrays, Segment, load_segment
from genius_search.index.writer import alive_items
from genius_search.records import Modality
from genius_search.search.rank import CodeRanker
from genius_search.search.table import IdTable
from genius_search.search.vectors import EmbeddingBits


@pytest.fixture(autouse=True)
def _in_blocks(monkeypatch):
    monkeypatch.setattr(segment_writer, "ROWS_AT_ONCE", 7)  # many blocks


RANKER = CodeRanker([np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)] * 3)


def drawn(count: int, seed: int, *, stored: bool = True) -> tuple[list[Item], ItemArrays]:
    random = np.random.default_rng(seed)
    items = [Item(f"{seed}/{number}", Modality.IMAGE, None, f"{number}.jpg") for number in range(count)]
    return items, ItemArrays(
        random.integers(0, 3, (count, 3)).astype(np.int16),
        random.integers(0, 4, count).astype(np.float16),  # many alike
        random.standard_normal((count, 5)).astype(np.float16) if stored else None,
        "fused" if stored else "none",
        random.integers(0, 256, count).astype(np.uint8) if stored else None,
    )


def merge(folder: Path, new: ItemArrays | None, segments: list[Segment], bits: EmbeddingBits) -> None:
    """Write the arrays of a segment."""
    with closing(ArraysWriter(folder, bits)) as writer:
        if new is not None:
            writer.append(new)
        for segment in segments:
            writer.append_segment(segment)
        writer.finish()


def write(
    folder: Path, given: tuple[list[Item], ItemArrays], bits: EmbeddingBits, dead: list[int]
) -> Segment:
    folder.mkdir()
    write_items(folder, given[0])
    merge(folder, given[1], [], bits)
    return load_segment(folder, folder.name, np.array(dead, dtype=np.int64), bits)


def together(parts: list[tuple[tuple[list[Item], ItemArrays], list[int]]]) -> tuple[list[Item], ItemArrays]:
    """What is alive in some parts, in their order."""
    kept = [np.setdiff1d(np.arange(len(given[0])), dead) for given, dead in parts]
    pairs = [(given, rows) for (given, _), rows in zip(parts, kept, strict=True)]
    codes, code_cosine, embeddings, densities = (
        None
        if getattr(pairs[0][0][1], name) is None
        else np.concatenate([getattr(given[1], name)[rows] for given, rows in pairs])
        for name in ("codes", "code_cosine", "embeddings", "densities")
    )
    items = [given[0][row] for given, rows in pairs for row in rows]
    return items, ItemArrays(codes, code_cosine, embeddings, pairs[0][0][1].stored, densities)


def same(segment: Segment, expected: tuple[list[Item], ItemArrays]) -> None:
    items, arrays = expected
    table = IdTable.build(arrays.codes, arrays.code_cosine)
    for name in ("ids", "starts", "level_bounds", "bucket_starts", "items"):
        assert np.array_equal(getattr(segment.table, name), getattr(table, name)), name
    assert np.array_equal(segment.code_cosine, arrays.code_cosine)
    if arrays.densities is None:
        assert segment.densities is None
    else:
        assert np.array_equal(segment.densities, arrays.densities)
    assert list(segment.items.all()) == items


@pytest.mark.parametrize("bits", [16, 8, 4, 1])
def test_merged_segments_are_one_segment_of_what_is_alive_in_them(tmp_path, bits):
    parts = [(drawn(50, 1), [0, 3, 49]), (drawn(9, 2), []), (drawn(4, 3), [0, 1, 2, 3]), (drawn(30, 4), [7])]
    segments = [write(tmp_path / str(place), given, bits, dead) for place, (given, dead) in enumerate(parts)]
    place = tmp_path / "merged"
    place.mkdir()
    write_items(place, itertools.chain.from_iterable(map(alive_items, segments)))
    merge(place, None, segments, bits)
    merged = load_segment(place, "merged", NOTHING, bits)
    same(merged, together(parts))
    rows = [
        segment.vectors(RANKER)(np.setdiff1d(np.arange(len(given[0])), dead))
        for segment, (given, dead) in zip(segments, parts, strict=True)
    ]
    assert np.array_equal(
        merged.vectors(RANKER)(np.arange(merged.num_alive)), np.concatenate(rows)
    )  # not rounded again
    assert sorted(path.name for path in place.iterdir()) == sorted(
        path.name for path in segments[0].folder.iterdir()
    )


def test_new_arrays_come_before_the_segments_they_are_merged_with(tmp_path):
    new, old = drawn(20, 1), drawn(30, 2)
    segment = write(tmp_path / "old", old, 16, [5, 6])
    place = tmp_path / "merged"
    place.mkdir()
    expected = together([(new, []), (old, [5, 6])])
    write_items(place, expected[0])
    merge(place, new[1], [segment], 16)
    merged = load_segment(place, "merged", NOTHING, 16)
    same(merged, expected)
    assert np.allclose(merged.vectors(RANKER)(np.arange(20)), new[1].embeddings, atol=0.02)
    assert np.array_equal(
        merged.vectors(RANKER)(np.array([20, 47])), segment.vectors(RANKER)(np.array([0, 29]))
    )


def test_without_embeddings_none_are_written(tmp_path):
    segment = write(tmp_path / "a", drawn(20, 1, stored=False), 16, [1])
    (tmp_path / "merged").mkdir()
    write_items(tmp_path / "merged", alive_items(segment))
    merge(tmp_path / "merged", None, [segment], 16)
    assert load_segment(tmp_path / "merged", "merged", NOTHING, 16).embeddings is None
