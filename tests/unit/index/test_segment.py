from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from genius_search.artifact import FileFact, file_fingerprint
from genius_search.errors import ArtifactMismatch
from genius_search.index import writer
from genius_search.index.items import Item
from genius_search.index.store import IndexManifest, Segment, SegmentEntry, load_segment
from genius_search.index.writer import ItemArrays, alive_batches, alive_items, write_segment
from genius_search.records import Modality
from genius_search.search.rank import CodeRanker
from genius_search.search.vectors import EmbeddingBits, quantize


def new(count: int, *, dim: int | None = 6, seed: int = 0) -> tuple[list[Item], ItemArrays]:
    random = np.random.default_rng(seed)
    items = [Item(f"{seed}/{number} é", Modality.TEXT, f"text {number}") for number in range(count)]
    return items, ItemArrays(
        random.integers(0, 3, (count, 3)).astype(np.int16),
        random.random(count).astype(np.float16),
        None if dim is None else random.standard_normal((count, dim)).astype(np.float16),
        None if dim is None else random.integers(0, 256, count).astype(np.uint8),
    )


def open_segment(segment_folder: Path, items: int, bits: EmbeddingBits) -> Segment:
    """A segment of an index that stores fused embeddings, if this one has some."""
    files = {
        file.name: FileFact(bytes=file.stat().st_size, sha256=file_fingerprint(file))
        for file in segment_folder.iterdir()
    }
    kind = "fused" if "embeddings.npy" in files else "none"
    facts = {"identity": "0" * 32, "model": "", "model_fingerprint": ""}
    manifest = IndexManifest(**facts, embeddings=kind, embedding_bits=bits)
    return load_segment(
        segment_folder.parents[1],
        SegmentEntry(name=segment_folder.name, items=items, files=files),
        manifest,
    )


@pytest.fixture
def segment_folder(tmp_path) -> Path:
    (tmp_path / "segments" / "000001").mkdir(parents=True)
    return tmp_path / "segments" / "000001"


RANKER = CodeRanker([np.random.default_rng(0).standard_normal((3, 6)).astype(np.float32)] * 3)


def fill(folder: Path, items: list[Item], given_arrays: ItemArrays, bits: EmbeddingBits) -> None:
    if given_arrays.embeddings is not None:
        values, scales = quantize(given_arrays.embeddings, bits)
        given_arrays = given_arrays._replace(embeddings=values, scales=scales)
    write_segment(folder, [(items, given_arrays)])


@pytest.mark.parametrize("bits", [16, 8, 4, 2, 1])
def test_a_segment_comes_back_as_it_was_written(segment_folder, bits):
    items, given_arrays = new(30)
    fill(segment_folder, items, given_arrays, bits)
    segment = open_segment(segment_folder, 30, bits)
    assert list(segment.items.all()) == items
    assert segment.table.num_items == segment.num_alive == 30
    assert np.array_equal(segment.code_cosine, given_arrays.code_cosine)
    assert np.array_equal(segment.densities, given_arrays.densities)
    rows = np.array([3, 29, 0, 3])
    found = segment.vectors(RANKER)(rows)
    assert found.dtype == np.float32
    expected = given_arrays.embeddings[rows].astype(np.float32)
    if bits == 16:
        lengths = np.linalg.norm(expected, axis=1, keepdims=True)
        np.testing.assert_allclose(found, expected / lengths, rtol=1e-3)
    else:  # what was given is what the vectors of the IDs leave
        rest = found - RANKER.vectors(given_arrays.codes[rows])
        cosines = (
            np.vecdot(rest, expected)
            / np.linalg.norm(rest, axis=1)
            / np.linalg.norm(expected, axis=1)
        )
        assert cosines.min() > {8: 0.999, 4: 0.98, 2: 0.85, 1: 0.6}[bits]
        np.testing.assert_allclose(  # the product of a residual with itself is exact
            np.vecdot(rest, expected), np.square(expected).sum(axis=1), rtol=2e-3
        )
    assert segment.vectors(RANKER)(np.empty(0, dtype=np.int64)).shape == (0, 6)


def test_an_item_store_that_is_none_is_refused_by_name(segment_folder):
    fill(segment_folder, *new(5), 8)
    store = segment_folder / "items.sqlite"
    store.write_bytes(b"x" * store.stat().st_size)
    with pytest.raises(ArtifactMismatch, match=r"items\.sqlite is damaged"):
        open_segment(segment_folder, 5, 8)
    store.unlink()
    with pytest.raises(ArtifactMismatch, match=r"expected .*items\.sqlite"):
        open_segment(segment_folder, 5, 8)


@pytest.mark.parametrize("bits", [16, 8, 4, 1, None])
def test_merged_segments_are_one_segment_of_what_is_alive_in_them(tmp_path, bits, monkeypatch):
    monkeypatch.setattr(writer, "MAX_COPIED_ROWS", 7)  # many blocks
    parts, merged = [], tmp_path / "segments" / "000009"
    for seed, (count, dead) in enumerate([(50, [0, 3, 49]), (9, []), (4, [0, 1, 2, 3]), (30, [7])]):
        folder = tmp_path / "segments" / f"{seed:06}"
        folder.mkdir(parents=True)
        fill(folder, *new(count, seed=seed, dim=None if bits is None else 6), bits or 16)
        parts.append(
            open_segment(folder, count, bits or 16)._replace(dead=np.array(dead, dtype=np.int64))
        )
    merged.mkdir()
    write_segment(merged, alive_batches(parts))
    parts.reverse()
    segment = open_segment(merged, 50 + 9 + 30 - 4, bits or 16)
    codes = np.concatenate(
        [part.table.ids[part.table.rows_of_items[part.alive_rows()]] for part in parts]
    )
    assert np.array_equal(segment.table.ids[segment.table.rows_of_items], codes)
    assert list(segment.items.all()) == [item for part in parts for item in alive_items(part)]
    cosines = np.concatenate([part.code_cosine[part.alive_rows()] for part in parts])
    assert np.array_equal(segment.code_cosine, cosines)
    assert {path.name for path in merged.iterdir()} == {
        path.name for path in parts[0].folder.iterdir()
    }
    if bits is not None:  # embeddings are not rounded again
        vectors = np.concatenate([part.vectors(RANKER)(part.alive_rows()) for part in parts])
        assert np.array_equal(segment.vectors(RANKER)(np.arange(segment.num_alive)), vectors)
        densities = np.concatenate([part.densities[part.alive_rows()] for part in parts])
        assert np.array_equal(segment.densities, densities)
