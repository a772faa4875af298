"""Schemes that give items their IDs: the protocol, and the residual quantizer as one of them.

A scheme turns embeddings (and texts, where it uses them) into rows of codes:

- *Spelled IDs* (GRACE's captions and numbers, DSI's digits) share one alphabet over all levels
  (``shares_codes``). Rows of codes have one length, so shorter IDs are padded with an end code, which is the
  largest code of every level; a level's ``sizes`` counts it.
- *Trees* (DSI, NCI, GRACE's structured IDs) cluster the training candidates in :meth:`~IdScheme.fit` and send
  later items down the tree to the nearest centroids in :meth:`~IdScheme.assign`.
- *Learned tokenizers* (IRGen) train on ``TrainingSet.pairs``; their checkpoints go to ``TrainingSet.folder``.
- *IDs unrelated to the item* (GRACE's numbers) know training candidates by ``Candidates.numbers`` and
  raise :class:`~genius_search.errors.UsageError` for others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int16, Int64, Integer
from torch import Tensor

from genius_search.config import TrainingConfig
from genius_search.nn.quantizer import Quantizer
from genius_search.progress import Progress

if TYPE_CHECKING:
    from genius_search.data.pairs import Pairs

KIND: Final = "ids"
RESIDUAL: Final = "residual"


class Candidates(NamedTuple):
    """Items that get IDs."""

    embeddings: Float[Tensor, "items dim"]
    """Fused unit vectors, on the CPU."""
    codes: Integer[np.ndarray, "items levels"]
    """IDs by the model's quantizer."""
    numbers: Int64[np.ndarray, " items"] | None = None
    """M-BEIR candidate ids as whole numbers, if the items have any; −1 for an item with another id."""
    texts: Sequence[str | None] | None = None
    """Texts of the items, if they are known; None for an item without one."""


class TrainingSet(NamedTuple):
    """Training data of an ID scheme."""

    candidates: Candidates
    """The training pool, in the order of its features."""
    queries: Float[Tensor, "queries dim"]
    """Embeddings of the training queries, 16-bit floats, in the order of their features."""
    query_numbers: Int64[np.ndarray, " queries"]
    """The query of each row; a query has a row for each of its instructions."""
    query_texts: Mapping[int, str]
    """Texts by number, of the queries that have one."""
    pairs: Pairs
    """Draws batches of rows of queries and candidates that belong together."""
    quantizer: Quantizer
    """Trained; its fusion network made the embeddings."""
    training: TrainingConfig
    """Settings for schemes that are trained by gradients; ``training.seed`` seeds every scheme."""
    folder: Path
    """Unfinished folder, for checkpoints and logs."""
    progress: Progress


@runtime_checkable
class IdScheme(Protocol):
    """A way to give items IDs."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of codes at each level, at most 32,767."""
        ...

    @property
    def shares_codes(self) -> bool:
        """Whether all levels use one alphabet, so that the generator learns one embedding for each code."""
        ...

    @property
    def has_modality_level(self) -> bool:
        """Whether the first code stands for the item's modality."""
        ...

    @classmethod
    def fit(cls, data: TrainingSet) -> IdScheme:
        """Learn a scheme from training data; the same data and seed give the same scheme."""
        ...

    @classmethod
    def load(cls, folder: Path, quantizer: Quantizer) -> IdScheme:
        """Read what :meth:`save` wrote. Only data: never pickle."""
        ...

    def save(self, folder: Path) -> None:
        """Write the scheme into a folder that exists."""
        ...

    def assign(self, candidates: Candidates) -> Int16[np.ndarray, "items levels"]:
        """Return the IDs of items, also of items that training did not see.

        Raises
        ------
        UsageError
            the scheme cannot give an ID to one of them.
        """
        ...

    def tables(self) -> list[Float[Tensor, "_ dim"]] | None:
        """Return the code vectors of each level, whose sum stands for an item; None without such vectors.

        Without them results are ordered by the generator's probabilities or by stored embeddings.
        """
        ...


class ResidualIds:
    """The IDs of the model's own quantizer; nothing is stored beside it."""

    shares_codes = False

    def __init__(self, quantizer: Quantizer) -> None:
        self._quantizer = quantizer
        self.sizes = quantizer.sizes
        self.has_modality_level = quantizer.has_modality_level

    @classmethod
    def fit(cls, data: TrainingSet) -> ResidualIds:
        """Return the scheme of a trained quantizer."""
        return cls(data.quantizer)

    @classmethod
    def load(cls, folder: Path, quantizer: Quantizer) -> ResidualIds:  # noqa: ARG003  has no files
        """Return the scheme of a quantizer."""
        return cls(quantizer)

    def save(self, folder: Path) -> None:
        """Write nothing: the quantizer has a folder of its own."""

    def assign(self, candidates: Candidates) -> Int16[np.ndarray, "items levels"]:
        """Return the quantizer's codes."""
        return candidates.codes.astype(np.int16)

    def tables(self) -> list[Float[Tensor, "_ dim"]]:
        """Return the codebooks."""
        return self._quantizer.tables()
