"""Filters against a plain reading of every item in Python, written from what the documentation says."""

from __future__ import annotations

import json
import operator
import re
import unicodedata
from dataclasses import replace
from decimal import Decimal

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from genius_search.index.filters import Filter, matching_items
from genius_search.index.items import Item, ItemStore
from genius_search.index.writer import write_items
from genius_search.records import Modality

CHARACTERS = st.characters(exclude_categories=("Cs",))
KEYS = st.sampled_from(["a", "b", "a b", "a.b", "é", 'q"q', "back\\slash", "", "1", "$", "a[0]"])
WORDS = st.sampled_from(
    ["red", "Red", "RED bag", "é", "É", "straße", "STRASSE", "20", "20.0", "2e1", "007", " 20", "true", "True",
     'q"q', "back\\slash", "it's", "", "-1", "\n", "[1]", '{"a": 1}', "null", "K"]
) | st.text(CHARACTERS, max_size=4)  # fmt: skip
HUNDREDTHS = st.integers(-300, 3000).map(lambda cents: cents / 100)
NUMBERS = (
    st.sampled_from([0, 1, -1, 20, 2**53, 2**53 + 1, 2**63 - 1, -(2**63), 2**64, 10**30, 1e30])
    | HUNDREDTHS
)
SCALARS = st.none() | st.booleans() | NUMBERS | WORDS
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=4,
)
SOURCES = st.one_of(
    st.none(),
    st.builds(json.dumps, st.dictionaries(KEYS, VALUES, max_size=4), ensure_ascii=st.booleans()),
    st.dictionaries(KEYS, VALUES, max_size=2).map(
        lambda fields: json.dumps({**fields, "n": float("nan")})
    ),
    st.sampled_from(["", "no JSON", "[1]", '"a"', "20", "{", "null"]),
)
SENTENCES = st.none() | st.lists(
    st.sampled_from(
        ["red", "Red-bag", "leather", "strap", "straps", "café", "CAFE", "don't", "20"]
    ),
    max_size=5,
).map(" ".join)
ITEMS = st.lists(
    st.tuples(st.sampled_from(Modality), SENTENCES, WORDS | st.none(), SOURCES), max_size=6
).map(lambda rows: [Item(f"{number}:é", *row) for number, row in enumerate(rows)])
OPERATORS = ["=", "!=", "<", "<=", ">", ">=", "~", "!~", "in"]
NEGATED = {"!=": "=", "!~": "~"}


def rows_of(store: ItemStore, wanted: Filter, **options: float) -> list[int]:
    return np.flatnonzero(matching_items(store, wanted, **options)).tolist()


@st.composite
def conditions(draw) -> tuple[tuple[str, ...], str, list[object]]:
    """A path, an operator and values that go with it."""
    path = tuple(draw(st.lists(KEYS, min_size=1, max_size=2)))
    how = draw(st.sampled_from(OPERATORS))
    if how in ("~", "!~"):
        return path, how, [draw(WORDS)]
    if how == "in":
        return path, how, draw(st.lists(st.booleans() | NUMBERS | WORDS, min_size=1, max_size=10))
    return path, how, [draw(NUMBERS | WORDS if how[0] in "<>" else NUMBERS | WORDS | st.booleans())]


def satisfies(source: str | None, path: tuple[str, ...], how: str, wanted: list[object]) -> bool:
    if how in NEGATED:
        return not satisfies(source, path, NEGATED[how], wanted)
    try:
        have = json.loads(source or "null")
    except ValueError:
        return False
    values = values_at(have, path) if isinstance(have, dict) else []
    return any(fits(value, how, want) for value in values for want in wanted)


def values_at(value: object, path: tuple[str, ...]) -> list[object]:
    """Return the values of a field, also those within lists and within the objects of a list."""
    if isinstance(value, list):
        return [inner for element in value for inner in values_at(element, path)]
    if not path:
        return [value]
    if isinstance(value, dict) and path[0] in value:
        return values_at(value[path[0]], path[1:])
    return []


def fits(have: object, how: str, want: object) -> bool:
    compare = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}.get(
        how, operator.eq
    )
    if have is None or isinstance(have, dict | list):
        return False
    if isinstance(want, bool):
        return have is want or (isinstance(have, str) and have.lower() == str(want).lower())
    if isinstance(have, bool):
        return False
    if isinstance(want, str):
        if how == "~":
            return isinstance(have, str) and want.casefold() in have.casefold()
        return isinstance(have, str) and compare(have, want)
    if isinstance(have, str):
        try:
            have = json.loads(have) if have == have.strip() else None
        except ValueError:
            return False
        if isinstance(have, bool) or not isinstance(have, int | float):
            return False
    return compare(in_64_bits(have), in_64_bits(want))


def in_64_bits(number: float) -> float:
    return number if isinstance(number, float) or -(2**63) <= number < 2**63 else float(number)


def typed(name: str) -> str:
    return f"'{name}'" if '"' in name else f'"{name}"'


