"""Search by code vectors, one query at a time: compiled, or in NumPy where there is no compiled library.

Both find what :func:`genius_search.search.beam.search` with a geometric decoder and
:func:`genius_search.search.rank.rank_items` find, with the same scores up to rounding, in a fraction of the
time. :func:`genius_search.search.find.find` chooses between them and the general path.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float16, Float32, Int8, Int64
from torch import Tensor

from genius_search.config import SearchConfig
from genius_search.nn.density import DENSITY_STEPS, HALF_NORM_STEPS
from genius_search.search.beam import Beams, topk
from genius_search.search.decoder import (
    EPSILON,
    Combination,
    Decoder,
    GeometricDecoder,
    GuidedDecoder,
    OneBlock,
    T5Decoder,
)
from genius_search.search.native.build import FOLDER, VARIANTS, library
from genius_search.search.rank import CodeRanker, Ranking, ids_under, items_of, table_rows
from genius_search.search.table import IdTable, Part, Restriction, children_in_parts, count_ids

CODES: Final = 256
"""Largest number of codes at a level, and the length of a level's row in all tables."""
BLOCK: Final = 64
MAX_LEVELS: Final = 255
GRAM_CODES: Final = 1024
"""Inner products between code vectors are computed in advance for the first levels, up to this many codes."""
CODED_STARTS: Final = 1 << 20
"""Codes at the starts of a table's branches are copied in advance for the first levels, up to this many."""
NO_MEMORY: Final = -2
"""Status of a search that the library had no memory for."""
HIT: Final = np.dtype([("part", "i8"), ("item", "i8"), ("row", "i8"), ("beam", "i8"), ("score", "f8")])


class _Table(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("ids", "starts", "level_bounds", "start_codes", "bucket_starts", "items")
        ),
        *((name, ctypes.c_int64) for name in ("columns", "rows", "num_items", "num_start_codes")),
    )


class _Part(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("table", "words", "before", "allowed"))


class _Generator(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("width", "feedforward", "heads", "head_width", "prefixes")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                *(
                    "prefix_weights",
                    "prefix_biases",
                    "prefix_keys_values",
                    "prefix_sides",
                    "tokens",
                    "embeddings",
                ),
                *("distances", "token_out", "up", "down", "codes", "scales", "gates", "biases"),
            )
        ),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("levels", "dim", "gram_levels")),
        *((name, ctypes.c_void_p) for name in ("generator", "sizes", "vectors", "halves", "gram")),
    )


class _Request(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("width", "candidates", "k")),
        ("level0", ctypes.c_uint8 * (CODES // 8)),
        *((name, ctypes.c_float) for name in ("half_norm_step", "density_step", "generator_weight")),
    )


class _Result(ctypes.Structure):
    _fields_ = (
        ("hits", ctypes.c_void_p),
        ("decoded", ctypes.c_void_p),
        ("num_hits", ctypes.c_int64),
        ("touched", ctypes.c_int64),
    )


class Wanted(NamedTuple):
    """The conditions of one query."""

    width: int
    """Beam width."""
    k: int
    """Number of hits."""
    level0: frozenset[int] = frozenset()
    """Allowed codes at level 0; empty means any."""
    restriction: Restriction | None = None
    """Allowed items, deletions taken into account; None allows every item that is not deleted."""


class Found(NamedTuple):
    """The ranked items of one query."""

    ranking: Ranking
    log_probabilities: Float32[np.ndarray, "hits levels"]
    """Log-probabilities of the codes of each hit's beam; NaN for levels that were not decoded."""


class NumpyGenerator:
    """A generator of one block in NumPy: :class:`genius_search.search.decoder.T5Decoder` for one query."""

    def __init__(self, weights: OneBlock, combination: Combination) -> None:
        self.weights = weights
        self.combination = combination
        heads, sizes = weights.heads, [logits.shape[1] for logits in weights.codes]
        self.tokens = (_normalize(weights.embeddings) @ weights.token).reshape(
            -1, 3, heads, len(weights.token_out) // heads
        )
        """Queries, keys and values of each token in self-attention, which depend on nothing else."""
        self._offsets = np.array([0, *accumulate(sizes, initial=1)][:-1])

    def read(self, query: Float32[np.ndarray, " dim"]) -> np.ndarray:
        """Return the keys and values of the query's prefix vectors, in the space of the tokens."""
        w = self.weights
        vectors = _normalize((query @ w.prefix_weights + w.prefix_biases).reshape(w.prefixes, -1))
        projected = (vectors @ w.prefix_keys_values).reshape(w.prefixes, 2 * w.heads, -1).transpose(1, 0, 2)
        sides: np.ndarray = (projected @ w.prefix_sides).reshape(2, w.heads * w.prefixes, -1)
        return sides

    def score(
        self,
        sides: np.ndarray,
        codes: Int64[np.ndarray, "rows level"],
        near: Float32[np.ndarray, "rows codes"],
    ) -> Float32[np.ndarray, "rows codes"]:
        """Return the log-probabilities of the codes that follow prefixes, given their nearness."""
        w, level, rows = self.weights, codes.shape[1], len(codes)
        tokens = np.concatenate([np.zeros((rows, 1), np.int64), codes], axis=1) + self._offsets[: level + 1]
        queries, keys, values = self.tokens[tokens].transpose(2, 0, 3, 1, 4)
        shares = (keys @ queries[:, :, -1, :, None])[..., 0] + w.distances[:, level::-1]
        attended = (_softmax(shares)[:, :, None] @ values).reshape(rows, -1)
        hidden = w.embeddings[tokens[:, -1]] + attended @ w.token_out
        shares = (_normalize(hidden) @ sides[0].T).reshape(rows, w.heads, -1)
        hidden += _softmax(shares).reshape(rows, -1) @ sides[1]
        hidden += np.maximum(_normalize(hidden) @ w.up, 0) @ w.down
        c = self.combination
        logits = (
            c.scales[level] * near + c.gates[level] * (_normalize(hidden) @ w.codes[level]) + c.biases[level]
        )
        logits -= logits.max(axis=1, keepdims=True)
        return np.asarray(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))


