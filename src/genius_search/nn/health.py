"""Health of IDs: code usage, collisions, purity of the modality level, reconstruction.

Quantizers that collapse unnoticed in training are the most common complaint about generative retrieval, so
this report is computed during training, stored with the model, and said at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float, Int

from genius_search.records import Modality

LOW_PURITY: Final = 0.95
HIGH_COLLISIONS: Final = 0.05
LOW_USE: Final = 0.25
LOW_RECONSTRUCTION: Final = 0.5


@dataclass(frozen=True, slots=True)
class Health:
    """Health of a quantizer on a set of candidates."""

    candidates: int
    collision_rate: float
    """Share of the candidates that share their ID with another one."""
    purity: float | None
    """Share of the candidates whose modality is the majority of their level-0 code; None without level 0."""
    level0_modality: tuple[str, ...]
    """Majority modality of each level-0 code; ``unknown`` if no candidate has the code."""
    reconstruction: float
    """Mean cosine between an embedding and the vector of its ID."""
    used: tuple[int, ...]
    """Number of codes of each level with at least one candidate."""
    problems: tuple[str, ...]
    """Problems found, one sentence each; empty if the IDs are healthy."""

    @property
    def verdict(self) -> str:
        """Summary in one line."""
        return "healthy" if not self.problems else "; ".join(self.problems)


def majority_modality(
    level0: Int[np.ndarray, " items"], modalities: Int[np.ndarray, " items"]
) -> Int[np.ndarray, " 3"]:
    """Return the most frequent modality of each level-0 code; −1 for a code that no item has."""
    counts = np.zeros((3, 3), dtype=np.int64)
    np.add.at(counts, (level0, modalities), 1)
    return np.where(counts.sum(axis=1) > 0, counts.argmax(axis=1), -1)


def examine(
    codes: Int[np.ndarray, "items levels"],
    modalities: Int[np.ndarray, " items"],
    reconstruction: Float[np.ndarray, " items"],
    *,
    sizes: tuple[int, ...],
    has_modality_level: bool,
) -> Health:
    """Report the health of IDs; ``reconstruction`` holds each candidate's cosine with its ID's vector."""
    counts = np.unique(codes, axis=0, return_counts=True)[1]
    purity = None
    names: tuple[str, ...] = ()
    if has_modality_level:
        majority = majority_modality(codes[:, 0], modalities)
        purity = float((majority[codes[:, 0]] == modalities).mean())
        labels = [modality.value for modality in Modality]
        names = tuple("unknown" if code < 0 else labels[code] for code in majority)
    used = tuple(len(np.unique(of_level)) for of_level in codes.T)
    collision_rate = float(counts[counts > 1].sum() / len(codes))
    cosine = float(reconstruction.mean())
    problems = []
    if purity is not None and purity < LOW_PURITY:
        problems.append(
            f"level 0 matches the modality of only {purity:.1%} of the candidates: train longer, or "
            'set quantizer.level0 to "assigned"'
        )
    if collision_rate > HIGH_COLLISIONS:
        problems.append(
            f"{collision_rate:.1%} of the candidates share their ID: more levels or larger codebooks "
            "are needed"
        )
    if cosine < LOW_RECONSTRUCTION:
        problems.append(f"IDs are poor approximations of embeddings (mean cosine {cosine:.2f}): train longer")
    problems += [
        f"level {level} uses {some} of {size} codes: smaller codebooks would do, or they collapsed"
        for level, (some, size) in enumerate(zip(used, sizes, strict=True))
        if level >= has_modality_level and some < LOW_USE * min(size, len(codes))
    ]
    return Health(len(codes), collision_rate, purity, names, cosine, used, tuple(problems))
