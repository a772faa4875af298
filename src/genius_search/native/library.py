"""The compiled library: searches of ID tables, and the codes of items."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path
from typing import Final

from genius_search.native.build import FOLDER, VARIANTS, library

CODES: Final = 256
"""Most codes at a level."""
NO_MEMORY: Final = -2
"""Status of a function that had no memory."""


@cache
def open_library(folder: Path = FOLDER) -> ctypes.CDLL | None:
    """Open the library for this processor; return None, and log it, if there is none."""
    for variant in VARIANTS:
        path = library(variant, folder)
        if path.exists():
            opened = ctypes.CDLL(str(path))
            if opened.is_supported():
                pointer, integer = ctypes.c_void_p, ctypes.c_int64
                opened.make_work.restype = pointer
                opened.search.argtypes = (pointer, pointer, integer, *[pointer] * 3, integer, pointer)
                opened.nearest_sums.argtypes = (*[pointer] * 3, *[integer] * 3, pointer)
                opened.sum_by_code.argtypes = (pointer, pointer, integer, integer, pointer)
                opened.sum_by_code.restype = None
                return opened
    logging.getLogger(__name__).info(
        "the compiled library is missing; NumPy and PyTorch (extra train) replace it, a few times slower; "
        "`python -m genius_search.native.build` compiles it"
    )
    return None