def _normalize(rows: Float32[np.ndarray, "rows width"]) -> Float32[np.ndarray, "rows width"]:
    """Scale each row to unit length."""
    squares = np.einsum("rw,rw->r", rows, rows)[:, None] + np.float32(rows.shape[1] * EPSILON)
    return np.asarray(rows / np.sqrt(squares))


def _softmax(scores: Float32[np.ndarray, "*rows keys"]) -> Float32[np.ndarray, "*rows keys"]:
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


class NumpySearch:
    """Search by code vectors, or by a generator of one block, in NumPy.

    Parameters
    ----------
    ranker
        scores IDs by the code vectors; its tables must not change.
    generator
        scores the codes that follow a prefix; without one, nearness to the query does.
    """

    def __init__(self, ranker: CodeRanker, generator: NumpyGenerator | None = None) -> None:
        self._ranker = ranker
        self.generator = generator
        self._tables = ranker.tables()
        self._vectors = np.concatenate(self._tables)
        self._offsets = np.array([0, *accumulate(map(len, self._tables))][:-1])
        self._halves = [np.square(table).sum(axis=1) / 2 for table in self._tables]

    def covers(self, parts: Sequence[Part], config: SearchConfig) -> bool:
        """Return whether this search knows such settings and tables."""
        return (
            config.rerank != "none"
            and (config.scores == "level" or (config.scores == "vocabulary" and self.generator is None))
            and all(part.table.ids.dtype == np.uint8 and part.table.items.dtype == np.int32 for part in parts)
        )

    @np.errstate(invalid="ignore")  # products of small matrices may compute with what lies beside them
    def search(
        self,
        parts: Sequence[Part],
        queries: Float32[np.ndarray, "queries dim"],
        wanted: Sequence[Wanted],
        config: SearchConfig,
    ) -> list[Found]:
        """Find the best items by codes for each query; with ``k`` 0, list all items under the beams."""
        products = queries @ self._vectors.T
        return [
            self._search(parts, query, own, one, config)
            for query, own, one in zip(queries, products, wanted, strict=True)
        ]

    def _search(
        self,
        parts: Sequence[Part],
        query: Float32[np.ndarray, " dim"],
        products: Float32[np.ndarray, " codes"],
        wanted: Wanted,
        config: SearchConfig,
    ) -> Found:
        restriction = wanted.restriction or tuple(part.alive for part in parts)
        by_level = np.split(products, self._offsets[1:])
        beams = self._find_beams(parts, query, by_level, wanted, config.candidates, restriction)
        ids = ids_under(beams, 0, restriction)
        rows = table_rows(parts, ids)
        scores = products.take(rows[:, : len(self._tables)] + self._offsets).sum(axis=1)
        scores -= self._ranker.costs(rows, density_weight=config.density_weight)
        if config.generator_weight:
            scores += config.generator_weight * beams.scores()[0][ids.beam]
        ranking = items_of(parts, ids, scores, restriction)
        if wanted.k:
            ranking = ranking.take(topk(ranking.scores, wanted.k))
        return Found(ranking, beams.log_probabilities[0, ranking.beams])

    def _find_beams(
        self,
        parts: Sequence[Part],
        query: Float32[np.ndarray, " dim"],
        products: list[np.ndarray],
        wanted: Wanted,
        candidates: int,
        restriction: Restriction,
    ) -> Beams:
        budget = max(wanted.width, candidates)
        low = np.zeros((1, len(parts)), dtype=np.int64)
        high = np.array([[len(part.table) for part in parts]], dtype=np.int64)
        total = np.zeros(1, dtype=np.float32)
        history = np.full((1, len(products)), np.nan, dtype=np.float32)
        prefixes = np.zeros((1, self._tables[0].shape[1]), dtype=np.float32)
        codes = np.zeros((1, 0), dtype=np.int64)
        sides = None
        for level, table in enumerate(self._tables):
            children = children_in_parts(parts, level, low, high)
            if level == 0 and wanted.level0:
                children = children.take(np.flatnonzero(np.isin(children.code, list(wanted.level0))))
            counts = count_ids(
                children.low, children.high, [restriction], np.zeros(len(children.code), dtype=np.int64)
            )
            allowed = counts.nonzero()[0]
            children, counts = children.take(allowed), counts[allowed]
            low, high = children.low, children.high
            if level == 0 and counts.sum() <= budget:
                history = history.repeat(len(low), axis=0)
                break
            near = products[level] - self._halves[level] - prefixes @ table.T
            if self.generator is not None:
                sides = self.generator.read(query) if sides is None else sides
                near = self.generator.score(sides, codes, near)
            gained = near[children.parent, children.code]
            total = total[children.parent] + gained
            best = topk(total, budget)
            affordable = int(counts[best].cumsum().searchsorted(budget, "right"))
            best = best[: max(wanted.width, affordable)]
            parent, code = children.parent[best], children.code[best]
            low, high, total = low[best], high[best], total[best]
            history = history[parent]
            history[:, level] = gained[best]
            if counts[best].sum() <= budget:
                break
            prefixes = prefixes[parent] + table[code]
            codes = np.concatenate([codes[parent], code[:, None]], axis=1)
        return Beams(low[None], high[None], history[None])


