"""Texts are cleaned before they are stored and looked for."""

from __future__ import annotations

import pytest

from genius_search import Index, NewItem
from genius_search.data.folder import read_folder
from genius_search.text import clean, join_divided_words


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("light\u00adhouse", "lighthouse"),
        ("light\u00ad\n  house", "lighthouse"),
        ("\ufefflight\u200bhou\u2060se", "lighthouse"),
        ("ﬁn, ﬂag, oﬀ, oﬃce, baﬄe, faﬅ, caﬆ", "fin, flag, off, office, baffle, fast, cast"),
        ("ﻛﺘﺎﺏ ⼭", "كتاب 山"),
        ("\ufdfa", "\ufdfa"),  # 18 characters in NFKC
        ("10 m², ½ ® Ｗide é", "10 m², ½ ® Ｗide é"),
        (
            "می\u200cخواهم 👩\u200d🚀",
            "می\u200cخواهم 👩\u200d🚀",
        ),  # joiners that change what is read
        ("ខ្ញុំ\u200bស្រឡាញ់", "ខ្ញុំ\u200bស្រឡាញ់"),  # spaces of a language that shows none
    ],
)
def test_what_nobody_types_is_removed_or_spelt_out(text, cleaned):
    assert clean(text) == cleaned
    assert clean(cleaned) == cleaned


@pytest.mark.parametrize(
    ("text", "joined"),
    [
        ("a light-\nhouse by the har\N{HYPHEN}\n bour", "a lighthouse by the harbour"),
        ("a light- \n\nhouse", "a lighthouse"),
        (
            "Baden-\nBaden, 1914-\n18, x-\n- item, word -\nword",
            "Baden-\nBaden, 1914-\n18, x-\n- item, word -\nword",
        ),
    ],
)
def test_words_that_are_divided_at_line_ends_are_joined(text, joined):
    assert join_divided_words(text) == joined


def test_words_and_names_are_found_however_they_are_spelt(tmp_path):
    texts = ["the oﬃce of the har\u00adbour", "light\u200bhouses", "a bowl of soup"]
    items = [NewItem(str(row), text, fields={"title": text}) for row, text in enumerate(texts)]
    index = Index.create(tmp_path / "t.index", items, encoder="text:wordllama")
    assert [index.get(name).text for name in "012"] == [
        "the office of the harbour",
        "lighthouses",
        texts[2],
    ]
    for options in (
        {"match": "office harbour"},
        {"match": "oﬃce har\u00adbour"},
        {"where": ["text~harbour"]},
        {"where": ["title~har\u200bbour"]},
        {"where": {"text": "the office of the har\u00adbour"}},
    ):
        assert [hit.id for hit in index.search(**options)] == ["0"]
    plain, soft = (index.search(text)[0] for text in ("lighthouses", "light\u00adhouses"))
    assert (soft.id, soft.score) == (plain.id, plain.score) == ("1", plain.score)


def test_text_files_are_cleaned(tmp_path):
    (tmp_path / "a.md").write_text("an of\u00adﬁce\nto-\nday", encoding="utf-8")
    (tmp_path / "b.txt").write_text("\u200b\u2060", encoding="utf-8")
    scan = read_folder(tmp_path)
    assert [one.text for one in scan.candidates] == ["an office\nto-\nday"]
    assert [one.reason for one in scan.problems] == ["is a text without words"]
