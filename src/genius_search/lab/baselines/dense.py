"""The paper's dense rivals by name, with sizes that follow from the pool and from the bytes of an item.

Codes take at least as many bytes as they are given: residual codes exactly so many, one of them for the norm,
PQ the next number of parts that divides a vector.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Final, Literal, NamedTuple, assert_never, get_args

import numpy as np
from jaxtyping import Float, Float32

from genius_search.errors import MissingExtra, UsageError
from genius_search.search.rank import Nearest


def imported(name: Literal["faiss", "transformers"]) -> ModuleType:
    """The package of this name.

    Raises
    ------
    MissingExtra
        it is not installed; names the extra that has it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingExtra(
            f"this rival needs {name}, which cannot be imported ({error}): "
            "pip install 'genius-retrieval[bench]'"
        ) from error


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


ADDED_AT_ONCE: Final = 65_536
"""Vectors turned into float32 at a time, so that a memory-mapped half-precision array can be given."""
NOTHING: Final = -1
"""Stands in for an item where an approximate index found fewer than were asked for."""


class Counted(NamedTuple):
    """What a search found, and what it took."""

    found: Nearest
    compared: int
    """Items that were compared, of all queries together."""


class DenseIndex:
    """A built index.

    Parameters
    ----------
    index
        faiss's own object.
    kind
        what it was built as.
    """

    def __init__(self, index: Any, kind: Kind) -> None:
        self._index = index
        self.kind = kind

    def __len__(self) -> int:
        return int(self._index.ntotal)

    def search(self, queries: Float32[np.ndarray, "queries dim"], k: int) -> Nearest:
        """The ``k`` items nearest to each unit vector, best first; −1 (and −inf) where it found fewer."""
        size = min(k, len(self))
        if not size:
            return Nearest(np.zeros((len(queries), 0), np.int64), np.zeros((len(queries), 0), np.float32))
        scores, items = self._index.search(np.ascontiguousarray(queries), size)
        if ranks_by_distance(self.kind):
            scores = 1 - (scores + leaves_query_out(self.kind)) / 2
        return Nearest(items.astype(np.int64, copy=False), np.where(items == NOTHING, -np.inf, scores))

    def search_counting(self, queries: Float32[np.ndarray, "queries dim"], k: int) -> Counted:
        """The same, and how many items were compared: of HNSW every node that was looked at."""
        if not has_effort(self.kind):
            return Counted(self.search(queries, k), len(queries) * len(self))
        counts = imported("faiss").cvar
        counts = counts.hnsw_stats if isinstance(self.kind, Hnsw) else counts.indexIVF_stats
        counts.reset()
        found = self.search(queries, k)
        return Counted(found, int(counts.ndis))

    def set_effort(self, effort: int) -> None:
        """Trade time for recall: how many nodes HNSW keeps in view, or how many lists are looked through.

        More lists than there are means all: told of more, faiss's fast scan (1.15.1) returns wrong items.

        Raises
        ------
        UsageError
            this kind always looks at everything.
        """
        if not has_effort(self.kind):
            raise UsageError(f"{self.kind} looks at every item; it has no effort to set")
        if isinstance(self.kind, Hnsw):
            self._index.hnsw.efSearch = effort
        elif isinstance(self.kind, Refined):
            base = imported("faiss").downcast_index(self._index.base_index)
            base.nprobe = min(effort, base.nlist)
        else:
            self._index.nprobe = min(effort, self._index.nlist)

    def num_bytes(self) -> int:
        """Bytes of the index as faiss writes it, counted without holding them."""
        counted = 0

        def count(part: bytes) -> int:
            nonlocal counted
            counted += len(part)
            return len(part)

        faiss = imported("faiss")
        writer = faiss.BufferedIOWriter(faiss.PyCallbackIOWriter(count))
        faiss.write_index(self._index, writer)
        del writer  # hands over what it still holds
        return counted

    def bytes_per_item(self) -> float:
        """The same for each item; what is paid once (centroids, code vectors) is spread over them."""
        return self.num_bytes() / max(1, len(self))


class Fitted:
    """A kind that has learned its centroids and code vectors; it makes an index of any vectors.

    Parameters
    ----------
    empty
        faiss's own object, trained and without items.
    kind
        what it was made as.
    """

    def __init__(self, empty: Any, kind: Kind) -> None:
        self._empty = empty
        self.kind = kind

    def index(self, vectors: Float[np.ndarray, "items dim"]) -> DenseIndex:
        """Index these vectors, of any float type; item rows are their rows. They may be memory-mapped."""
        index = imported("faiss").clone_index(self._empty)
        for start in range(0, len(vectors), ADDED_AT_ONCE):
            index.add(np.ascontiguousarray(vectors[start : start + ADDED_AT_ONCE], dtype=np.float32))
        built = DenseIndex(index, self.kind)
        if not isinstance(self.kind, Flat) and has_effort(self.kind):
            built.set_effort(self.kind.effort)
        return built


