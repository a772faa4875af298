from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genius.data.records import Modality
from genius.errors import BadData
from genius.search.items import Item, ItemStore, write_items

TEXTS = st.none() | st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
ITEMS = st.lists(
    st.builds(
        Item, st.text(st.characters(exclude_categories=("Cs",)), max_size=12), st.sampled_from(Modality),
        TEXTS, TEXTS, TEXTS,
    ),
    unique_by=lambda item: item.item_id,
    max_size=8,
)  # fmt: skip

PHOTO = Item("ein Foto von Zoë 🦊.jpg", Modality.IMAGE, None, "/bilder/Zoë 🦊.jpg", None)
LONG = Item("x" * 5000, Modality.TEXT, "a\nb\t'quoted' \"twice\"; DROP TABLE items", None, '{"a": 1}')
CARD = Item("卡片/1", Modality.IMAGE_TEXT, "卡片", "/a.png", "{}")


@given(ITEMS)
def test_items_come_back_as_they_were_written(tmp_path_factory, items):
    folder = tmp_path_factory.mktemp("items")
    assert write_items(folder, items) == len(items)
    store = ItemStore(folder)
    assert list(store.all()) == items
    assert store.get(range(len(items))) == items
    assert store.rows_of(item.item_id for item in items).tolist() == list(range(len(items)))


def test_items_come_back_in_the_order_asked_for_and_repeated(tmp_path):
    write_items(tmp_path, [PHOTO, LONG, CARD])
    assert ItemStore(tmp_path).get([2, 0, 2]) == [CARD, PHOTO, CARD]


def test_more_items_than_one_statement_can_name_come_back(tmp_path):
    many = [Item(str(number), Modality.TEXT, str(number)) for number in range(1_700)]
    write_items(tmp_path, many)
    rows = list(range(1_699, -1, -1))
    assert ItemStore(tmp_path).get(rows) == many[::-1]


def test_items_are_found_by_their_ids_and_unknown_ids_are_not(tmp_path):
    write_items(tmp_path, [PHOTO, LONG, CARD])
    store = ItemStore(tmp_path)
    assert store.rows_of([CARD.item_id, "nobody", PHOTO.item_id]).tolist() == [0, 2]
    assert store.count_by_modality() == {Modality.IMAGE: 1, Modality.TEXT: 1, Modality.IMAGE_TEXT: 1}


def test_writing_again_replaces_what_was_there(tmp_path):
    write_items(tmp_path, [PHOTO, LONG])
    write_items(tmp_path, [CARD])
    assert list(ItemStore(tmp_path).all()) == [CARD]


def test_two_items_of_one_name_are_refused_and_the_name_is_said(tmp_path):
    with pytest.raises(BadData, match="9:1"):
        write_items(tmp_path, [Item("9:1", Modality.TEXT, "a"), Item("9:1", Modality.TEXT, "b")])


@pytest.mark.parametrize("name", ["a?b#c%20", "käse 🧀", "100%"])
def test_a_folder_may_have_any_name(tmp_path, name):
    (tmp_path / name).mkdir()
    write_items(tmp_path / name, [CARD])
    assert ItemStore(tmp_path / name).get([0]) == [CARD]


def test_several_threads_may_read_at_once(tmp_path):
    write_items(tmp_path, [PHOTO, LONG, CARD])
    store = ItemStore(tmp_path)
    found: list[list[Item]] = []

    def read() -> None:
        found.extend(store.get([2, 1, 0]) for _ in range(20))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[CARD, LONG, PHOTO]] * 80
