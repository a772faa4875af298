"""faiss's codes at no fewer bytes than our IDs, looking through about as many candidates; and its graph.

An ID of the paper's sizes has 12.25 bytes of codes, and two bytes that follow from them: its marks
(:mod:`genius.models.marks`), which let ours rank by distance. Rivals rank by distance too, and have at least
as many bytes as all 14.25 (:mod:`genius.baselines.choices`). The graph (HNSW) keeps whole vectors and links:
it stands here for what time alone can buy.
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
from genius.baselines.kinds import Hnsw, IvfPq, Residual
from genius.bench.quality_ground import Batch, Ground
from genius.bench.quality_ways import HITS, Answered, Direct
from genius.models.marks import NUM_MARKS
from genius.stages.progress import Progress

NUMBER_BYTES: Final = 8
"""Of an item's number, which faiss keeps beside its code."""
EFFORTS: Final = (1, 2, 4, 8, 16, 32, 64)
"""Lists looked through, for a curve."""
HNSW_EFFORTS: Final = (64, 128, 256, 512)
"""Nodes in view, for a curve; never fewer than the hits that are asked for."""


class Rival(NamedTuple):
    """An index of faiss's, which looks at more for more time."""

    name: str
    line: str
    """Its name in drawings."""
    dense: DenseIndex
    most: int
    """Of its lists there are so many; so many of its nodes are in view at most."""
    code_bytes: float
    stored_bytes: float
    build_seconds: float

    @property
    def is_graph(self) -> bool:
        """Nodes, not lists."""
        return isinstance(self.dense.kind, Hnsw)

    def at(self, effort: int) -> Direct:
        """Looking through so many lists, or at so many nodes."""

        def find(batch: Batch) -> Answered:
            return answered(self.dense, batch.fused.numpy(), effort)

        return Direct(
            f"{self.name}, {effort:,} {'nodes' if self.is_graph else f'of {self.most:,} lists'}",
            self.line,
            find,
            self.code_bytes,
            self.stored_bytes,
            0 if self.is_graph else effort,
        )

    def efforts(self) -> list[int]:
        """Numbers of lists, or nodes, for a curve."""
        return [effort for effort in (HNSW_EFFORTS if self.is_graph else EFFORTS) if effort <= self.most]

    def touching(self, queries: Float32[np.ndarray, "queries dim"], wanted: float) -> Direct:
        """Looking through as many lists as hold about so many candidates for queries like these."""

        def touched(effort: int) -> float:
            return answered(self.dense, queries, effort).touched / len(queries)

        enough = 1
        while enough < self.most and touched(enough) < wanted:
            enough = min(2 * enough, self.most)
        fewer = range(enough // 2 + 1, enough + 1)
        more = fewer[min(bisect.bisect_left(fewer, wanted, key=touched), len(fewer) - 1)]
        chosen = min((max(more - 1, 1), more), key=lambda lists: abs(touched(lists) - wanted))
        return self.at(chosen)._replace(name=self.name)


def rivals(ground: Ground, *, seed: int, progress: Progress) -> Iterator[Rival]:
    """IVF-PQ and IVF residual quantizers, trained on the pool's own fused embeddings, and a graph of them.

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
        size = kind.code_bytes
        yield Rival(name, line, dense, num_lists(num_items), size, size + NUMBER_BYTES, took)
    progress.say("building faiss HNSW")
    began = time.process_time()
    graph = build(vectors, Hnsw(), seed=seed)
    took = time.process_time() - began
    size = float(dim * vectors.itemsize)
    yield Rival("faiss HNSW", "HNSW", graph, max(HNSW_EFFORTS), size, graph.bytes_per_item(), took)


def answered(index: DenseIndex, queries: Float32[np.ndarray, "queries dim"], lists: int) -> Answered:
    """Ask an index, and count what it compared."""
    index.set_effort(lists)
    counted = index.search_counting(queries, HITS)
    return Answered([items[items >= 0] for items in counted.found.items], counted.compared)