def fit(
    vectors: Float[np.ndarray, "items dim"], kind: Kind, *, training_items: int = 65_536, seed: int = 0
) -> Fitted:
    """Learn what a kind needs from vectors like those that will be indexed.

    Parameters
    ----------
    vectors
        of any float type; may be memory-mapped.
    training_items
        centroids and code vectors are learned from at most so many vectors, drawn with ``seed``.

    Raises
    ------
    UsageError
        the kind does not fit the vectors: too few to train on, or a width its parts do not divide.
    MissingExtra
        faiss is not installed.
    """
    num_items, dim = vectors.shape
    check(kind, num_training=min(num_items, training_items), dim=dim)
    index = empty_index(kind, dim)
    if not index.is_trained:
        chosen = np.sort(np.random.default_rng(seed).permutation(num_items)[:training_items])
        index.train(vectors[chosen].astype(np.float32))
    return Fitted(index, kind)


def build(
    vectors: Float[np.ndarray, "items dim"], kind: Kind, *, training_items: int = 65_536, seed: int = 0
) -> DenseIndex:
    """Index vectors by a kind that is fitted on themselves. Raises as :func:`fit` does."""
    return fit(vectors, kind, training_items=training_items, seed=seed).index(vectors)


def use_threads(num_threads: int) -> None:
    """Let faiss use so many threads, from now on, in the whole process."""
    imported("faiss").omp_set_num_threads(num_threads)


DenseName = Literal["exact", "hnsw", "ivf-pq", "ivf-rq"]

ITEMS_A_LIST: Final = 32
MOST_LISTS: Final = 1024
WIDTH: Final = 4
"""Codes that the residual quantizer tries side by side for each level of an item."""
CODE_BITS: Final = 8


def kinds_of(text: str) -> tuple[DenseName, ...]:
    """``exact,hnsw`` as a tuple; ``all`` is every kind.

    Raises
    ------
    UsageError
        a name is no kind, or stands there twice.
    """
    known: tuple[DenseName, ...] = get_args(DenseName)
    if text == "all":
        return known
    names = [name.strip() for name in text.split(",")]
    kinds = tuple(kind for name in names for kind in known if kind == name)
    if len(kinds) < len(names) or len(set(kinds)) < len(kinds):
        raise UsageError(
            f"--kinds {text!r}: expected some of {', '.join(known)}, each once with commas between, or all"
        )
    return kinds


def dense_kind(
    name: DenseName, *, num_items: int, num_training: int, dim: int, code_bytes: int, effort: int
) -> Kind:
    """The kind of this name for a pool of so many items.

    Parameters
    ----------
    num_training
        vectors that there are to learn from: no more lists, and no more codes, can be learned.
    code_bytes
        of an item, where codes are kept. Exact search and HNSW keep vectors in 16 bits, as features are.
    effort
        nodes that HNSW keeps in view, lists of the others that are looked through.
    """
    match name:
        case "exact":
            return Flat(stored="float16")
        case "hnsw":
            return Hnsw(stored="float16", effort=effort)
        case "ivf-pq":
            product = pq_of(num_items=num_items, dim=dim, code_bytes=code_bytes, effort=effort)
            return replace(
                product, lists=min(product.lists, num_training), bits=_fewer(product, num_training)
            )
        case "ivf-rq":
            residual = residual_of(num_items=num_items, code_bytes=code_bytes, effort=effort)
            lists = min(num_lists(num_items), num_training)
            return replace(residual, lists=lists, bits=_fewer(residual, num_training))
        case _:
            assert_never(name)


def pq_of(*, num_items: int, dim: int, code_bytes: int, effort: int = IvfPq.effort) -> IvfPq:
    """IVF-PQ of so many bytes or a few more."""
    parts = next((count for count in range(code_bytes, dim) if dim % count == 0), dim)
    return IvfPq(lists=num_lists(num_items), parts=parts, bits=_bits(num_items), effort=effort)


def residual_of(
    *, num_items: int, code_bytes: int, effort: int = Residual.effort, is_fast: bool = False
) -> Residual:
    """IVF with residual codes and a norm, together of so many bytes.

    Codes of 8 bits find most, and are slow to search in faiss; ``is_fast`` takes twice as many of 4 bits,
    which are compared in registers.

    Raises
    ------
    UsageError
        there is no room for a code beside the norm.
    """
    codebooks = code_bytes - NORM_BYTES
    if codebooks < 1:
        raise UsageError(
            f"{code_bytes} bytes hold no residual code, since {NORM_BYTES} is the norm's; give at least "
            f"{NORM_BYTES + 1}"
        )
    return Residual(
        codebooks=2 * codebooks if is_fast else codebooks,
        bits=SMALL_BITS if is_fast else _bits(num_items),
        lists=num_lists(num_items),
        effort=effort,
        width=WIDTH,
    )


def num_lists(num_items: int) -> int:
    """Lists for so many items."""
    return min(MOST_LISTS, max(1, num_items // ITEMS_A_LIST))


def _bits(num_items: int) -> int:
    """Of a tiny pool not so many codes can be learned."""
    return min(CODE_BITS, max(1, int(math.log2(max(1, num_items)))))


def _fewer(kind: IvfPq | Residual, num_training: int) -> int:
    return min(kind.bits, _bits(num_training))
