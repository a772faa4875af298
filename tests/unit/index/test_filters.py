from __future__ import annotations

import contextlib
import json
import math
import time
from datetime import UTC, date, datetime
from itertools import zip_longest

import numpy as np
import pytest

from genius_search.data.values import Span
from genius_search.errors import DeadlinePassed, UsageError
from genius_search.index import items
from genius_search.index.filters import Condition, Filter, matching_items
from genius_search.index.items import Item, ItemStore
from genius_search.index.writer import write_items
from genius_search.records import Modality

BAG = Item(
    "1", Modality.IMAGE_TEXT, "A red bag with a leather strap", "/photos/bag.jpg",
    '{"brand": "acme", "price": 19.5, "tags": ["new", "red"], "size": {"width": 30}, "sold": false, "id": "B-7"}',
)  # fmt: skip
COAT = Item(
    "2",
    Modality.IMAGE,
    None,
    "/photos/coat.jpg",
    '{"brand": "O\'Neill", "price": "120", "unit price": 5}',
)
CARD = Item("3", Modality.TEXT, "Ein Café in Zürich", None, None)


def rows_of(store: ItemStore, wanted: Filter, **options: float) -> list[int]:
    return np.flatnonzero(matching_items(store, wanted, **options)).tolist()


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
        ('price == "120"', [1]),
        ("price IS NULL", [2]),
        ("tags in old,new", [0]),
        ('"unit price"<6', [1]),
        ("id=3", [2]),
        ("id in 1,2,9", [0, 1]),
        ('"id"=B-7', [0]),
        ("modality=image-text", [0]),
        ("modality in image,text", [1, 2]),
        ("text~ZÜRICH", [2]),
        ("text!=x", [0, 1, 2]),
        ("text!~LEATHER", [1, 2]),
        ("text !~ 'Caf\N{SOFT HYPHEN}é'", [0, 1]),
        ("tags!~re", [1, 2]),
        ("size.width!~3", [0, 1, 2]),
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


TIMES = [
    "2023-01-01 10:00:00",
    "2024-05-01T23:30:00",
    "2024-05-01T23:30:00+09:00",
    "2024-05-02",
    "9999-12-31",
]


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ("taken<=2024-05-01", [0, 1, 2]),
        ("taken=2024-05-01", [1, 2]),
        ("taken>'2024-05-01'", [3, 4]),
        ("taken>=2024", [1, 2, 3, 4]),
        ("taken<2024", [0]),
        ("taken=2024-05..2025", [1, 2, 3]),
        ("taken in 2023,2024-05-02", [0, 3]),
        ("taken<2024-05-01T15:00Z", [0, 2]),
        ("taken>=2024-05-02T08:30:00+09:00", [1, 3, 4]),
        ({"taken": {">": date(2024, 5, 1), "<": datetime(2025, 1, 1, tzinfo=UTC)}}, [3]),
        ({"taken": np.datetime64("2023-01-01")}, [0]),
        ("year>2023", [1]),
        ("year=2020..2023", [0]),
        ("year is missing", [2, 3, 4]),
        ("year!=null", [0, 1]),
        ({"year": None}, [2, 3, 4]),
        ({"year": [2023, math.nan]}, [0, 2, 3, 4]),
        ({"year": np.array([2023])}, [0]),
        ({"year": range(2023, 2025)}, [0, 1]),
        ("people.name in Ann,Cy", [0]),
        ("people.name in (Ann, 'Cy')", [0]),
        ("people is not missing", [0]),
        ("n\u0303ame~MU\u0308LL", [1]),
        ("text is missing", [0, 1, 2, 3, 4]),
    ],
)
def test_times_ranges_what_is_missing_and_lists_of_objects(tmp_path, where, rows):
    more = [
        {"year": 2023, "people": [{"name": "Bo"}, {"name": ["Ann"]}]},
        {"year": 2024, "\u00f1ame": "M\u00fcller"},
    ]
    fields = [
        {"taken": taken, **extra}
        for taken, extra in zip_longest(TIMES, [*more, {"year": None}], fillvalue={})
    ]
    write_items(
        tmp_path, [Item(one["taken"], Modality.IMAGE, source=json.dumps(one)) for one in fields]
    )
    assert (
        rows_of(ItemStore(tmp_path), Filter.parse(where if isinstance(where, dict) else [where]))
        == rows
    )


def test_times_may_be_spelled_as_by_exif_and_other_programs(tmp_path):
    times = ["2022:03:01", "2022:03:01 12:00:00+02", "2022-03-01 12:00 +0200", "2022:03:01:12"]
    write_items(
        tmp_path, [Item(one, Modality.IMAGE, source=json.dumps({"taken": one})) for one in times]
    )
    for where in ("taken=2022-03-01", "taken=2022:03:01"):
        assert rows_of(ItemStore(tmp_path), Filter.parse([where])) == [0, 1, 2]


