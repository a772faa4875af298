"""Items by id, one by one, and page by page; their fields from all kinds of values; names in any Unicode form."""

from __future__ import annotations

import io
import json
import shutil
import unicodedata
from datetime import UTC, date, datetime
from decimal import Decimal

import numpy as np
import pytest

from genius_search.cli import main
from genius_search.data.values import fields_to_json
from genius_search.index.index import Index
from genius_search.index.pool import NewItem
from genius_search.index.snapshot import UnknownItem
from genius_search.records import Modality

NFD = unicodedata.normalize("NFD", "M\u00fcller")
NAME = "M\u00fcller"


@pytest.fixture
def index(tmp_path) -> Index:
    vectors = np.random.default_rng(0).normal(size=(12, 8)).astype(np.float32)
    fields = [{"price": number} for number in range(12)]
    texts = ["a party \U0001f389 " + "x " * 200, *[None] * 11]
    index = Index.from_vectors(tmp_path / "index", vectors[:8], fields=fields[:8], texts=texts[:8])
    index.add_vectors(vectors[8:], ids=["a", "b", "c", NFD], fields=fields[8:], modalities="image")
    index.delete("3")
    return index


def ids(items):
    return [item.id for item in items]


def test_items_are_found_by_id_and_one_by_one(index):
    assert (len(index), "4" in index, "3" in index) == (11, True, False)
    listed = ["a", "b", "c", NAME, "0", "1", "2", "4", "5", "6", "7"]
    assert ids(index) == listed
    index.compact(min_deleted=0)
    assert ids(index) == listed
    index.refit()
    assert ids(index) == listed
    assert (index.get("4").fields, index.get("a").modality) == ({"price": 4}, Modality.IMAGE)
    with pytest.raises(UnknownItem, match="no item '3'"):
        index.get("3")


def test_without_a_query_the_newest_items_come_first_page_by_page(index):
    assert ids(index.search(where=["price>=4"], k=3)) == ["a", "b", "c"]
    page = index.search(where=["price>=4"], k=3, offset=3)
    assert [(hit.rank, hit.id, hit.score) for hit in page] == [
        (4, NAME, 0),
        (5, "4", 0),
        (6, "5", 0),
    ]
    assert ids(index.search(modality="text", k=2)) == ["0", "1"]
    assert index.search(where={"price": 99}) == []
    with pytest.raises(ValueError, match="or conditions alone"):
        index.search()
    with pytest.raises(ValueError, match="needs a query"):
        index.explain("4", where=["price>=4"])


def test_pages_of_a_search_are_its_hits(index):
    query = np.ones(8)
    hits = index.search(vector=query, k=9)
    pages = [index.search(vector=query, k=3, offset=offset) for offset in (0, 3, 6)]
    assert [hit for page in pages for hit in page] == hits
    assert ids(index.search(vector=query, combine="any", k=2, offset=1)) == ids(hits[1:3])


def test_names_meet_in_every_unicode_form(index):
    for name in (NAME, NFD):
        assert index.get(name).id == NAME
        assert (
            ids(index.search(where=[f"id={name}"]))
            == ids(index.search(where={"id": {"~": name.upper()}}))
            == [NAME]
        )
    assert index.delete([NFD, "M\u00fcll"]) == (1, ["M\u00fcll"])


VALUES = {
    "nan": float("nan"),
    "inf": Decimal("Infinity"),
    "numpy": np.float32(1.5),
    "truth": np.bool_(True),
    "row": np.array([1, 2]),
    "day": date(2024, 5, 1),
    "moment": datetime(2024, 5, 1, 23, 30, tzinfo=UTC),
    "second": np.datetime64("2024-05-01T23:30:00", "ns"),
    "none": np.datetime64("NaT"),
    "fine": np.datetime64("1970-02-01", "ps"),
}
STORED = {
    "nan": None,
    "inf": None,
    "numpy": 1.5,
    "truth": True,
    "row": [1, 2],
    "day": "2024-05-01",
    "moment": "2024-05-01T23:30:00+00:00",
    "second": "2024-05-01T23:30:00",
    "none": None,
    "fine": "1970-02-01T00:00:00",
}
UNUSABLE = [object(), np.timedelta64(5, "ns"), np.datetime64("20000-01-01"), 10**5000]


