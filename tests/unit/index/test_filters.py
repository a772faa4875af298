from __future__ import annotations

import math
from dataclasses import replace

import pytest

from genius_search.errors import DeadlinePassed, UsageError
from genius_search.index import items
from genius_search.index.filters import Condition, Filter
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


@pytest.fixture
def store(tmp_path):
    write_items(tmp_path, [BAG, COAT, CARD])
    return ItemStore(tmp_path)


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ("brand=acme", [0]),
        ("brand != acme", [1, 2]),
        ("brand=O'Neill", [1]),
        ('brand in acme, "O\'Neill"', [0, 1]),
        ("brand~ACM", [0]),
        ("price<20", [0]),
        ("price>=19.5", [0, 1]),
        ("price=120", [1]),
        ('price="120"', [1]),
        ('price="19.5"', []),
        ("price>.5", [0, 1]),
        ("size.width=30", [0]),
        ("size=30", []),
        ("size!=30", [0, 1, 2]),
        ("tags=red", [0]),
        ("tags in old,new", [0]),
        ("tags!=red", [1, 2]),
        ("sold=false", [0]),
        ("sold=False", [0]),
        ("sold=0", []),
        ('"unit price"<6', [1]),
        ("nobody=1", []),
        ("nobody!=1", [0, 1, 2]),
        ("nobody<1", []),
        ("nobody~a", []),
        ("id=3", [2]),
        ("id in 1,2,9", [0, 1]),
        ('"id"=B-7', [0]),
        ("modality=image,text", [0]),
        ("modality=image-text", [0]),
        ("modality in image,text", [1, 2]),
        ("modality!=text", [0, 1]),
        ("text~zürich", [2]),
        ("text~ZÜRICH", [2]),
        ("text!=x", [0, 1, 2]),
        ("image~coat", [1]),
    ],
)
def test_a_typed_condition_finds_the_items_that_a_person_means(store, where, rows):
    assert store.matching(Filter.parse([where])).tolist() == rows


def test_a_mapping_asks_the_same_as_what_is_typed(store):
    typed = Filter.parse(
        ["brand=acme", "price<20", "price>=1", "tags in new,old", "size.width=30", "sold=false"]
    )
    mapped = Filter.parse(
        {
            "brand": "acme",
            "price": {"<": 20, ">=": 1},
            "tags": ["new", "old"],
            "size.width": 30,
            "sold": False,
        }
    )
    assert typed == mapped
    assert hash(typed) == hash(mapped)
    assert store.matching(mapped).tolist() == [0]


def test_all_parts_of_a_filter_are_joined_by_and(store):
    filter_ = replace(Filter.parse(["brand=acme"], match="leather"), modality=Modality.IMAGE_TEXT)
    assert store.matching(filter_).tolist() == [0]
    assert store.matching(replace(filter_, modality=Modality.TEXT)).tolist() == []
    assert store.matching(Filter.parse(["price>1", "price>19", "price<120"])).tolist() == [0]
    assert store.matching(Filter()).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("match", "rows"),
    [
        ("leather", [0]),
        ("LEATHER bag", [0]),
        ('"leather strap"', [0]),
        ('"strap leather"', []),
        ("lea*", [0]),
        ("lea", []),
        ('"with a lea"*', [0]),
        ("cafe", [2]),
        ("café & zurich", [2]),
        ("leather OR cafe", []),
        ('strap "', [0]),
        ("text:bag", []),
    ],
)
def test_words_are_looked_for_in_the_texts(store, match, rows):
    assert store.matching(Filter.parse(match=match)).tolist() == rows


@pytest.mark.parametrize("match", ["", "  ", "!!", '""', "*", '"*"', "\0"])
def test_a_match_without_a_word_is_refused(match):
    with pytest.raises(UsageError, match="no word"):
        Filter.parse(match=match)
    with pytest.raises(UsageError, match="no word"):
        Filter(match=match)


def test_a_match_of_very_many_words_is_answered(store):
    assert store.matching(Filter.parse(match="leather " * 5_000)).tolist() == [0]


