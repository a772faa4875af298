"""The ways of searching one real pool that ``genius bench rivals`` compares, each behind one call."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Literal, NamedTuple, assert_never

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from genius_search.config import SearchConfig
from genius_search.index.store import EmbeddingType, quantize
from genius_search.lab.baselines.dense import (
    NORM_BYTES,
    DenseIndex,
    Flat,
    Hnsw,
    Ivf,
    IvfPq,
    Kind,
    Refined,
    Residual,
    Stored,
)
from genius_search.lab.baselines.dense import build as build_dense
from genius_search.lab.baselines.routing import CodeRouter
from genius_search.lab.bench.stand_ins import PaddedPool, Subject
from genius_search.model import Genius
from genius_search.nn.density import NUM_EXTRA_COLUMNS
from genius_search.progress import Progress
from genius_search.search.beam import Beams, search
from genius_search.search.rank import Evidence, rank_items
from genius_search.search.table import Part

HITS: Final = 50
"""Asked of every method."""
HNSW_EFFORTS: Final = (16, 32, 64, 128, 256)
IVF_EFFORTS: Final = (1, 4, 16, 64)
WHOLE_EFFORTS: Final = (4, 16, 64)
"""Lists looked through where whole vectors are kept."""
ROUTES: Final = (1, 2, 4, 8, 16)
"""First codes that are taken when only their vectors tell."""
SHALLOW: Final = ((1, 1000), (4, 1000), (10, 1000), (10, 4000), (50, 4000))
"""Beams and leaf budgets."""
SHORTLIST: Final = 100
BITS: Final[dict[Stored, str]] = {"float32": "32-bit", "float16": "16-bit", "int8": "8-bit"}

Family = Literal["exact", "hnsw", "ivf", "ivf-pq", "residual", "routing", "ours"]
FAMILIES: Final[tuple[Family, ...]] = ("exact", "hnsw", "ivf", "ivf-pq", "residual", "routing", "ours")

Found = list[Int64[np.ndarray, " _"]]
"""Item rows of each query, best first."""


class Method(NamedTuple):
    """A way of searching, ready to answer."""

    name: str
    """Begins with :attr:`line`."""
    line: str
    """Its name in drawings, which all settings of a method share."""
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
        called = _called(kind)
        if called.family in families:
            progress.say(f"building {called.name}")
            began = time.process_time()
            index = build_dense(pool.vectors, kind, seed=seed)
            took = time.process_time() - began
            fixed = _fixed_bytes(kind, pool.vectors.shape[1])
            item_bytes = (index.num_bytes() - fixed) / len(pool)
            for effort in efforts:
                yield Method(
                    called.name + _setting(kind, effort),
                    called.line,
                    called.family,
                    _dense(index, effort),
                    item_bytes,
                    float(fixed),
                    took,
                )
    table = pool.table
    table_bytes = (table.nbytes + table.bucket_starts.nbytes + table.items.nbytes) / len(pool)
    code_bytes = 4.0 * model.dim * sum(subject.sizes)
    ours = _Ours(subject, pool)
    fixed_bytes = float(subject.fixed_bytes())
    if "routing" in families:
        router = CodeRouter(
            ours.parts, model.quantizer.tables(), has_modality_level=model.quantizer.has_modality_level
        )
        for beam in ROUTES:
            for way in _ways("nearest code vectors", SearchConfig(beam=beam)):
                yield Method(
                    f"{way.name}, {beam} codes",
                    way.line,
                    "routing",
                    ours.routed(router, way),
                    table_bytes + _vector_bytes(way.stored, model.dim),
                    code_bytes,
                    table_seconds,
                )
    if "ours" in families:
        for setting, way in _our_ways():
            yield Method(
                f"{way.name}, {setting}",
                way.line,
                "ours",
                ours.generated(way),
                table_bytes + _vector_bytes(way.stored, model.dim),
                fixed_bytes,
                table_seconds,
            )


class _Way(NamedTuple):
    """How what was found is ranked."""

    name: str
    line: str
    config: SearchConfig
    stored: EmbeddingType | None
    """How the vectors that it is ranked by are kept."""


def _ways(who: str, config: SearchConfig) -> Iterator[_Way]:
    """Rank by codes, and by vectors of either size."""
    by_codes, by_vectors = f"{who}, by codes", f"{who}, by vectors"
    yield _Way(by_codes, by_codes, dataclasses.replace(config, rerank="codes"), None)
    kinds: tuple[EmbeddingType, ...] = ("float16", "int8")
    for stored in kinds:
        yield _Way(
            f"{by_vectors} ({BITS[stored]})",
            by_vectors,
            dataclasses.replace(config, rerank="embeddings"),
            stored,
        )


def _our_ways() -> Iterator[tuple[str, _Way]]:
    plain = "ours, by probability"
    whole, setting = SearchConfig(beam=50), "beam 50, all levels"
    yield setting, _Way(plain, plain, whole, None)
    for way in _ways("ours", whole):
        yield setting, way
    for beam, leaves in SHALLOW:
        for way in _ways("ours", SearchConfig(beam=beam, candidates=leaves, shortlist=SHORTLIST)):
            yield f"beam {beam}, {leaves:,} leaves", way


def _vector_bytes(stored: EmbeddingType | None, dim: int) -> float:
    match stored:
        case None:
            return 0.0
        case "float16":
            return 2.0 * dim
        case "int8":
            return dim + 2.0  # a scale for each vector


class _Ours:
    """Our table, searched in all ways; embeddings as an index keeps them."""

    def __init__(self, subject: Subject, pool: PaddedPool) -> None:
        self.parts = [Part(pool.table)]
        self._subject = subject
        halves = pool.vectors.astype(np.float16)
        rounded = quantize(halves)

        def exactly(rows: Int64[np.ndarray, " rows"]) -> Float[Tensor, "rows dim"]:
            return torch.from_numpy(halves[rows]).float()

        def roughly(rows: Int64[np.ndarray, " rows"]) -> Float[Tensor, "rows dim"]:
            scales = rounded.scales[rows, None].astype(np.float32)
            return torch.from_numpy(rounded.values[rows] * scales)

        self._evidence = {
            None: Evidence(subject.ranker),
            "float16": Evidence(subject.ranker, [exactly]),
            "int8": Evidence(subject.ranker, [roughly]),
        }

    def generated(self, way: _Way) -> Callable[[Float[Tensor, "queries dim"]], Found]:
        return lambda queries: self._ranked(
            search(self._subject.decoder, self.parts, queries, way.config), queries, way
        )

    def routed(self, router: CodeRouter, way: _Way) -> Callable[[Float[Tensor, "queries dim"]], Found]:
        return lambda queries: self._ranked(router.route(queries, beam=way.config.beam), queries, way)

    def _ranked(self, beams: Beams, queries: Float[Tensor, "queries dim"], way: _Way) -> Found:
        evidence = self._evidence[way.stored]
        return [
            rank_items(self.parts, beams, number, query, config=way.config, evidence=evidence, k=HITS).items
            for number, query in enumerate(queries)
        ]


def _dense_kinds(model: Genius, pool: PaddedPool) -> list[tuple[Kind, tuple[int | None, ...]]]:
    """The rivals, and the efforts each is tried with.

    Those of codes have as many bits an item as our packed IDs with norm and density (``packed``), or as our
    table (``table``).
    What keeps whole vectors keeps them in 8 bits too, as our index can.
    """
    dim, most = pool.vectors.shape[1], max(1, len(pool) // 32)
    packed = math.ceil(sum(math.log2(size) for size in model.quantizer.sizes if size > 1) / 8)
    packed += NUM_EXTRA_COLUMNS
    table = 2 * (len(model.quantizer.sizes) + NUM_EXTRA_COLUMNS) + 4
    lists = min(1024, most)
    few, many = _divisor(dim, packed), _divisor(dim, table)
    refined = IvfPq(lists=lists, parts=many)
    kinds: list[tuple[Kind, tuple[int | None, ...]]] = [
        (Flat(), (None,)),
        (Flat(stored="int8"), (None,)),
        (Hnsw(), HNSW_EFFORTS),
        (Hnsw(stored="int8"), HNSW_EFFORTS),
        (Ivf(lists=lists, stored="int8"), WHOLE_EFFORTS),
        (Refined(base=refined), WHOLE_EFFORTS),
        (Refined(base=refined, stored="int8"), WHOLE_EFFORTS),
        (Residual(codebooks=2 * (packed - NORM_BYTES)), (None,)),
        (Residual(codebooks=2 * (table - NORM_BYTES)), (None,)),
        (Residual(codebooks=2 * (packed - NORM_BYTES), lists=lists), IVF_EFFORTS),
    ]
    kinds += [(IvfPq(lists=lists, parts=count), IVF_EFFORTS) for count in dict.fromkeys((few, many))]
    return kinds


def _divisor(dim: int, at_most: int) -> int:
    """The largest number of equal parts of a vector up to a limit."""
    return next(count for count in range(min(at_most, dim), 0, -1) if dim % count == 0)


class _Called(NamedTuple):
    line: str
    stored: str
    family: Family

    @property
    def name(self) -> str:
        return f"{self.line} ({self.stored})"


def _called(kind: Kind) -> _Called:
    match kind:
        case Flat():
            return _Called("exact search", f"{BITS[kind.stored]} vectors", "exact")
        case Hnsw():
            return _Called("HNSW", f"{BITS[kind.stored]} vectors", "hnsw")
        case Ivf():
            return _Called("IVF", f"{BITS[kind.stored]} vectors", "ivf")
        case IvfPq():
            return _Called("IVF-PQ", f"{kind.parts * kind.bits // 8} bytes", "ivf-pq")
        case Refined():
            return _Called("IVF-PQ refined", f"{BITS[kind.stored]} vectors", "ivf-pq")
        case Residual():
            return _Called("residual codes", f"{kind.code_bytes:g} bytes", "residual")
        case _:
            assert_never(kind)


def _setting(kind: Kind, effort: int | None) -> str:
    if effort is None:
        return ""
    if isinstance(kind, Hnsw):
        return f", efSearch {effort}"
    return f", {effort} list{'s' if effort > 1 else ''}"


def _dense(index: DenseIndex, effort: int | None) -> Callable[[Float[Tensor, "queries dim"]], Found]:
    def find(queries: Float[Tensor, "queries dim"]) -> Found:
        if effort is not None:
            index.set_effort(effort)
        return [items[items >= 0] for items in index.search(queries.numpy(), HITS).items]

    return find


def _fixed_bytes(kind: Kind, dim: int) -> int:
    """Of centroids, code vectors and ranges, four bytes a number."""
    ranges = 2 if isinstance(kind, Flat | Hnsw | Ivf | Refined) and kind.stored == "int8" else 0
    match kind:
        case Ivf():
            return 4 * dim * (kind.lists + ranges)
        case IvfPq():
            return 4 * dim * (kind.lists + (1 << kind.bits))
        case Refined():
            return _fixed_bytes(kind.base, dim) + 4 * dim * ranges
        case Residual():
            return 4 * dim * ((kind.lists or 0) + kind.codebooks * (1 << kind.bits))
        case Flat() | Hnsw():
            return 4 * dim * ranges
        case _:
            assert_never(kind)
