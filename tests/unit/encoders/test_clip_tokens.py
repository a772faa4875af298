"""CLIP's tokens: the numbers that OpenAI's own tokenizer gives."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genius_search.encoders.clip_tokens import (
    CONTEXT,
    END,
    START,
    VOCABULARY,
    clean,
    stored_tokenizer,
    token_rows,
)

# Made once with the tokenizer of OpenAI's CLIP.
GOLDEN = [
    ("", [49406, 49407]),
    ("a cat", [49406, 320, 2368, 49407]),
    (
        "Caf\xe9 cr\xe8me br\xfbl\xe9e",
        [49406, 15304, 1075, 12138, 614, 711, 127, 119, 75, 13489, 49407],
    ),
    ("&lt;b&gt;AT&amp;amp;T&lt;/b&gt;", [49406, 283, 321, 285, 536, 261, 339, 34308, 321, 285, 49407]),
    ("l&#39;humanit\xc3\xa9", [49406, 331, 262, 3175, 529, 4166, 49407]),
    ("\U0001f600 \U0001f469\u200d\U0001f469\u200d\U0001f467", [49406, 7334, 26304, 26304, 964, 356, 49407]),
    (
        "\u4e2d\u6587 \u30c6\u30b9\u30c8 \ud55c\uad6d\uc5b4",
        [
            *[49406, 19759, 255, 29032, 485, 2429, 228, 32421, 486, 15197],
            *[250, 31871, 255, 31625, 368, 49407],
        ],
    ),
    ("it's THEY'RE don\u2019t", [49406, 585, 568, 889, 982, 847, 713, 49407]),
    ("1,000 \xbd \xb2", [49406, 272, 267, 271, 271, 271, 33613, 41175, 49407]),
    ("  a\t\nb\xa0c  ", [49406, 320, 321, 322, 49407]),
    (
        "_<|endoftext|>a <|EndOfText|> b",
        [49406, 62, 27, 347, 40786, 4160, 91, 285, 320, 49407, 321, 49407],
    ),
    (
        "supercalifragilisticexpialidocious",
        [49406, 1642, 2857, 13093, 2076, 5868, 26850, 835, 639, 38466, 49407],
    ),
]


@pytest.mark.parametrize(("text", "numbers"), GOLDEN)
def test_numbers_are_those_of_openai(text, numbers):
    row = token_rows([text])[0].tolist()
    assert row == numbers + [0] * (CONTEXT - len(numbers))


def test_broken_encodings_are_mended_before_entities_are_resolved_twice():
    assert clean("  sch\xc3\xb6n &amp;lt;  ") == "schön <"


@given(st.lists(st.text(max_size=40), max_size=5))
def test_every_row_starts_ends_and_does_not_depend_on_its_batch(texts):
    rows = token_rows(texts)
    for text, row in zip(texts, rows, strict=True):
        assert row[0] == START
        assert END in row
        assert int(row.max()) < VOCABULARY
        assert torch.equal(token_rows([text])[0], row)


def test_the_stored_tokenizer_has_the_whole_vocabulary_and_agrees_on_clean_texts():
    stored = stored_tokenizer()
    assert stored.get_vocab_size() == VOCABULARY
    numbers = stored.encode("A  red kite, 20 feet!").ids
    assert numbers == token_rows(["a red kite, 20 feet!"])[0, : len(numbers)].tolist()
    assert numbers[-1] == END