@pytest.mark.parametrize(
    ("said", "conditions"),
    [
        (
            "is not one value; join conditions by and",
            ["price<20 or year=2020", "a=b && c=d", "price=>20"],
        ),
        (
            "is not one value; join conditions by and",
            ["a=b or c is missing", "a=b or c in d,e"],
        ),
        (
            "is neither a number .* nor a date",
            ["price<2,0", "price=1,234", "price<20 or more", "taken>1.5.2024"],
        ),
        ("ends before it begins", ["price=20..5"]),
        ("is no range", ["price=..5", "taken=2024-05..", "price=5..2024-05"]),
        ("expected 'is missing' or 'is not missing'", ["price is 3", "price is not"]),
        ("= != in only", ["price<null"]),
    ],
)
def test_what_is_written_otherwise_is_refused_with_the_right_form(said, conditions):
    for where in conditions:
        with pytest.raises(UsageError, match=said):
            Filter.parse([where])


@pytest.mark.parametrize(
    ("joined", "conditions"),
    [
        ("price<20 and year=2020", ["price<20", "year=2020"]),
        ("a in b, c AND d is missing and e~f", ["a in b, c", "d is missing", "e~f"]),
        ("title~salt and pepper and price<20", ["title~salt and pepper", "price<20"]),
        ('title="this and b=c" and "unit price">3', ['title="this and b=c"', '"unit price">3']),
    ],
)
def test_and_joins_conditions(joined, conditions):
    assert Filter.parse(joined) == Filter.parse(conditions)


def test_reading_conditions_takes_linear_time():
    began = time.process_time()
    for where in (
        "x in a" + " " * 100_000 + 'b"',
        "x in a" + " ," * 50_000,
        'a="' * 30_000,
        "a." * 50_000,
        "a=" + "and " * 30_000,
    ):
        with contextlib.suppress(UsageError):
            Filter.parse([where] * 5)
    with pytest.raises(UsageError, match="1,000,002 characters"):
        Filter.parse(["a=" + "b" * 1_000_000])
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("match", "rows"),
    [
        ('"leather strap"', [0]),
        ('"strap leather"', []),
        ('"with a lea"*', [0]),
        ("cafe", [2]),
        ("leather OR cafe", [0, 2]),
        ('strap "', [0]),
        ("-leather", [1, 2]),
        ("red -leather", []),
        ("red -coat", [0]),
        ('red -"strap leather"', [0]),
        ('red -"leather strap"', []),
        ("-caf*", [0, 1]),
        ("\N{MINUS SIGN}leather -Zürich", [1]),
        ("red NOT leather", []),
        ("red AND NOT coat", [0]),
        ("NOT red", [1, 2]),
        ("coat OR red OR zurich bag OR ein", [0, 2]),
        ("coat | zurich", [2]),
        ("red - leather", [0]),
        ('"red" or', []),
        ('“leather strap” "OR"', []),
        ("le\N{SOFT HYPHEN}ather", [0]),
    ],
)
def test_words_are_looked_for_in_the_texts(store, match, rows):
    assert rows_of(store, Filter.parse(match=match)) == rows


@pytest.mark.parametrize(
    ("match", "said"),
    [
        ("OR red", "OR has no word before it"),
        ("red OR", "OR has no word after it"),
        ("red OR AND bag", "AND has no word before it"),
        ("NOT", "NOT has no word after it"),
        ("NOT -red", "NOT -red negates twice"),
        ("red OR -bag", "OR cannot combine a word with an excluded word"),
        ("-red OR bag", "OR cannot combine a word with an excluded word"),
        ("(red OR blue) bag", r"the bracket of '\(red' groups nothing"),
        ('red -"leather strap', '-" begins no phrase'),
    ],
)
def test_an_operator_that_means_nothing_is_refused_with_those_that_work(match, said):
    with pytest.raises(UsageError, match=rf"{said}; give words .* excludes it, OR stands between"):
        Filter.parse(match=match)


@pytest.mark.parametrize("match", ["", "!!", '"*"', "\0", "-", "-!"])
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
            ["price<", 'brand="acme', 'a="b" c', "a in b,,c", "a in b,", 'a in "b" c'],
        ),
    ],
)
def test_a_condition_that_cannot_be_read_is_refused_with_the_grammar(said, conditions):
    for where in conditions:
        with pytest.raises(
            UsageError, match=rf"expected {said}.* a condition is FIELD OPERATOR VALUE"
        ):
            Filter.parse([where])


def test_space_around_a_condition_says_nothing():
    assert Filter.parse([" brand = acme\n"]) == Filter.parse(iter(["brand=acme"]))
    assert Filter.parse(["a in  b , 'c' "]) == Filter.parse({"a": ["b", "c"]})


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ({"price": {}}, "no operator; give one"),
        ({"price": {"<": float("nan")}}, "= != in only"),
        ({"price": b"2"}, "expected a text, a number, a date"),
        ({"price": {"between": 3}}, "'between' is no operator"),
        ({"colour": []}, "no values"),
        ({"colour": [str(number) for number in range(10_001)]}, "10,001 values"),
        ({"sold": {"<": True}}, "= != in only"),
        ({"modality": "sound"}, "'sound' is not one of"),
        ({"brand": "\ud800"}, "not valid Unicode"),
        (["price<20", {"year": 2020}], "expected texts, or one mapping"),
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
    assert rows_of(store, Filter((Condition((name,), "=", (Span("x", "x"),)),))) == []
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
    monkeypatch.setattr(items, "STEPS_BETWEEN_CLOCK_CHECKS", 1)
    with pytest.raises(DeadlinePassed):
        matching_items(store, wanted, deadline=0.0)
    assert rows_of(store, wanted) != []
    assert rows_of(store, wanted, deadline=math.inf) == rows_of(store, wanted)
