"""faiss's codes at no fewer bytes than our IDs, looking through about as many candidates.

An ID of the paper's sizes has 12.25 bytes of codes, and two bytes that follow from them: its marks
(:mod:`genius.models.marks`), which let ours rank by distance. Rivals rank by distance too, and have at least
as many bytes as all 14.25 (:mod:`genius.baselines.choices`).
"""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float32

from genius.baselines.choices import num_lists, pq_of, residual_of
from genius.baselines.dense import DenseIndex, build
from genius.baselines.kinds import IvfPq, Residual
from genius.bench.quality_ground import Batch, Ground
from genius.bench.quality_ways import HITS, Answered, Direct
from genius.models.marks import NUM_MARKS
from genius.stages.progress import Progress

NUMBER_BYTES: Final = 8
"""Of an item's number, which faiss keeps beside its code."""
EFFORTS: Final = (1, 2, 4, 8, 16, 32, 64)
"""Lists looked through, for a curve."""


class Rival(NamedTuple):
    """An index in lists."""

    name: str
    line: str
    """Its name in drawings."""
    dense: DenseIndex
    lists: int
    code_bytes: float
    build_seconds: float

    def at(self, lists: int) -> Direct:
        """Looking through so many lists."""

        def find(batch: Batch) -> Answered:
            return answered(self.dense, batch.fused.numpy(), lists)

        return Direct(
            f"{self.name}, {lists:,} of {self.lists:,} lists",
            self.line,
            find,
            self.code_bytes,
            self.code_bytes + NUMBER_BYTES,
            lists,
        )

    def efforts(self) -> list[int]:
        """Numbers of lists for a curve."""
        return [lists for lists in EFFORTS if lists <= self.lists]

    def touching(self, queries: Float32[np.ndarray, "queries dim"], wanted: float) -> Direct:
        """Looking through as many lists as hold about so many candidates for queries like these."""

        def touched(lists: int) -> float:
            return answered(self.dense, queries, lists).touched / len(queries)

        enough = 1
        while enough < self.lists and touched(enough) < wanted:
            enough = min(2 * enough, self.lists)
        fewer = range(enough // 2 + 1, enough + 1)
        more = fewer[min(bisect.bisect_left(fewer, wanted, key=touched), len(fewer) - 1)]
        chosen = min((max(more - 1, 1), more), key=lambda lists: abs(touched(lists) - wanted))
        return self.at(chosen)._replace(name=self.name)


def rivals(ground: Ground, *, seed: int, progress: Progress) -> Iterator[Rival]:
    """IVF-PQ and IVF residual quantizers, trained on the pool's own fused embeddings.

    That favours them: our codebooks were learned from the training pool. So does that a list's centroid
    explains a part of a vector and costs them no byte, where the first code of an ID is counted.
    """
    vectors = ground.fused.numpy()
    num_items, dim = vectors.shape
    num_bytes = math.ceil(ground.code_bytes + NUM_MARKS)
    product = pq_of(num_items=num_items, dim=dim, code_bytes=num_bytes)
    coarse = residual_of(num_items=num_items, code_bytes=num_bytes)
    fine = residual_of(num_items=num_items, code_bytes=num_bytes, is_fast=True)
    kinds: list[tuple[str, IvfPq | Residual, int]] = [
        ("IVF-PQ", product, product.parts),
        ("IVF-RQ", coarse, coarse.codebooks),
        ("IVF-RQ fast", fine, fine.codebooks),
    ]
    for short, kind, count in kinds:
        norm = "" if isinstance(kind, IvfPq) else " and a norm"
        name = f"faiss {short} ({count} × {kind.bits} bits{norm})"
        line = "IVF-PQ" if isinstance(kind, IvfPq) else "residual codes"
        progress.say(f"building {name}")
        began = time.process_time()
        dense = build(vectors, kind, seed=seed)
        took = time.process_time() - began
        yield Rival(name, line, dense, num_lists(num_items), kind.code_bytes, took)


def answered(index: DenseIndex, queries: Float32[np.ndarray, "queries dim"], lists: int) -> Answered:
    """Ask an index, and count what it compared."""
    index.set_effort(lists)
    counted = index.search_counting(queries, HITS)
    return Answered([items[items >= 0] for items in counted.found.items], counted.compared)