class ByteVectors:
    """Stored embeddings in 8 bits: the rows of ``values``, each times its scale."""

    def __init__(self, values: Int8[np.ndarray, "items dim"], scales: Float16[np.ndarray, " items"]) -> None:
        self._values = values
        self._scales = scales

    def __call__(self, rows: Int64[np.ndarray, " rows"]) -> Tensor:
        """Return the vectors of items."""
        return torch.from_numpy(self._values[rows] * self._scales[rows, None].astype(np.float32))

    def products(
        self, rows: Int64[np.ndarray, " rows"], query: Float32[np.ndarray, " dim"]
    ) -> Float32[np.ndarray, " rows"]:
        """Return the inner products of items and a query; the compiled library does not make the vectors."""
        library = open_library()
        scales = self._scales[rows].astype(np.float32)  # fails if a row does not exist
        if library is None or len(rows) == 0 or rows.min() < 0:
            return np.asarray(self._values[rows].astype(np.float32) @ query * scales)
        rows, query = np.ascontiguousarray(rows), np.ascontiguousarray(query)
        products = np.empty(len(rows), dtype=np.float32)
        arrays = (self._values, rows, query, products)
        library.multiply_bytes(*(array.ctypes.data for array in arrays), self._values.shape[1], len(rows))
        products *= scales
        return products