def test_values_of_all_kinds_become_json_and_a_bad_one_costs_its_field_alone(clip_folder, tmp_path):
    pool = [{"id": "a", "text": "a kite", "fields": {**VALUES, "bad": object()}}]
    index = Index.create(tmp_path / "index", pool, encoder=f"clip:{clip_folder}")
    added = index.last_change
    assert index.get("a").fields == STORED
    (left,) = added.left_out
    assert (left.file, left.reason.split(":")[0]) == ("a", "its field 'bad' is left out")
    added = index.add([NewItem("b", "a boat", fields={"bad": b"1", **VALUES})])
    assert (added.added, added.left_out[0].reason[:26]) == (1, "its field 'bad' is left out"[:26])
    added = index.add([{"id": "c", "text": float("nan")}, {"id": "d", "text": "a car"}])
    assert (added.added, added.left_out[0].file) == (1, "c")
    _, problems = fields_to_json({str(number): value for number, value in enumerate(UNUSABLE)})
    assert len(problems) == len(UNUSABLE)
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / f"{NFD}.txt").write_text(
        unicodedata.normalize("NFD", "ein Ku\u0308hlschrank")
    )
    (tmp_path / "more" / "nan.txt").write_text("a car")
    index.add(tmp_path / "more")
    assert (index.get(f"{NAME}.txt").fields["name"], index.get(f"{NFD}.txt").text) == (
        NAME,
        "ein K\u00fchlschrank",
    )
    assert {hit.id for hit in index.search(where=["moment=2024-05-01"])} == {"a", "b"}
    assert {hit.id for hit in index.search(where=["nan is missing", "numpy=1.5"])} == {"a", "b"}


def test_the_command_lists_items_in_any_encoding(index, capsys, monkeypatch):
    assert main(["search", str(index.folder), "--where", "price<9", "-k", "3"]) == 0
    out, err = capsys.readouterr()
    assert [line.split()[:2] for line in out.splitlines()] == [
        ["rank", "item"],
        ["1", "a"],
        ["2", "0"],
        ["3", "1"],
    ]
    assert "add --offset 3" in err
    assert main(["search", str(index.folder), "--where", "price=99"]) == 3
    assert main(["search", str(index.folder), "--where", "price=9", "--device", "nonsense"]) == 2
    assert "try `--device cpu`" in capsys.readouterr().err
    for more, length in ((["--full"], 431), ([], 270)):
        monkeypatch.setattr("sys.stdout", stream := io.TextIOWrapper(io.BytesIO(), "cp1252"))
        assert main(["search", str(index.folder), "--match", "party", *more]) == 0
        stream.flush()
        printed = stream.buffer.getvalue().decode("cp1252")
        assert "\\U0001f389" in printed
        assert length - 40 < len(printed.splitlines()[1]) < length
    monkeypatch.setattr("sys.stdout", stream := io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert main(["search", str(index.folder), "--match", "party", "--json"]) == 0
    stream.flush()
    assert json.loads(stream.buffer.getvalue())["hits"][0]["text"].startswith("a party \U0001f389")


def test_two_files_whose_names_differ_in_unicode_alone_are_told_apart_by_a_word(
    clip_folder, tmp_path
):
    (tmp_path / "pool").mkdir()
    for name in (NAME, NFD):
        (tmp_path / "pool" / f"{name}.txt").write_text("a kite")
    index = Index.create(tmp_path / "index", tmp_path / "pool", encoder=f"clip:{clip_folder}")
    added = index.last_change
    assert (ids(index), "another form of Unicode" in added.left_out[0].reason) == (
        [f"{NAME}.txt"],
        True,
    )
    assert (index.sync().deleted, len(index)) == (0, 1)


def test_the_command_lists_the_items_of_an_index_whose_encoder_is_not_here(
    clip_folder, tmp_path, capsys
):
    shutil.copytree(clip_folder, tmp_path / "clip")
    Index.create(tmp_path / "index", ["a kite", "a boat"], encoder=f"clip:{tmp_path / 'clip'}")
    shutil.rmtree(tmp_path / "clip")
    assert main(["search", str(tmp_path / "index")]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["item", "0", "1"]
