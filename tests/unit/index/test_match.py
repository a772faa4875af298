"""Words that a search leaves out."""

from __future__ import annotations

import pytest

from genius_search import Filter, Index, NewItem, SearchPart, SearchRequest
from genius_search.cli import main
from genius_search.index.match import split_excluded

TEXTS = [
    "a beach with people",
    "an empty beach at dawn",
    "a bowl of soup",
    "the well-known lighthouse",
    "many people",
]


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """Nobody may change it."""
    items = [NewItem(f"t{number}", text) for number, text in enumerate(TEXTS)]
    return Index.create(
        tmp_path_factory.mktemp("words") / "t.index", items, encoder="text:wordllama"
    )


@pytest.mark.parametrize(
    ("text", "query", "match"),
    [
        ("beach -people", "beach", "-people"),
        ("beach \N{EN DASH}people \u2011dogs", "beach", "-people -dogs"),
        ("-people", "", "-people"),
        ('beach -"many people" dawn', "beach dawn", '-"many people"'),
        ('beach -"many peo', "beach", '-"many peo"'),
        ("beach \N{MINUS SIGN}peo*", "beach", "-peo*"),
        ('a -"b"-c', "a", '-"b" -c'),
        ("beach\n-Ärger,", "beach", "-Ärger,"),
    ],
)
def test_a_minus_before_a_word_of_a_query_leaves_it_out(text, query, match):
    assert split_excluded(text) == (query, match)


@pytest.mark.parametrize(
    "text",
    [
        "well-known",
        "a - b",
        "-5 to -3",
        "5 -3..4",
        "tar --flag",
        'the ending "-ing"',
        "beach-",
        "-!",
        "",
    ],
)
def test_any_other_hyphen_is_text(text):
    assert split_excluded(text) == (text, "")


def test_a_search_leaves_out_the_texts_with_a_word(index):
    hits = index.search("beach -people")
    assert [hit.id for hit in hits][:1] == ["t1"]
    assert {hit.id for hit in hits} == {"t1", "t2", "t3"}
    alone = index.search("beach", where=["text!~people"])
    assert [(hit.id, hit.score) for hit in hits] == [(hit.id, hit.score) for hit in alone]


def test_a_search_without_another_word_lists_the_others(index):
    assert {hit.id for hit in index.search("-people")} == {"t1", "t2", "t3"}
    assert {hit.id for hit in index.search(match="-people -soup")} == {"t1", "t3"}


def test_conditions_and_alternatives_keep_the_words_that_a_query_leaves_out(index):
    options = {"parts": [SearchPart(text="soup -bowl")], "combine": "any"}
    for where in ((), Filter(match="beach")):
        request = SearchRequest(text="beach -people", where=where, **options)
        [hits] = index.search([request])
        assert {hit.id for hit in hits} == ({"t1"} if where else {"t1", "t2", "t3"})
    assert {hit.id for hit in index.search("dawn -people", match="beach")} == {"t1"}


def test_choices_for_a_query_are_those_for_the_query_without_them(tmp_path):
    made = Index.create(tmp_path / "t.index", TEXTS, encoder="text:wordllama")
    made.learn("0", "seaside -crowd")
    assert made.search("seaside", k=1)[0].id == "0"
    assert made.search("seaside -people", k=1)[0].id == "1"
    assert made.forget(text="seaside -crowd") == 1


@pytest.mark.parametrize("words", [["beach -people"], ["--match", "-people"], ["--", "-people"]])
def test_the_command(index, capsys, words):
    assert main(["search", str(index.folder), *words]) == 0
    shown = capsys.readouterr().out
    assert "t1" in shown
    assert "people" not in shown
