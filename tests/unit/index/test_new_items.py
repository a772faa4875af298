"""Items from memory become what the same items become when they are files."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from genius_search.index import build
from genius_search.index.build import ItemOutcome
from genius_search.index.index import Index
from genius_search.index.pool import NewItem
from genius_search.index.store import WORK


@pytest.fixture
def pool(tmp_path):
    """Six pictures, four of which have a text beside them, and four texts."""
    folder = tmp_path / "pool"
    folder.mkdir()
    for number in range(6):
        Image.new("RGB", (40, 40), (40 * number, 99, 250 - 40 * number)).save(folder / f"{number}.png")
        if number < 4:
            (folder / f"{number}.txt").write_text(f"a kite, number {number}")
            (folder / f"drum {number}.txt").write_text(f"a drum, number {number}")
    return folder


def contents(index: Index) -> dict[str, tuple[list[int], float, list[float]]]:
    """ID, code cosine and embedding of each item."""
    (segment,) = index.snapshot.segments
    table = segment.table
    codes = np.empty((table.num_items, table.num_levels), dtype=np.int16)
    codes[table.items] = np.repeat(table.ids, np.diff(table.bucket_starts), axis=0)
    kept = segment.embeddings
    return {
        item.id: (
            codes[row].tolist(),
            float(segment.code_cosine[row]),
            [] if kept is None else kept.values[row].tolist(),
        )
        for row, item in enumerate(segment.items.all())
    }


@pytest.mark.parametrize("embeddings", ["none", "fused", "raw"])
def test_items_from_memory_get_the_ids_and_embeddings_of_the_same_files(
    model, pool, tmp_path, monkeypatch, embeddings
):
    monkeypatch.setattr(build, "CHUNK", 4)  # so that there are several
    of_files, _ = Index.create(tmp_path / "files", model=model, pool=pool, embeddings=embeddings)
    index, _ = Index.create(tmp_path / "memory", model=model, pool=pool, embeddings=embeddings)
    expected = contents(of_files)
    index.delete(list(expected))
    items = []
    for name in expected:
        path = pool / name
        if path.suffix == ".png":
            beside = path.with_suffix(".txt")
            items.append(NewItem(name, beside.read_text() if beside.exists() else None, path.read_bytes()))
        else:
            items.append(NewItem(name, path.read_text()))
    assert {outcome.status for outcome in index.add_items(items)} == {"added"}
    index.compact()
    found = contents(index)
    assert {name: codes for name, (codes, _, _) in found.items()} == {
        name: codes for name, (codes, _, _) in expected.items()
    }
    for name, (_, code_cosine, vector) in expected.items():
        assert found[name][1] == pytest.approx(code_cosine, abs=2e-3)
        assert found[name][2] == pytest.approx(vector, abs=2e-3)
    assert not (index.folder / WORK).exists()


def test_pictures_that_cannot_be_read_are_left_out_and_the_rest_is_added(model, pool, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "CHUNK", 2)
    index, _ = Index.create(tmp_path / "index", model=model, pool=pool)
    bad = [NewItem(f"bad {number}", "a text", b"no picture") for number in range(2)]
    drum = NewItem("new", "a drum")
    outcomes = index.add_items([*bad, drum])
    assert [outcome.status for outcome in outcomes] == ["left out", "left out", "added"]
    assert "not a picture" in (outcomes[0].reason or "")
    generation = index.info().generation
    assert [outcome.status for outcome in index.add_items(bad)] == ["left out", "left out"]
    assert index.info().generation == generation
    assert index.add_items([drum]) == [ItemOutcome("new", "unchanged")]
