"""One reader for JSON lines, Parquet, WebDataset and folders, here or elsewhere."""

from __future__ import annotations

import io
import json
import tarfile

import fsspec
import numpy as np
import pytest
from PIL import Image

from genius_search.cluster.pool import open_partition, split_pool
from genius_search.errors import BadData
from genius_search.index.adding import open_pool
from genius_search.records import Modality


def picture(seed: int = 0) -> bytes:
    file = io.BytesIO()
    noise = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()


def read(pool, tmp_path, rows=100):
    """All items of a pool, and the reasons of what was left out."""
    items, reasons = [], []
    for partition in split_pool(str(pool), rows, tmp_path / "scratch"):
        opened = open_partition(partition, tmp_path)
        items += map(opened.with_fields, opened.items())
        reasons += [entry.reason for entry in opened.left_out]
    return items, reasons


def test_a_file_of_m_beir_is_read_as_by_one_index(pool, tmp_path):
    for rows in (7, 1000):
        assert read(pool, tmp_path, rows) == (list(open_pool(pool, captions=True).items()), [])


def test_partitions_have_the_stated_number_of_rows(pool, tmp_path):
    sizes = [partition.rows for partition in split_pool(str(pool), 50, tmp_path)]
    assert sizes == [50, 50, 20]


def test_a_folder_is_read_as_by_one_index(tmp_path):
    folder = tmp_path / "Pictures"
    (folder / "more").mkdir(parents=True)
    (folder / "a.png").write_bytes(picture())
    (folder / "a.json").write_text('{"caption": "an anchor", "price": 3}')
    (folder / "more" / "b.png").write_bytes(picture(1))
    (folder / "note.txt").write_text("a note")
    (folder / "c.jxl").write_bytes(b"")
    known = open_pool(folder, captions=True)
    assert read(folder, tmp_path, rows=2)[0] == list(map(known.with_fields, known.items()))
    assert "c.jxl" in (tmp_path / "scratch" / "left-out-of-folder.json").read_text()


ROWS = [
    {"id": "a", "text": "an anchor", "price": 3},
    {"id": 7, "image": {"bytes": picture(), "path": "x.png"}, "caption": "a kite"},
    {"id": "c", "image": picture(1)},
    {"id": "d"},
    {"id": None, "text": "nobody"},
]


@pytest.mark.parametrize("rows", [1, 2, 100])
def test_parquet_with_pictures_as_bytes(tmp_path, rows):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    given = [
        {
            "id": None if row["id"] is None else str(row["id"]),
            "text": row.get("text"),
            "caption": row.get("caption"),
            "price": row.get("price"),
            "image": row.get("image", {}).get("bytes") if isinstance(row.get("image"), dict) else row.get("image"),
        }
        for row in ROWS
    ]  # fmt: skip
    parquet.write_table(arrow.Table.from_pylist(given), tmp_path / "pool.parquet", row_group_size=2)
    check_rows(*read(tmp_path / "pool.parquet", tmp_path, rows), tmp_path)


def check_rows(items, reasons, folder):
    assert [(item.id, item.modality, item.text) for item in items] == [
        ("a", Modality.TEXT, "an anchor"),
        ("7", Modality.IMAGE_TEXT, "a kite"),
        ("c", Modality.IMAGE, None),
    ]
    assert items[0].fields == {"price": 3}
    (folder / "parts" / "000000").mkdir(parents=True)
    stored = [(folder / "parts" / "000000" / item.image).resolve() for item in items[1:]]
    assert [place.read_bytes() for place in stored] == [picture(), picture(1)]
    assert len(reasons) == 2
    assert "neither a text nor an image" in reasons[0]
    assert "its id is None" in reasons[1]


def write_tar(path, members):
    with tarfile.open(path, "w") as file:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))


def test_webdataset(tmp_path):
    write_tar(
        tmp_path / "0.tar",
        [
            ("x/a.json", json.dumps({"price": 3}).encode()),
            ("x/a.txt", b"an anchor"),
            ("x/b.seg.png", picture()),
            ("x/b.txt", b"a kite"),
        ],
    )
    write_tar(tmp_path / "1.tar", [("c.png", picture(1)), ("d.cls", b"1")])
    items, reasons = read(tmp_path / "*.tar", tmp_path)
    assert [(item.id, item.text, item.modality) for item in items] == [
        ("x/a", "an anchor", Modality.TEXT),
        ("x/b", "a kite", Modality.IMAGE_TEXT),
        ("c", None, Modality.IMAGE),
    ]
    assert items[0].fields == {"price": 3}
    assert len(reasons) == 1


def test_a_pool_elsewhere_is_read_without_a_copy(tmp_path):
    files = fsspec.filesystem("memory")
    rows = [{"id": str(number), "text": f"text {number}"} for number in range(5)]
    files.pipe("/pool/0.jsonl", "".join(json.dumps(row) + "\n" for row in rows[:3]).encode())
    files.pipe("/pool/1.jsonl", "".join(json.dumps(row) + "\n" for row in rows[3:]).encode())
    files.pipe("/pool/2.jsonl", b'{"id": "x", "image": "x.png"}\n')
    items, reasons = read("memory://pool", tmp_path, rows=2)
    assert [item.id for item in items] == ["0", "1", "2", "3", "4"]
    assert "not on this machine" in reasons[0]
    assert [item.id for item in read("memory://pool/[01].jsonl", tmp_path)[0]] == ["0", "1", "2", "3", "4"]


@pytest.mark.parametrize("name", ["nowhere", "nowhere.jsonl", "*.jsonl", "x.csv"])
def test_what_is_not_a_pool_is_said(tmp_path, name):
    (tmp_path / "x.csv").touch()
    with pytest.raises(BadData, match="is not a pool"):
        split_pool(str(tmp_path / name), 10, tmp_path)


def test_an_empty_file_is_said(tmp_path):
    (tmp_path / "x.jsonl").touch()
    with pytest.raises(BadData, match="nothing to index"):
        split_pool(str(tmp_path / "x.jsonl"), 10, tmp_path)


def test_a_path_out_of_the_folder_is_left_out(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"id": "a", "image": "../b.png"}\n[1]\n')
    items, reasons = read(tmp_path / "x.jsonl", tmp_path)
    assert items == []
    assert "leads out of" in reasons[0]
    assert "expected an object" in reasons[1]
