"""A pool in memory, for as long as a program runs: IDs, and embeddings where they are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float16, Float32, Int, Int16, Int64, UInt8
from torch import Tensor

from genius.data.records import Modality
from genius.errors import BadData, UsageError
from genius.evaluation.qrels import some
from genius.evaluation.runs import falling
from genius.search.table import IdTable


class MemoryPool(NamedTuple):
    """Candidates by row, and the ID table over them."""

    ids: list[str]
    codes: Int16[np.ndarray, "items columns"]
    """Of the IDs, then their marks."""
    typicality: Float32[np.ndarray, " items"]
    embeddings: Float16[np.ndarray, "items dim"] | None
    densities: UInt8[np.ndarray, " items"] | None
    """How crowded it is around each, beside fused embeddings."""
    usual: Modality
    """The most frequent modality."""
    left_out: frozenset[str]
    """Candidates that cannot be found, because they have no content."""
    rows: Mapping[str, int]
    """Id -> row."""
    table: IdTable

    def vectors(self, items: slice | Int64[np.ndarray, " items"]) -> Float[Tensor, "items dim"]:
        """Embeddings of item rows."""
        if self.embeddings is None:
            raise UsageError("this pool was made without embeddings")
        return torch.from_numpy(self.embeddings[items]).float()

    def hits(
        self, items: Int64[np.ndarray, " hits"], scores: Float32[np.ndarray, " hits"]
    ) -> dict[str, float]:
        """Candidate -> score, in the order given, whatever sorts them again."""
        return {self.ids[item]: float(score) for item, score in zip(items, falling(scores), strict=True)}

    def part(self, ids: Sequence[str]) -> MemoryPool:
        """Some of its candidates, each once; those that were left out are passed over.

        Raises
        ------
        BadData
            one was never here.
        """
        unknown = [did for did in ids if did not in self.rows and did not in self.left_out]
        if unknown:
            raise BadData(f"{len(unknown)} candidates to rank are not in the corpus: {some(unknown)}")
        rows = np.array([self.rows[did] for did in dict.fromkeys(ids) if did in self.rows], dtype=np.int64)
        codes, typicality = self.codes[rows], self.typicality[rows]
        return self._replace(
            ids=[self.ids[row] for row in rows],
            codes=codes,
            typicality=typicality,
            embeddings=None if self.embeddings is None else self.embeddings[rows],
            densities=None if self.densities is None else self.densities[rows],
            rows={self.ids[row]: place for place, row in enumerate(rows)},
            table=IdTable.build(codes, typicality),
        )


class MemoryPoolWriter:
    """Fills a pool batch by batch, in arrays that are made once.

    Parameters
    ----------
    size
        the most candidates there can be.
    dim
        width of the embeddings; None keeps none.
    """

    def __init__(self, size: int, *, levels: int, dim: int | None) -> None:
        self._rows: dict[str, int] = {}
        self._left_out: list[str] = []
        self._counts = dict.fromkeys(Modality, 0)
        self._codes = np.zeros((size, levels), dtype=np.int16)
        self._typicality = np.zeros(size, dtype=np.float32)
        self._embeddings = None if dim is None else np.zeros((size, dim), dtype=np.float16)
        self._densities: list[np.ndarray] = []

    def add(
        self,
        ids: Sequence[str],
        modalities: Sequence[Modality],
        codes: Int[Tensor, "items columns"],
        typicality: Float[Tensor, " items"],
        embeddings: Float[Tensor, "items dim"],
        densities: UInt8[Tensor, " items"] | None = None,
    ) -> None:
        """Add candidates; their embeddings are kept if the pool keeps any, densities if all have them.

        Raises
        ------
        BadData
            one of them is here already.
        """
        here = slice(len(self._rows), len(self._rows) + len(ids))
        self._rows.update(zip(ids, range(here.start, here.stop), strict=True))
        if len(self._rows) < here.stop:
            raise BadData(f"a candidate's id occurs twice in the corpus, in {some(list(ids))}")
        for modality in modalities:
            self._counts[modality] += 1
        self._codes[here] = codes.numpy()
        self._typicality[here] = typicality.numpy()
        if self._embeddings is not None:
            self._embeddings[here] = embeddings.numpy()
        if densities is not None:
            self._densities.append(densities.numpy())

    def leave_out(self, ids: Sequence[str]) -> None:
        """Remember candidates that have no content."""
        self._left_out += ids

    def finish(self) -> MemoryPool:
        """The pool.

        Raises
        ------
        BadData
            it is empty.
        """
        size = len(self._rows)
        if not size:
            raise BadData(f"no candidate has any content ({len(self._left_out)} were given)")
        codes, typicality = self._codes[:size], self._typicality[:size]
        densities = np.concatenate([np.zeros(0, dtype=np.uint8), *self._densities])
        return MemoryPool(
            ids=list(self._rows),
            codes=codes,
            typicality=typicality,
            embeddings=None if self._embeddings is None else self._embeddings[:size],
            densities=densities if len(densities) == size else None,
            usual=max(self._counts, key=lambda modality: self._counts[modality]),
            left_out=frozenset(self._left_out),
            rows=self._rows,
            table=IdTable.build(codes, typicality),
        )
