"""IDs of different lengths, and numbers spelled in codes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from genius_search.errors import UsageError
from genius_search.lab.baselines.ids import DIGITS, PIECES, pad, spell_digits, spell_pieces

COUNTS = st.integers(0, 10**8)


def test_short_ids_end_in_end_codes():
    assert pad([[3], [1, 2, 0], []], end=5).tolist() == [[3, 5, 5], [1, 2, 0], [5, 5, 5]]
    assert pad([[3], [1, 2]], end=5, levels=3).tolist() == [[3, 5, 5], [1, 2, 5]]


@given(st.lists(st.lists(st.integers(0, 4), max_size=4), unique_by=tuple, min_size=1))
def test_padding_keeps_different_ids_apart(rows):
    assert len(np.unique(pad(rows, end=5), axis=0)) == len(rows)


def test_codes_that_no_table_holds_and_ids_that_are_too_long_are_refused():
    with pytest.raises(UsageError, match="32767"):
        pad([[1]], end=32_768)
    with pytest.raises(UsageError, match="3 codes does not fit 2 levels"):
        pad([[1, 2, 3]], end=5, levels=2)


@given(COUNTS)
def test_digits_spell_the_number(number):
    assert "".join(map(str, spell_digits(number))) == str(number)
    assert max(spell_digits(number)) < DIGITS


@given(COUNTS, COUNTS)
def test_pieces_tell_numbers_apart_and_fit_their_alphabet(one, other):
    assert (spell_pieces(one) == spell_pieces(other)) == (one == other)
    assert len(spell_pieces(one)) == -(-len(str(one)) // 3)
    assert max(spell_pieces(one)) < PIECES


def test_a_piece_knows_its_length():
    assert spell_pieces(7) == [7]
    assert spell_pieces(1000) == [110 + 100, 0]
    assert spell_pieces(100_007) == [110 + 100, 110 + 7]
