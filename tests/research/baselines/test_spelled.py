"""IDs of different lengths, and numbers spelled in codes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from research.baselines.ids import DIGITS, PIECES, pad, spell_digits, spell_pieces

COUNTS = st.integers(0, 10**8)


def test_short_ids_end_in_end_codes():
    assert pad([[3], [1, 2, 0], []], end=5).tolist() == [[3, 5, 5], [1, 2, 0], [5, 5, 5]]
    assert pad([[3], [1, 2]], end=5, levels=3).tolist() == [[3, 5, 5], [1, 2, 5]]


@given(st.lists(st.lists(st.integers(0, 4), max_size=4), unique_by=tuple, min_size=1))
def test_padding_keeps_different_ids_apart(rows):
    assert len(np.unique(pad(rows, end=5), axis=0)) == len(rows)


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
