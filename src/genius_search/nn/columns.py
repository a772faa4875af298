"""Half norm and density of IDs as an index stores them: two columns after the codes, a byte each."""

from __future__ import annotations

from typing import Final

import numpy as np
from jaxtyping import Float32, Integer

NUM_EXTRA_COLUMNS: Final = 2
"""Columns stored after an ID's codes: half norm, density."""
LARGEST: Final = 255
"""Largest stored value; each number takes one byte."""
HALF_NORM_STEPS: Final = 160
"""Steps from 0 to 1: half norms up to 1.59 (|v|² = 3.19) with an error of at most 1/320."""
DENSITY_STEPS: Final = LARGEST
"""Steps from 0 to 1, with an error of at most 1/510; negative densities are stored as 0. Where IDs begin with
a modality code, densities differ by hundredths only, hence the short steps."""


def decode_half_norms(stored: Integer[np.ndarray, " ids"]) -> Float32[np.ndarray, " ids"]:
    """Decode half norms from the bytes stored in an index."""
    return np.asarray(stored / np.float32(HALF_NORM_STEPS), dtype=np.float32)


def decode_densities(stored: Integer[np.ndarray, " ids"]) -> Float32[np.ndarray, " ids"]:
    """Decode densities, of IDs or items, from the bytes stored in an index."""
    return np.asarray(stored / np.float32(DENSITY_STEPS), dtype=np.float32)
