"""The kinds of dense index that a table compares, and how faiss is told to make each.

Those that keep whole vectors rank by inner product. Those that keep codes rank by distance: the vector that
codes stand for is no unit vector, and by inner product the long ones would win (:mod:`genius.models.marks`
says it of ours). Where embeddings lie in a cone, that finds much more at as many bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, assert_never

from genius.baselines.needs import imported
from genius.errors import UsageError

Stored = Literal["float32", "float16", "int8"]
"""How an index that keeps whole vectors keeps them."""
SMALL_BITS: Final = 4
"""Codes of so many bits are compared in registers, sixteen at a time (faiss's fast scan)."""
NORM_BYTES: Final = 1
"""Of an item's norm beside its residual codes: one number of 8 bits, or two codes of 4 for the fast scan."""


@dataclass(frozen=True, kw_only=True)
class Flat:
    """Compare with every item: exact, but for how vectors are kept."""

    stored: Stored = "float32"


@dataclass(frozen=True, kw_only=True)
class Hnsw:
    """A graph of near neighbours."""

    links: int = 32
    """Of each item (twice as many at the lowest layer)."""
    build_effort: int = 40
    """Nodes kept in view while an item is put in its place (efConstruction)."""
    effort: int = 64
    """Nodes kept in view while searching (efSearch)."""
    stored: Stored = "float32"


@dataclass(frozen=True, kw_only=True)
class Ivf:
    """Whole vectors in lists, each under a centroid."""

    lists: int = 1024
    effort: int = 16
    """Lists looked through (nprobe)."""
    stored: Stored = "float32"


@dataclass(frozen=True, kw_only=True)
class IvfPq:
    """Lists as in :class:`Ivf`, of vectors cut into parts with a code for each."""

    lists: int = 1024
    parts: int = 12
    bits: int = 8
    """Of a part's code; with 4, twice the parts take the same bytes and are searched faster."""
    effort: int = 16

    @property
    def code_bytes(self) -> float:
        """Of an item."""
        return self.parts * self.bits / 8


@dataclass(frozen=True, kw_only=True)
class Residual:
    """Residual codes, as our IDs are, and a norm, ranked by look-ups: with the defaults 13 bytes an item.

    In lists or, without, all compared. In lists faiss keeps 8 bytes more, each item's number. Products of a
    query with code vectors give distances only together with the norm of what the codes stand for, so that
    is kept, as our IDs keep it.
    """

    codebooks: int = 24
    bits: int = SMALL_BITS
    """Of a code; 12 codebooks of 8 bits are closer to the vectors, but slow to search."""
    lists: int | None = None
    effort: int = 16
    width: int = 1
    """Codes tried side by side while a vector is encoded (a beam); more is closer to the vector."""

    @property
    def code_bytes(self) -> float:
        """Of an item, its norm included."""
        return self.codebooks * self.bits / 8 + NORM_BYTES


@dataclass(frozen=True, kw_only=True)
class Refined:
    """Codes in lists choose, and whole vectors kept beside them rank what was chosen."""

    base: IvfPq
    stored: Stored = "float16"
    factor: int = 4
    """Items ranked by their vectors, for each one asked for (k_factor)."""

    @property
    def effort(self) -> int:
        """Lists looked through."""
        return self.base.effort


Kind = Flat | Hnsw | Ivf | IvfPq | Refined | Residual


def has_effort(kind: Kind) -> bool:
    """Whether recall can be bought with time; the others always look at every item."""
    return not isinstance(kind, Flat) and not (isinstance(kind, Residual) and kind.lists is None)


def ranks_by_distance(kind: Kind) -> bool:
    """Whether what faiss returns are squared distances, the lowest first."""
    return isinstance(kind, IvfPq | Refined | Residual)


def leaves_query_out(kind: Kind) -> bool:
    """Whether the query's own squared norm is missing from these distances: the fast scan of residuals."""
    return isinstance(kind, Residual) and kind.bits == SMALL_BITS


def check(kind: Kind, *, num_training: int, dim: int) -> None:
    """Refuse what faiss cannot make of vectors of this width, so many of them to train on.

    Raises
    ------
    UsageError
        says which setting does not fit.
    """
    if isinstance(kind, Refined):
        kind = kind.base
    if isinstance(kind, IvfPq) and dim % kind.parts:
        raise UsageError(f"parts={kind.parts} does not divide vectors of {dim} numbers; choose another")
    lists = kind.lists if isinstance(kind, Ivf | IvfPq | Residual) else None
    codes = 1 << kind.bits if isinstance(kind, IvfPq | Residual) else 0
    needed = max(lists or 0, codes)
    if num_training < needed:
        raise UsageError(
            f"{kind} needs {needed} vectors or more to train on, these are {num_training}; "
            "take fewer lists or bits, or more vectors"
        )


def empty_index(kind: Kind, dim: int) -> Any:
    """An index of this kind, untrained and without items, as faiss makes it."""
    faiss = imported("faiss")
    metric = faiss.METRIC_L2 if ranks_by_distance(kind) else faiss.METRIC_INNER_PRODUCT
    match kind:
        case Flat():
            return _flat(faiss, kind.stored, dim, metric)
        case Hnsw():
            if kind.stored == "float32":
                index = faiss.IndexHNSWFlat(dim, kind.links, metric)
            else:
                index = faiss.IndexHNSWSQ(dim, _scalar(faiss, kind.stored), kind.links, metric)
            index.hnsw.efConstruction = kind.build_effort
            return index
        case Ivf():
            centroids = faiss.IndexFlatIP(dim)
            if kind.stored == "float32":
                index = faiss.IndexIVFFlat(centroids, dim, kind.lists, metric)
            else:
                scalar = _scalar(faiss, kind.stored)
                index = faiss.IndexIVFScalarQuantizer(centroids, dim, kind.lists, scalar, metric)
            return _quiet(index, centroids)
        case IvfPq():
            centroids = faiss.IndexFlatL2(dim)
            make = faiss.IndexIVFPQFastScan if kind.bits == SMALL_BITS else faiss.IndexIVFPQ
            return _quiet(make(centroids, dim, kind.lists, kind.parts, kind.bits, metric), centroids)
        case Refined():
            base, vectors = empty_index(kind.base, dim), _flat(faiss, kind.stored, dim, metric)
            index = faiss.IndexRefine(base, vectors)
            base.this.disown()
            vectors.this.disown()
            index.own_fields = index.own_refine_index = True
            index.k_factor = float(kind.factor)
            return index
        case Residual():
            return _residual(faiss, kind, dim, metric)
        case _:
            assert_never(kind)


def _flat(faiss: Any, stored: Stored, dim: int, metric: int) -> Any:
    if stored == "float32":
        return faiss.IndexFlat(dim, metric)
    return faiss.IndexScalarQuantizer(dim, _scalar(faiss, stored), metric)


def _residual(faiss: Any, kind: Residual, dim: int, metric: int) -> Any:
    # faiss decodes every item it looks at unless told to add look-ups, with norms that are kept.
    is_small, quantizer = kind.bits == SMALL_BITS, faiss.AdditiveQuantizer
    by_look_ups = quantizer.ST_norm_rq2x4 if is_small else quantizer.ST_norm_qint8
    if kind.lists is None:
        make = faiss.IndexResidualQuantizerFastScan if is_small else faiss.IndexResidualQuantizer
        index = make(dim, kind.codebooks, kind.bits, metric, by_look_ups)
    else:
        centroids = faiss.IndexFlatL2(dim)
        make = faiss.IndexIVFResidualQuantizerFastScan if is_small else faiss.IndexIVFResidualQuantizer
        index = make(centroids, dim, kind.lists, kind.codebooks, kind.bits, metric, by_look_ups)
        index = _quiet(index, centroids)
    index.rq.max_beam_size = kind.width
    index.rq.use_beam_LUT = int(kind.width > 1)
    index.rq.train_type = faiss.ResidualQuantizer.Train_default
    return index


def _quiet(index: Any, centroids: Any) -> Any:
    """Let the index own its centroids, and be silent about small samples."""
    centroids.this.disown()
    index.own_fields = True
    index.cp.min_points_per_centroid = 1
    return index


def _scalar(faiss: Any, stored: Stored) -> Any:
    quantizer = faiss.ScalarQuantizer
    return quantizer.QT_fp16 if stored == "float16" else quantizer.QT_8bit
