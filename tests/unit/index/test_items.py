from __future__ import annotations

import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genius_search.errors import ArtifactMismatch
from genius_search.index import items as items_module
from genius_search.index.filters import Filter, matching_items
from genius_search.index.items import ITEMS_FILE, SHOWN_COLUMNS, Item, ItemStore
from genius_search.index.writer import write_items
from genius_search.records import Modality, composed

TEXTS = st.none() | st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
NAMES = st.text(
    st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=12
).map(composed)
ITEMS = st.lists(
    st.builds(Item, NAMES, st.sampled_from(Modality), *[TEXTS] * 5, st.none() | st.integers(0, 9)),
    unique_by=lambda item: item.id,
    max_size=8,
)  # fmt: skip

PHOTO = Item("ein Foto von Zoë 🦊.jpg", Modality.IMAGE, None, "/bilder/Zoë 🦊.jpg", None)
CARD = Item("卡片/1", Modality.IMAGE_TEXT, "卡片", "/a.png", "{}")


def rows_of(store: ItemStore, wanted: Filter, **options: float) -> list[int]:
    return np.flatnonzero(matching_items(store, wanted, **options)).tolist()


@given(ITEMS)
def test_items_come_back_as_they_were_written(tmp_path_factory, items):
    folder = tmp_path_factory.mktemp("items")
    assert write_items(folder, items) == len(items)
    store = ItemStore(folder)
    assert list(store.all()) == items
    assert store.get(range(len(items))) == items
    order = [*range(len(items))][::-2] * 2
    assert store.get(order) == [items[row] for row in order]
    assert sorted(row for _, row, *_ in store.find_ids(item.id for item in items)) == list(
        range(len(items))
    )


@pytest.mark.parametrize("item_id", [f"{PHOTO.id}\0x", f"{PHOTO.id}\0", "\ud83e\0", "kite\udc00"])
def test_an_id_that_cannot_be_stored_finds_no_other_item(tmp_path, item_id):
    write_items(tmp_path, [PHOTO, Item("kite\ufffd", Modality.TEXT, "a")])
    store = ItemStore(tmp_path)
    assert store.find_ids([item_id]) == []


@pytest.mark.parametrize("name", ["a?b#c%20", "käse 🧀", "100%"])
def test_a_folder_may_have_any_name(tmp_path, name):
    (tmp_path / name).mkdir()
    write_items(tmp_path / name, [CARD])
    assert ItemStore(tmp_path / name).get([0]) == [CARD]


HOSTILE = {
    "endless items": (
        "ALTER TABLE items RENAME TO real",
        """CREATE VIEW items AS WITH RECURSIVE more(row) AS (SELECT 0 UNION ALL SELECT row + 1 FROM more)
        SELECT row, 'a' AS item_id, 'text' AS modality, '' AS text, NULL AS image, '' AS source FROM more""",
    ),
    "a trigger": ("CREATE TRIGGER t AFTER DELETE ON items BEGIN SELECT 1; END",),
    "an expression": ("CREATE INDEX i ON items (length(item_id))",),
}


@pytest.mark.parametrize("statements", HOSTILE.values(), ids=HOSTILE)
def test_a_store_that_defines_anything_else_is_refused_before_it_is_queried(tmp_path, statements):
    write_items(tmp_path, [PHOTO])
    with closing(sqlite3.connect(tmp_path / ITEMS_FILE)) as database, database:
        for statement in statements:
            database.execute(statement)
    with pytest.raises(ArtifactMismatch, match="in a way that no index does"):
        ItemStore(tmp_path)


def test_a_store_without_items_is_damaged(tmp_path):
    sqlite3.connect(tmp_path / ITEMS_FILE).close()
    with pytest.raises(ArtifactMismatch, match="damaged: it lacks"):
        ItemStore(tmp_path)


def test_a_slow_filter_delays_neither_another_nor_the_reading_of_items(tmp_path, monkeypatch):
    write_items(tmp_path, [PHOTO, CARD])
    store = ItemStore(tmp_path)
    assert store.num_rows == 2
    has_begun, may_end = threading.Event(), threading.Event()

    def look_at_the_clock():
        if threading.current_thread() is not threading.main_thread():
            has_begun.set()
            assert may_end.wait(60)
        return 0.0

    monkeypatch.setattr(items_module, "STEPS_BETWEEN_CLOCK_CHECKS", 1)
    monkeypatch.setattr(items_module, "time", SimpleNamespace(monotonic=look_at_the_clock))
    wanted = Filter.parse(["text~a"])
    with ThreadPoolExecutor(2) as threads:
        try:
            slow = threads.submit(rows_of, store, wanted)
            assert has_begun.wait(60)
            assert not slow.done()
            assert store.get([0])
            expected = rows_of(store, wanted)
            assert not slow.done()
        finally:
            may_end.set()
        assert slow.result(60) == expected


def test_items_are_filtered_though_a_writer_has_removed_the_file(tmp_path):
    write_items(tmp_path, [PHOTO, CARD])
    store = ItemStore(tmp_path)
    (tmp_path / ITEMS_FILE).unlink()
    assert rows_of(store, Filter.parse(["text~卡"])) == [1]
    assert list(store.all()) == [PHOTO, CARD]


def test_items_may_be_read_without_the_fields_that_hits_do_not_show(tmp_path):
    items = [PHOTO._replace(about="Zoë"), CARD._replace(stamp="1")]
    write_items(tmp_path, items)
    assert ItemStore(tmp_path).get([1, 0], SHOWN_COLUMNS) == [CARD, PHOTO]


@pytest.mark.parametrize(
    ("source", "fields"),
    [(' \n{"a": 1}\t', {"a": 1}), ('{"a": 1} x', {}), ('\xa0{"a": 1}', {}), (" ", {}), ("[1]", {})],
)
def test_fields_are_one_json_object_with_spaces_around_it(source, fields):
    assert CARD._replace(source=source).fields == fields
