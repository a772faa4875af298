"""The ways of searching one real pool that ``genius bench rivals`` compares, each behind one call."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from genius.baselines.dense import DenseIndex
from genius.baselines.dense import build as build_dense
from genius.baselines.kinds import Flat, Hnsw, IvfPq, Kind, Residual
from genius.baselines.routing import CodeRouter
from genius.bench.padding import PaddedPool
from genius.bench.stand_ins import Subject
from genius.config import SearchConfig
from genius.model import Genius
from genius.search.allowed import Part
from genius.search.beam import Beams, search
from genius.search.searcher import Evidence, rank_items
from genius.stages.progress import Progress

HITS: Final = 50
"""Asked of every method."""
HNSW_EFFORTS: Final = (16, 32, 64, 128, 256)
IVF_EFFORTS: Final = (1, 4, 16, 64)
ROUTES: Final = (1, 2, 4, 8, 16)
"""First codes that routing by geometry takes."""
SHALLOW: Final = ((1, 1000), (4, 1000), (10, 1000), (10, 4000), (50, 4000))
"""Beams and leaf budgets."""
SHORTLIST: Final = 100

Family = Literal["exact", "hnsw", "ivf-pq", "residual", "routing", "ours"]
FAMILIES: Final[tuple[Family, ...]] = ("exact", "hnsw", "ivf-pq", "residual", "routing", "ours")

Found = list[Int64[np.ndarray, " _"]]
"""Item rows of each query, best first."""


class Method(NamedTuple):
    """A way of searching, ready to answer."""

    name: str
    family: Family
    search: Callable[[Float[Tensor, "queries dim"]], Found]
    item_bytes: float
    """That grow with the pool, for each item."""
    fixed_bytes: float
    """That do not: weights, centroids, code vectors. The encoder, which all need, is in none."""
    build_seconds: float


def methods(
    model: Genius,
    subject: Subject,
    pool: PaddedPool,
    families: Sequence[str],
    table_seconds: float,
    *,
    seed: int,
    progress: Progress,
) -> Iterator[Method]:
    """Build what was asked for, one after the other.

    Parameters
    ----------
    table_seconds
        that our table took to build.
    """
    for kind, efforts in _dense_kinds(model, pool):
        family = _family(kind)
        if family in families:
            progress.say(f"building {kind}")
            began = time.process_time()
            index = build_dense(pool.vectors, kind, seed=seed)
            took = time.process_time() - began
            fixed = _fixed_bytes(kind, pool.vectors.shape[1])
            item_bytes = (index.num_bytes() - fixed) / len(pool)
            for effort in efforts:
                yield Method(
                    _name(kind, effort), family, _dense(index, effort), item_bytes, float(fixed), took
                )
    table = pool.table
    table_bytes = (table.nbytes + table.bucket_starts.nbytes + table.items.nbytes) / len(pool)
    code_bytes = 4.0 * model.dim * sum(subject.sizes)
    vector_bytes = 2.0 * model.dim
    ours = _Ours(subject, pool)
    if "routing" in families:
        router = CodeRouter(
            ours.parts, model.quantizer.tables(), has_modality_level=model.quantizer.has_modality_level
        )
        for beam in ROUTES:
            for rerank in ("codes", "embeddings"):
                config = SearchConfig(beam=beam, rerank=rerank)
                grows = table_bytes + (vector_bytes if rerank == "embeddings" else 0.0)
                yield Method(
                    f"nearest code vectors, {beam}, by {rerank}",
                    "routing",
                    ours.routed(router, config),
                    grows,
                    code_bytes,
                    table_seconds,
                )
    if "ours" in families:
        for name, config in _configs():
            grows = table_bytes + (vector_bytes if config.rerank == "embeddings" else 0.0)
            yield Method(
                name, "ours", ours.generated(config), grows, float(subject.fixed_bytes()), table_seconds
            )


def _configs() -> Iterator[tuple[str, SearchConfig]]:
    for rerank in ("none", "codes", "embeddings"):
        by = "" if rerank == "none" else f", by {rerank}"
        yield f"ours, beam 50, all levels{by}", SearchConfig(beam=50, rerank=rerank)
    for beam, leaves in SHALLOW:
        yield (
            f"ours, beam {beam}, {leaves:,} leaves, by codes",
            SearchConfig(beam=beam, leaves=leaves, rerank="codes"),
        )
        yield (
            f"ours, beam {beam}, {leaves:,} leaves, {SHORTLIST} by embeddings",
            SearchConfig(beam=beam, leaves=leaves, rerank="embeddings", shortlist=SHORTLIST),
        )


class _Ours:
    """Our table, searched in all ways; embeddings in 16 bits, as an index keeps them."""

    def __init__(self, subject: Subject, pool: PaddedPool) -> None:
        self.parts = [Part(pool.table)]
        self._subject = subject
        stored = pool.vectors.astype(np.float16)
        self._evidence = Evidence(subject.ranker, [lambda rows: torch.from_numpy(stored[rows]).float()])

    def generated(self, config: SearchConfig) -> Callable[[Float[Tensor, "queries dim"]], Found]:
        return lambda queries: self._ranked(
            search(self._subject.decoder, self.parts, queries, config), queries, config
        )

    def routed(
        self, router: CodeRouter, config: SearchConfig
    ) -> Callable[[Float[Tensor, "queries dim"]], Found]:
        return lambda queries: self._ranked(router.route(queries, beam=config.beam), queries, config)

    def _ranked(self, beams: Beams, queries: Float[Tensor, "queries dim"], config: SearchConfig) -> Found:
        return [
            rank_items(self.parts, beams, number, query, config=config, evidence=self._evidence, k=HITS).items
            for number, query in enumerate(queries)
        ]


def _dense_kinds(model: Genius, pool: PaddedPool) -> list[tuple[Kind, tuple[int | None, ...]]]:
    """The rivals, and the efforts each is tried with.

    Those of codes have as many bits an item as our packed IDs (``small``), or as our table (``wide``).
    """
    dim, most = pool.vectors.shape[1], max(1, len(pool) // 32)
    packed = math.ceil(sum(math.log2(size) for size in model.quantizer.sizes if size > 1) / 8)
    table = 2 * len(model.quantizer.sizes) + 4
    lists = min(1024, most)
    parts = [_divisor(dim, packed), _divisor(dim, table)]
    kinds: list[tuple[Kind, tuple[int | None, ...]]] = [
        (Flat(), (None,)),
        (Hnsw(), HNSW_EFFORTS),
        (Residual(codebooks=2 * packed), (None,)),
        (Residual(codebooks=2 * table), (None,)),
        (Residual(codebooks=2 * packed, lists=lists), IVF_EFFORTS),
    ]
    kinds += [(IvfPq(lists=lists, parts=count), IVF_EFFORTS) for count in dict.fromkeys(parts)]
    return kinds


def _divisor(dim: int, at_most: int) -> int:
    """The largest number of equal parts of a vector up to a limit."""
    return next(count for count in range(min(at_most, dim), 0, -1) if dim % count == 0)


def _family(kind: Kind) -> Family:
    match kind:
        case Flat():
            return "exact"
        case Hnsw():
            return "hnsw"
        case Residual():
            return "residual"
        case _:
            return "ivf-pq"


def _name(kind: Kind, effort: int | None) -> str:
    match kind:
        case Flat():
            return "exact"
        case Hnsw():
            return f"HNSW, efSearch {effort}"
        case Residual():
            size = f"{kind.codebooks * kind.bits / 8:g} bytes"
            lists = "" if effort is None else f", {effort} of {kind.lists} lists"
            return f"residual quantizer, {size}{lists}"
        case IvfPq():
            return f"IVF-PQ, {kind.parts * kind.bits // 8} bytes, {effort} of {kind.lists} lists"
        case _:
            return str(kind)


def _dense(index: DenseIndex, effort: int | None) -> Callable[[Float[Tensor, "queries dim"]], Found]:
    def find(queries: Float[Tensor, "queries dim"]) -> Found:
        if effort is not None:
            index.set_effort(effort)
        return [items[items >= 0] for items in index.search(queries.numpy(), HITS).items]

    return find


def _fixed_bytes(kind: Kind, dim: int) -> int:
    """Of centroids and code vectors, four bytes a number."""
    match kind:
        case IvfPq():
            return 4 * dim * (kind.lists + (1 << kind.bits))
        case Residual():
            return 4 * dim * ((kind.lists or 0) + kind.codebooks * (1 << kind.bits))
        case _:
            return 0