def spelt(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"'{value}'" if '"' in value else f'"{value}"'
    return str(value)


def stored(folders, items: list[Item]) -> ItemStore:
    folder = folders.mktemp("items")
    write_items(folder, items)
    return ItemStore(folder)


@given(ITEMS, st.lists(st.lists(conditions(), min_size=1, max_size=3), min_size=1, max_size=6))
def test_conditions_hold_for_the_items_for_which_they_hold_in_plain_python(
    tmp_path_factory, items, drawn
):
    store = stored(tmp_path_factory, items)
    for together in drawn:
        expected = [
            row
            for row, item in enumerate(items)
            if all(satisfies(item.source, *condition) for condition in together)
        ]
        mapped = tuple(
            one
            for path, how, values in together
            for one in Filter.parse(
                {".".join(map(typed, path)): {how: values if how == "in" else values[0]}}
            ).conditions
        )
        assert rows_of(store, Filter(mapped)) == expected
        texts = [value for _, _, values in together for value in values if isinstance(value, str)]
        if not any('"' in text and "'" in text for text in texts):
            where = [
                f"{'.'.join(map(typed, path))} {how} {','.join(map(spelt, values))}"
                for path, how, values in together
            ]
            assert rows_of(store, Filter.parse(where)) == expected


OWN = st.tuples(
    st.sampled_from(["id", "text", "image"]),
    st.sampled_from(OPERATORS),
    st.lists(WORDS, min_size=1, max_size=5),
)


@given(ITEMS, st.lists(OWN, max_size=8))
def test_conditions_on_an_items_own_fields_compare_texts(tmp_path_factory, items, drawn):
    store = stored(tmp_path_factory, items)
    for name, how, words in drawn:
        wanted = words if how == "in" else words[:1]
        expected = []
        for row, item in enumerate(items):
            have = {"id": item.id, "text": item.text, "image": item.image}[name]
            found = have is not None and any(
                fits(have, NEGATED.get(how, how), want) for want in wanted
            )
            expected += [row] if found != (how in NEGATED) else []
        filter_ = Filter.parse({name: {how: wanted if how == "in" else wanted[0]}})
        assert rows_of(store, filter_) == expected


def words_of(text: str) -> list[str]:
    plain = "".join(
        one for one in unicodedata.normalize("NFD", text.lower()) if not unicodedata.combining(one)
    )
    return re.findall(r"[a-z0-9]+", plain)


def has(text: str, phrase: str, *, star: bool) -> bool:
    have, want = words_of(text), words_of(phrase)
    places = [have[place : place + len(want)] for place in range(len(have))]
    if not star:
        return want in places
    full = (segment for segment in places if len(segment) == len(want))
    return any(segment[:-1] == want[:-1] and segment[-1].startswith(want[-1]) for segment in full)


PHRASES = st.sampled_from(
    ["red", "RED", "bag", "red bag", "leather strap", "cafe", "Café", "don't", "20", "strap"]
)
MATCHES = st.tuples(
    st.lists(PHRASES, min_size=1, max_size=3), st.booleans(), st.sampled_from([None, *Modality])
)


@given(ITEMS, st.lists(MATCHES, max_size=8))
def test_a_match_finds_the_texts_that_have_all_words_side_by_side_inside_quotes(
    tmp_path_factory, items, drawn
):
    store = stored(tmp_path_factory, items)
    for phrases, star, modality in drawn:
        expected = [
            row
            for row, item in enumerate(items)
            if all(has(item.text or "", phrase, star=star) for phrase in phrases)
            and modality in (None, item.modality)
        ]
        match = " ".join(f'"{phrase}"{"*" if star else ""}' for phrase in phrases)
        assert rows_of(store, replace(Filter.parse(match=match), modality=modality)) == expected


@given(
    st.text(st.characters(exclude_categories=("Cs",)) | st.sampled_from('"*()^:+-{}\\\0 ' + "'"))
)
def test_nothing_that_is_typed_as_a_match_is_wrong_to_the_database(tmp_path_factory, match):
    folder = tmp_path_factory.getbasetemp() / "typed"
    if not folder.exists():
        folder.mkdir()
        write_items(folder, [Item("1", Modality.TEXT, "a word AND another")])
    match += " word"
    assert rows_of(ItemStore(folder), Filter.parse(match=match)) in ([], [0])


@given(st.decimals(-1000, 1000, places=3))
def test_a_number_means_the_same_however_it_is_spelt(tmp_path_factory, number: Decimal):
    folder = tmp_path_factory.mktemp("items")
    sources = [f'{{"a": {number}}}', f'{{"a": {float(number)!r}}}', f'{{"a": "{number}"}}']
    write_items(
        folder, [Item(str(row), Modality.TEXT, "a", None, one) for row, one in enumerate(sources)]
    )
    assert rows_of(ItemStore(folder), Filter.parse([f"a={float(number)!r}"])) == [0, 1, 2]
