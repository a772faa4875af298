"""Search by the compiled library (``native/search.c``), whose structures these are.

It takes the place of :class:`genius_search.search.fast.NumpySearch` where it is compiled.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import weakref
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch
from jaxtyping import Float16, Float32, Int8, Int64
from torch import Tensor

from genius_search.config import SearchConfig
from genius_search.nn.density import DENSITY_STEPS, HALF_NORM_STEPS
from genius_search.search.fast import Found, NumpyGenerator, NumpySearch, Wanted
from genius_search.search.native.build import FOLDER, VARIANTS, library
from genius_search.search.rank import CodeRanker, Ranking
from genius_search.search.table import IdTable, Part, Restriction

CODES: Final = 256
"""Largest number of codes at a level, and the length of a level's row in all tables."""
MAX_LEVELS: Final = 255
BLOCK: Final = 64
GRAM_CODES: Final = 1024
"""Inner products between code vectors are computed in advance for the first levels, up to this many codes."""
CODED_STARTS: Final = 1 << 20
"""Codes at the starts of a table's branches are copied in advance for the first levels, up to this many."""
NO_MEMORY: Final = -2
"""Status of a search that the library had no memory for."""
HIT: Final = np.dtype([("part", "i8"), ("item", "i8"), ("row", "i8"), ("beam", "i8"), ("score", "f8")])


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class _Table(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_void_p, "ids starts level_bounds start_codes bucket_starts items"),
        *_fields(ctypes.c_int64, "columns rows num_items num_start_codes"),
    )


class _Part(ctypes.Structure):
    _fields_ = tuple(_fields(ctypes.c_void_p, "table words before allowed"))


class _Generator(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_int64, "width feedforward heads head_width prefixes"),
        *_fields(ctypes.c_void_p, "prefix_weights prefix_biases prefix_keys_values prefix_sides"),
        *_fields(ctypes.c_void_p, "tokens embeddings distances token_out up down codes scales gates biases"),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_int64, "levels dim gram_levels"),
        *_fields(ctypes.c_void_p, "generator sizes vectors halves gram"),
    )


class _Request(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_int64, "width candidates k"),
        ("level0", ctypes.c_uint8 * (CODES // 8)),
        *_fields(ctypes.c_float, "half_norm_step density_step generator_weight"),
    )


class _Result(ctypes.Structure):
    _fields_ = (*_fields(ctypes.c_void_p, "hits decoded"), *_fields(ctypes.c_int64, "num_hits touched"))


class CompiledSearch(NumpySearch):
    """Search by code vectors, or by a generator of one block, in the compiled library."""

    most_queries: ClassVar[int] = sys.maxsize

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
            k=min(wanted.k, sum(part.table.num_items for part in parts)),  # there is memory for each of them
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
