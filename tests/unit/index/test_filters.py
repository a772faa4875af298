from __future__ import annotations

import math

import numpy as np
import pytest

from genius_search.errors import DeadlinePassed, UsageError
from genius_search.index import items
from genius_search.index.filters import Condition, Filter, matching
from genius_search.index.items import Item, ItemStore
from genius_search.index.segment_writer import write_items
from genius_search.records import Modality

BAG = Item(
    "1", Modality.IMAGE_TEXT, "A red bag with a leather strap", "/photos/bag.jpg",
    '{"brand": "acme", "price": 19.5, "tags": ["new", "red"], "size": {"width": 30}, "sold": false, "id": "B-7"}',
)  # fmt: skip
COAT = Item(
    "2", Modality.IMAGE, None, "/photos/coat.jpg", '{"brand": "O\'Neill", "price": "120", "unit price": 5}'
)
CARD = Item("3", Modality.TEXT, "Ein Café in Zürich", None, None)


def rows_of(store: ItemStore, wanted: Filter, **options: float) -> list[int]:
    return np.flatnonzero(matching(store, wanted, **options)).tolist()


@pytest.fixture
def store(tmp_path):
    write_items(tmp_path, [BAG, COAT, CARD])
    return ItemStore(tmp_path)


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ("brand=O'Neill", [1]),
        ('brand in acme, "O\'Neill"', [0, 1]),
        ("brand~ACM", [0]),
        ('price="120"', [1]),
        ("tags in old,new", [0]),
        ('"unit price"<6', [1]),
        ("id=3", [2]),
        ("id in 1,2,9", [0, 1]),
        ('"id"=B-7', [0]),
        ("modality=image-text", [0]),
        ("modality in image,text", [1, 2]),
        ("text~ZÜRICH", [2]),
        ("text!=x", [0, 1, 2]),
    ],
)
def test_a_typed_condition_finds_the_items_that_a_person_means(store, where, rows):
    assert rows_of(store, Filter.parse([where])) == rows


def test_a_mapping_asks_the_same_as_what_is_typed(store):
    typed = Filter.parse(["brand=acme", "price<20", "price>=1", "tags in new,old", "size.width=30"])
    prices = {"price": {"<": 20, ">=": 1}}
    mapped = Filter.parse({"brand": "acme", **prices, "tags": ["new", "old"], "size.width": 30})
    assert typed == mapped
    assert hash(typed) == hash(mapped)
    assert rows_of(store, mapped) == [0]


@pytest.mark.parametrize(
    ("match", "rows"),
    [
        ('"leather strap"', [0]),
        ('"strap leather"', []),
        ('"with a lea"*', [0]),
        ("cafe", [2]),
        ("leather OR cafe", []),
        ('strap "', [0]),
    ],
)
def test_words_are_looked_for_in_the_texts(store, match, rows):
    assert rows_of(store, Filter.parse(match=match)) == rows


@pytest.mark.parametrize("match", ["", "!!", '"*"', "\0"])
def test_a_match_without_a_word_is_refused(match):
    with pytest.raises(UsageError, match="no word"):
        Filter.parse(match=match)
    with pytest.raises(UsageError, match="no word"):
        Filter(match=match)


@pytest.mark.parametrize(
    ("said", "conditions"),
    [
        (
            "a field and an operator",
            ["", "price", "unit price<20", "<20", "size.=3", "colour in", "colourin a"],
        ),
        (
            "a value",
            ["price<", "price==20", 'brand="acme', 'a="b" c', "a in b,,c", "a in b,", 'a in "b" c'],
        ),
    ],
)
def test_a_condition_that_cannot_be_read_is_refused_with_the_grammar(said, conditions):
    for where in conditions:
        with pytest.raises(UsageError, match=rf"expected {said}.* a condition is FIELD OPERATOR VALUE"):
            Filter.parse([where])


def test_space_around_a_condition_says_nothing():
    assert Filter.parse([" brand = acme\n"]) == Filter.parse(["brand=acme"])
    assert Filter.parse(["a in  b , 'c' "]) == Filter.parse({"a": ["b", "c"]})


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ({"price": {}}, "no operator; give one"),
        ({"price": float("nan")}, "nan cannot be compared"),
        ({"price": {"between": 3}}, "'between' is no operator"),
        ({"colour": []}, "no values"),
        ({"colour": [str(number) for number in range(10_001)]}, "10,001 values"),
        ({"sold": {"<": True}}, "= != in only"),
        ({"modality": "sound"}, "'sound' is not one of"),
        ({"brand": "\ud800"}, "not valid Unicode"),
    ],
)
def test_a_filter_that_cannot_work_is_refused(where, said):
    with pytest.raises(UsageError, match=said):
        Filter.parse(where)


def test_quotes_in_names_and_values_stay_what_they_are(tmp_path):
    hostile = '{"a\'); DROP TABLE items; --": "x\' OR 1=1 --"}'
    write_items(tmp_path, [BAG, Item("4", Modality.TEXT, "a", None, hostile)])
    store = ItemStore(tmp_path)
    name = "a'); DROP TABLE items; --"
    assert rows_of(store, Filter.parse([f'"{name}"="x\' OR 1=1 --"'])) == [1]
    assert rows_of(store, Filter((Condition((name,), "=", ("x",)),))) == []
    assert len(list(store.all())) == 2


def test_as_many_conditions_as_allowed_can_be_asked_and_no_more(store):
    many = [f"field{number}!=a" for number in range(200)]
    assert rows_of(store, Filter.parse(many, match="red")) == [0]
    with pytest.raises(UsageError, match=r"201 conditions .* at most 200"):
        Filter.parse([*many, "a=b"])


@pytest.mark.parametrize(
    "wanted", [Filter.parse(["brand~a"]), Filter.parse(["text~a"]), Filter.parse(match="red")]
)
def test_a_filter_that_takes_too_long_is_interrupted(store, monkeypatch, wanted):
    monkeypatch.setattr(items, "STEPS", 1)
    with pytest.raises(DeadlinePassed):
        matching(store, wanted, deadline=0.0)
    assert rows_of(store, wanted) != []
    assert rows_of(store, wanted, deadline=math.inf) == rows_of(store, wanted)
