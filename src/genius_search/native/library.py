"""The compiled library, opened."""

from __future__ import annotations

import ctypes
import logging
import os
from functools import cache
from pathlib import Path

from genius_search.native.build import FOLDER, VARIANTS, library


def count_cores() -> int:
    """Return the number of cores for a batch: all that this process may use, or ``OMP_NUM_THREADS``."""
    try:
        return int(os.environ["OMP_NUM_THREADS"])
    except (KeyError, ValueError):
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
                return opened
    logging.getLogger(__name__).info(
        "the compiled library is missing; NumPy and PyTorch replace it, and are a few times slower; "
        "`python -m genius_search.native.build` compiles it"
    )
    return None
