"""IDs of different lengths in a table of equal ones, and numbers spelled in codes (GRACE, DSI).

What ends early is filled up with an end code, so no ID is the beginning of another and everything that works
on tables of codes works on these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from jaxtyping import Int16

from genius.errors import UsageError
from genius.search.table import LARGEST_CODE

DIGITS: Final = 10
PIECE_DIGITS: Final = 3
"""Digits that a language model's tokenizer takes together."""
PIECES: Final = sum(DIGITS**length for length in range(1, PIECE_DIGITS + 1))
"""Different pieces of one to three digits, leading zeros counting: ``7``, ``07`` and ``007`` are three."""


def padded(rows: Sequence[Sequence[int]], *, end: int, levels: int = 0) -> Int16[np.ndarray, "items levels"]:
    """Rows of codes, filled up with the end code to the longest, or to so many levels.

    A row that takes all levels has no end code and needs none.

    Raises
    ------
    UsageError
        the end code, which is the largest, is more than a table holds; or a row is longer than ``levels``.
    """
    longest = max((len(row) for row in rows), default=0)
    if end > LARGEST_CODE:
        raise UsageError(f"{end} codes and an end code do not fit a table, which holds {LARGEST_CODE}")
    if levels and longest > levels:
        raise UsageError(f"an ID of {longest} codes does not fit {levels} levels")
    codes = np.full((len(rows), levels or max(1, longest)), end, dtype=np.int16)
    for row, given in zip(codes, rows, strict=True):
        row[: len(given)] = given
    return codes


def digits_of(number: int) -> list[int]:
    """A number's decimal digits: one code for each (GRACE's numeric IDs)."""
    return [int(digit) for digit in str(number)]


def pieces_of(number: int) -> list[int]:
    """A number cut from the left into pieces of three digits (GRACE's string IDs).

    A piece's code tells its length too: that many digits, leading zeros included.
    """
    text = str(number)
    parts = [text[start : start + PIECE_DIGITS] for start in range(0, len(text), PIECE_DIGITS)]
    return [sum(DIGITS**shorter for shorter in range(1, len(part))) + int(part) for part in parts]


def numbers(count: int, *, seed: int) -> list[int]:
    """A number for each item, dealt out at random: it says nothing of the item, nor of its neighbours."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return [int(number) for number in order]