@pytest.mark.parametrize(
    ("where", "place"),
    [
        ("", "the name of a field at its end (character 1)"),
        ("price", "an operator at its end (character 6)"),
        ("unit price<20", "an operator before 'price<20' (character 5)"),
        ("price<", "a value (in quotes if"),
        ("price==20", "before '=20' (character 7)"),
        ("price=<20", "before '<20' (character 7)"),
        ('brand="acme', "before '\"acme' (character 7)"),
        ("colour in red,,blue", "before ',blue' (character 15)"),
        ("colour in red,", "at its end (character 15)"),
        ("colour in", "an operator before 'in' (character 7)"),
        ("<20", "the name of a field before '<20' (character 1)"),
        ("size.=3", "the name of a field before '=3' (character 6)"),
        ("brand=acme\n", None),
    ],
)
def test_a_condition_that_is_none_is_refused_with_its_place_and_the_grammar(where, place):
    if place is None:
        assert Filter.parse([where]) == Filter.parse(["brand=acme"])
        return
    with pytest.raises(UsageError) as caught:
        Filter.parse([where])
    assert place in str(caught.value)
    assert "FIELD OPERATOR VALUE" in str(caught.value)


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ({"price": {}}, "no operator; give one"),
        ({"price": None}, "None cannot be compared"),
        ({"price": float("nan")}, "nan cannot be compared"),
        ({"price": float("inf")}, "inf cannot be compared"),
        ({"price": {"<": [1, 2]}}, "cannot be compared"),
        ({"price": {"between": 3}}, "'between' is no operator"),
        ({"size": {"width": 3}}, "size.width"),
        ({"colour": []}, "no values"),
        ({"colour": [str(number) for number in range(10_001)]}, "10,001 values"),
        ({"sold": {"<": True}}, "= != in only"),
        ({"modality": {"<": "image"}}, "= != in only"),
        ({"modality": "sound"}, "'sound' is not one of"),
        ({"brand": "\ud800"}, "not valid Unicode"),
        ({'"brand': "a"}, "expected the name of a field"),
        ({'"brand"x': "a"}, "the end of the name"),
        (["brand=\ud800"], "not valid Unicode"),
        (["sold<true"], "= != in only"),
    ],
)
def test_a_filter_that_cannot_work_is_refused(where, said):
    with pytest.raises(UsageError, match=said):
        Filter.parse(where)


def test_conditions_of_as_many_values_as_are_allowed_work(store):
    many = ["acme", *(f"brand {number}" for number in range(9_999))]
    assert store.matching(Filter.parse({"brand": many})).tolist() == [0]


def test_one_and_true_are_two_values():
    assert Filter.parse({"a": True}) != Filter.parse({"a": 1})


def test_quotes_in_names_and_values_stay_what_they_are(tmp_path):
    hostile = '{"a\'); DROP TABLE items; --": "x\' OR 1=1 --"}'
    write_items(tmp_path, [BAG, Item("4", Modality.TEXT, "a", None, hostile)])
    store = ItemStore(tmp_path)
    name = "a'); DROP TABLE items; --"
    assert store.matching(Filter.parse([f'"{name}"="x\' OR 1=1 --"'])).tolist() == [1]
    assert store.matching(Filter((Condition((name,), "=", ("x",)),))).tolist() == []
    assert len(list(store.all())) == 2


def test_json_that_only_python_reads_is_searched_like_other_json(tmp_path):
    sources = ['{"price": NaN, "brand": "acme"}', '{"brand": "ac\\u006de"}', '{"\\u0062rand": "acme"}']
    write_items(tmp_path, [Item(str(row), Modality.TEXT, "a", None, one) for row, one in enumerate(sources)])
    store = ItemStore(tmp_path)
    assert store.matching(Filter.parse(["brand=acme"])).tolist() == [0, 1, 2]
    assert store.matching(Filter.parse(["price<1"])).tolist() == []
    assert store.matching(Filter.parse(["price!=1"])).tolist() == [0, 1, 2]


def test_as_many_conditions_as_allowed_can_be_asked_and_no_more(store):
    many = [f"field{number}!=a" for number in range(200)]
    assert store.matching(Filter.parse(many, match="red")).tolist() == [0]
    with pytest.raises(UsageError, match=r"201 conditions .* at most 200"):
        Filter.parse([*many, "a=b"])


@pytest.mark.parametrize(
    "wanted", [Filter.parse(["brand~a"]), Filter.parse(["text~a"]), Filter.parse(match="red")]
)
def test_a_filter_that_takes_too_long_is_interrupted(store, monkeypatch, wanted):
    monkeypatch.setattr(items, "STEPS", 1)
    with pytest.raises(DeadlinePassed):
        store.matching(wanted, deadline=0.0)
    assert store.matching(wanted).tolist() != []
    assert store.matching(wanted, deadline=math.inf).tolist() == store.matching(wanted).tolist()
