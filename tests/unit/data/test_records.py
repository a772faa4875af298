"""Ids: one text for each item, as M-BEIR writes it."""

from __future__ import annotations

import pytest

from genius_search.errors import BadData
from genius_search.records import format_text, instructed, parse_id


@pytest.mark.parametrize(
    "text",
    [
        *(
            "9:01",
            "09:1",
            "00:1",
            "9:00",
            "9",
            "9:",
            ":1",
            ":",
            "",
            "9:1:2",
            "9:x",
            "-9:1",
            "9:-1",
            "+9:1",
        ),
        *(
            " 9:1",
            "9:1 ",
            "9: 1",
            "9:1\n",
            "9:1_0",
            "9:1.0",
            "9:\u0661",
            "9:\uff11",
            "\u0969:1",
            "9:\u00b2",
        ),
        "9:" + "1" * 5_000,
    ],
)
def test_an_id_in_another_spelling_is_refused(text):
    with pytest.raises(BadData, match="without leading zeros"):
        parse_id(text)


@pytest.mark.parametrize(
    ("text", "formatted"),
    [
        (None, ""),
        ("", ""),
        (" ", ""),
        ("a cat", "A cat."),
        ("A cat?", "A cat?"),
        ('"quoted text"', "Quoted text."),
        ('end!"', "End!"),
        ("3 dogs", "3 dogs."),
        ("ünïcode", "Ünïcode."),
        ("a\r\nb", "A\nb."),
        ("…ellipsis…", "…ellipsis…."),
        ('" lead space"', " lead space."),
        (" lead space.", "Lead space."),
        ("ßa", "SSa."),
    ],
)
def test_texts_are_formatted_as_uniir_does(text, formatted):
    assert format_text(text) == formatted


@pytest.mark.parametrize(
    ("instruction", "text", "joined"),
    [
        (
            "find me an everyday image that matches the given caption",
            "a man on a moped",
            "Find me an everyday image that matches the given caption. a man on a moped.",
        ),
        ("Find a similar image?", None, "Find a similar image?"),
        (None, "a man", "A man."),
        (None, None, ""),
        ('"Quoted."', '"text"', 'Quoted. "text.'),
    ],
)
def test_an_instruction_is_joined_as_uniir_does(instruction, text, joined):
    assert instructed(instruction, text) == joined