class CompiledSearch(NumpySearch):
    """The same, by the compiled library."""

    def __init__(
        self, ranker: CodeRanker, library: ctypes.CDLL, generator: NumpyGenerator | None = None
    ) -> None:
        super().__init__(ranker, generator)
        self._library = library
        self._arrays = _pack_tables(self._tables)
        self._model = _Model(
            levels=len(self._tables),
            dim=self._tables[0].shape[1],
            gram_levels=self._arrays["gram"].shape[1],
            **_pointers(self._arrays),
        )
        if generator is not None:
            w = generator.weights
            self._generator_arrays = _pack_generator(generator)
            self._generator_fields = _Generator(
                width=w.up.shape[0],
                feedforward=w.up.shape[1],
                heads=w.heads,
                head_width=len(w.token_out) // w.heads,
                prefixes=w.prefixes,
                **_pointers(self._generator_arrays),
            )
            self._model.generator = ctypes.addressof(self._generator_fields)

    def search(
        self,
        parts: Sequence[Part],
        queries: Float32[np.ndarray, "queries dim"],
        wanted: Sequence[Wanted],
        config: SearchConfig,
    ) -> list[Found]:
        """Find the best items by codes for each query; with ``k`` 0, list all items under the beams."""
        model = ctypes.addressof(self._model)
        queries = np.ascontiguousarray(queries, dtype=np.float32)
        products = np.zeros((len(queries), len(self._tables), CODES), dtype=np.float32)
        levels = len(self._tables) if any(one.k for one in wanted) else self._model.gram_levels
        self._library.multiply(model, queries.ctypes.data, len(queries), levels, products.ctypes.data)
        try:
            work = _works.pop()
        except IndexError:
            work = self._library.make_work()
        try:
            return [
                self._search_one(parts, query, own, one, config, work)
                for query, own, one in zip(queries, products, wanted, strict=True)
            ]
        finally:
            _works.append(work)

    def _search_one(
        self,
        parts: Sequence[Part],
        query: Float32[np.ndarray, " dim"],
        products: Float32[np.ndarray, "levels codes"],
        wanted: Wanted,
        config: SearchConfig,
        work: int,
    ) -> Found:
        restriction = wanted.restriction or tuple(part.alive for part in parts)
        request = _Request(
            width=wanted.width,
            candidates=config.candidates,
            k=wanted.k,
            half_norm_step=1 / HALF_NORM_STEPS,
            density_step=config.density_weight / DENSITY_STEPS,
            generator_weight=config.generator_weight,
        )
        level0 = (
            sum(1 << code for code in wanted.level0 if code < CODES) if wanted.level0 else (1 << CODES) - 1
        )
        ctypes.memmove(request.level0, level0.to_bytes(CODES // 8, "little"), CODES // 8)
        result = _Result()
        status = self._library.search(
            ctypes.addressof(self._model),
            _given_parts(parts, restriction),
            len(parts),
            ctypes.byref(request),
            query.ctypes.data,
            products.ctypes.data,
            work,
            ctypes.byref(result),
        )
        if status == NO_MEMORY:
            raise MemoryError
        if status < 0:
            raise LookupError("an ID table refers to rows or codes that do not exist")
        return _read(result, len(self._tables))


_works: Final[list[int]] = []
"""Memory of the library's searches; each is used by one search at a time."""


def fast_search(decoder: Decoder, ranker: CodeRanker) -> NumpySearch | None:
    """Return the quickest search on this machine that finds what a decoder and a ranker find.

    None if there is none: the decoder is unknown or has several blocks, over 256 codes at a level, or other
    code vectors than the ranker.
    """
    if max(decoder.sizes) > CODES or len(decoder.sizes) > MAX_LEVELS:
        return None
    tables = ranker.tables()
    own = tables
    generator = None
    if type(decoder) is GeometricDecoder:
        own = decoder.tables()
    elif type(decoder) is T5Decoder and (weights := decoder.weights()):
        biases = [np.zeros(size, dtype=np.float32) for size in decoder.sizes]
        combination = Combination(tables, [0.0] * len(tables), [1.0] * len(tables), biases)
        generator = NumpyGenerator(weights, combination)
    elif type(decoder) is GuidedDecoder and (both := decoder.weights()):
        generator = NumpyGenerator(*both)
        own = generator.combination.tables
    else:
        return None
    if not all(np.array_equal(mine, other) for mine, other in zip(own, tables, strict=True)):
        return None
    opened = open_library()
    return NumpySearch(ranker, generator) if opened is None else CompiledSearch(ranker, opened, generator)


@cache
def open_library(folder: Path = FOLDER) -> ctypes.CDLL | None:
    """Open the compiled library for this processor; return None, and log it, if there is none."""
    for variant in VARIANTS:
        path = library(variant, folder)
        if path.exists():
            opened = ctypes.CDLL(str(path))
            if opened.is_supported():
                pointer, integer = ctypes.c_void_p, ctypes.c_int64
                opened.make_work.restype = pointer
                opened.multiply.argtypes = (pointer, pointer, integer, integer, pointer)
                opened.multiply.restype = None
                opened.multiply_bytes.argtypes = (*[pointer] * 4, integer, integer)
                opened.multiply_bytes.restype = None
                opened.search.argtypes = (pointer, pointer, integer, *[pointer] * 5)
                return opened
    logging.getLogger(__name__).info(
        "the compiled search is missing, NumPy replaces it and is a few times slower; "
        "`python -m genius_search.search.native.build` compiles it"
    )
    return None


def _pointers(arrays: dict[str, np.ndarray]) -> dict[str, int]:
    return {name: array.ctypes.data for name, array in arrays.items()}


def _pack(matrix: Float32[np.ndarray, "inputs outputs"]) -> Float32[np.ndarray, " weights"]:
    """Arrange a matrix for the library's products: blocks of 64 outputs."""
    padded = np.pad(matrix, ((0, 0), (0, -matrix.shape[1] % BLOCK)))
    return padded.reshape(len(matrix), -1, BLOCK).transpose(1, 0, 2).ravel().astype(np.float32)


def _pack_generator(generator: NumpyGenerator) -> dict[str, np.ndarray]:
    """Return the arrays of the library's generator, as it describes them."""
    w, c = generator.weights, generator.combination
    arrays = {
        "prefix_weights": _pack(w.prefix_weights),
        "prefix_biases": w.prefix_biases,
        "prefix_keys_values": _pack(w.prefix_keys_values),
        "prefix_sides": np.concatenate([_pack(side) for side in w.prefix_sides]),
        "tokens": generator.tokens,
        "embeddings": w.embeddings,
        "distances": w.distances,
        "token_out": _pack(w.token_out),
        "up": _pack(w.up),
        "down": _pack(w.down),
        "codes": np.concatenate([_pack(logits) for logits in w.codes]),
        "scales": c.scales,
        "gates": c.gates,
        "biases": np.stack([np.pad(bias, (0, CODES - len(bias))) for bias in c.biases]),
    }
    return {name: np.ascontiguousarray(array, dtype=np.float32) for name, array in arrays.items()}


def _pack_tables(tables: Sequence[Float32[np.ndarray, "_ dim"]]) -> dict[str, np.ndarray]:
    """Return the arrays of the library's model, as it describes them."""
    sizes = [len(table) for table in tables]
    wide = [np.pad(table, ((0, CODES - len(table)), (0, 0))) for table in tables]
    levels = sum(total <= GRAM_CODES for total in accumulate(sizes))
    first = np.concatenate([*tables[:levels], np.zeros((0, tables[0].shape[1]), np.float32)])
    gram = [first @ table.T for table in wide[:levels]]
    return {
        "sizes": np.array(sizes, dtype=np.int32),
        "vectors": np.concatenate([_pack(table.T) for table in tables]),
        "halves": np.stack([np.square(table).sum(axis=1) / 2 for table in wide]),
        "gram": np.ascontiguousarray(np.stack(gram, axis=1)) if gram else np.zeros((0, 0, CODES), np.float32),
    }


def _given_parts(parts: Sequence[Part], restriction: Restriction) -> Any:
    """Return the library's view of the parts and of their allowed items."""
    given = (_Part * len(parts))()
    for own, part, allowed in zip(given, parts, restriction, strict=True):
        own.table = ctypes.addressof(_given_table(part.table))
        if allowed is not None:
            own.words, own.before = allowed.ids.words.ctypes.data, allowed.ids.before.ctypes.data
            own.allowed = allowed.items.ctypes.data
    return given


_given_tables: weakref.WeakKeyDictionary[IdTable, _Table] = weakref.WeakKeyDictionary()


def _given_table(table: IdTable) -> _Table:
    """Return the library's view of a table."""
    given = _given_tables.get(table)
    if given is None:
        bounds = np.ascontiguousarray(table.level_bounds, dtype=np.int64)
        known = bounds[bounds <= CODED_STARTS][-1]
        codes = np.concatenate(
            [
                table.ids[table.starts[low:high], level]
                for level, (low, high) in enumerate(pairwise(bounds.tolist()))
                if high <= known
            ]
        )
        given = _Table(
            columns=table.ids.shape[1], rows=len(table), num_items=table.num_items, num_start_codes=known
        )
        given.kept = []
        for name, array in (
            ("ids", table.ids),
            ("starts", table.starts),
            ("level_bounds", bounds),
            ("start_codes", codes),
            ("bucket_starts", table.bucket_starts),
            ("items", table.items),
        ):
            contiguous = np.ascontiguousarray(array)
            given.kept.append(contiguous)
            setattr(given, name, contiguous.ctypes.data)
        given = _given_tables.setdefault(table, given)  # another thread may have been first, and use its own
    return given


def _read(result: _Result, num_levels: int) -> Found:
    """Copy the hits out of the memory of a search."""
    count = result.num_hits
    hits = np.frombuffer(ctypes.string_at(result.hits, count * HIT.itemsize), HIT)
    decoded = np.frombuffer(ctypes.string_at(result.decoded, count * num_levels * 4), np.float32)
    ranking = Ranking(
        hits["part"],
        hits["item"],
        hits["row"],
        hits["score"].astype(np.float32),
        hits["beam"],
        result.touched,
    )
    return Found(ranking, decoded.reshape(count, num_levels))
