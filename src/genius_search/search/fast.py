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
from jaxtyping import Float32

from genius_search.config import SearchConfig
from genius_search.nn.density import DENSITY_STEPS, HALF_NORM_STEPS
from genius_search.search.beam import Beams, topk
from genius_search.search.native.build import FOLDER, VARIANTS, library
from genius_search.search.rank import CodeRanker, Ranking, ids_under, items_of, table_rows
from genius_search.search.table import IdTable, Part, Restriction, children_in_parts, count_ids

CODES: Final = 256
"""Largest number of codes at a level, and the length of a level's row in all tables."""
BLOCK: Final = 64
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


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("levels", "dim", "gram_levels", "gram_codes")),
        *((name, ctypes.c_void_p) for name in ("sizes", "vectors", "halves", "gram")),
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


class NumpySearch:
    """Search by code vectors in NumPy.

    Parameters
    ----------
    ranker
        scores IDs by the code vectors; its tables must not change.
    """

    def __init__(self, ranker: CodeRanker) -> None:
        self._ranker = ranker
        self._tables = ranker.tables()
        self._halves = [np.square(table).sum(axis=1) / 2 for table in self._tables]

    def covers(self, parts: Sequence[Part], config: SearchConfig) -> bool:
        """Return whether this search knows such settings and tables."""
        return (
            config.rerank != "none"
            and config.scores != "children"
            and max(map(len, self._tables)) <= CODES
            and all(part.table.ids.dtype == np.uint8 and part.table.items.dtype == np.int32 for part in parts)
        )

    def search(
        self,
        parts: Sequence[Part],
        queries: Float32[np.ndarray, "queries dim"],
        wanted: Sequence[Wanted],
        config: SearchConfig,
    ) -> list[Found]:
        """Find the best items by codes for each query; with ``k`` 0, list all items under the beams."""
        products = [queries @ table.T for table in self._tables]
        return [
            self._search(parts, [level[number] for level in products], one, config)
            for number, one in enumerate(wanted)
        ]

    def _search(
        self, parts: Sequence[Part], products: list[np.ndarray], wanted: Wanted, config: SearchConfig
    ) -> Found:
        restriction = wanted.restriction or tuple(part.alive for part in parts)
        beams = self._find_beams(parts, products, wanted, config.candidates, restriction)
        ids = ids_under(beams, 0, restriction)
        rows = table_rows(parts, ids)
        scores = -self._ranker.costs(rows, density_weight=config.density_weight)
        for level, own in enumerate(products):
            scores += own[rows[:, level]]
        if config.generator_weight:
            scores += config.generator_weight * beams.scores()[0][ids.beam]
        ranking = items_of(parts, ids, scores, restriction)
        if wanted.k:
            ranking = ranking.take(topk(ranking.scores, wanted.k))
        return Found(ranking, beams.log_probabilities[0, ranking.beams])

    def _find_beams(
        self,
        parts: Sequence[Part],
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
        return Beams(low[None], high[None], history[None])


class CompiledSearch(NumpySearch):
    """The same, by the compiled library."""

    def __init__(self, ranker: CodeRanker, library: ctypes.CDLL) -> None:
        super().__init__(ranker)
        self._library = library
        self._arrays = _pack(self._tables)
        self._model = _Model(
            levels=len(self._tables),
            dim=self._tables[0].shape[1],
            gram_levels=self._arrays["gram"].shape[1],
            **{name: array.ctypes.data for name, array in self._arrays.items()},
        )
        self._works: list[int] = []  # memory of searches; each is used by one thread at a time

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
        self._library.multiply(model, queries.ctypes.data, len(queries), products.ctypes.data)
        try:
            work = self._works.pop()
        except IndexError:
            work = self._library.make_work()
        alive = tuple(part.alive for part in parts)
        found = []
        for own, one in zip(products, wanted, strict=True):
            given = _given_parts(parts, one.restriction or alive)
            request = _Request(
                width=one.width,
                candidates=config.candidates,
                k=one.k,
                half_norm_step=1 / HALF_NORM_STEPS,
                density_step=config.density_weight / DENSITY_STEPS,
                generator_weight=config.generator_weight,
            )
            mask = np.ones(CODES, dtype=bool)
            if one.level0:
                mask = np.isin(np.arange(CODES), list(one.level0))
            ctypes.memmove(request.level0, np.packbits(mask, bitorder="little").tobytes(), CODES // 8)
            result = _Result()
            status = self._library.search(
                model, given, len(parts), ctypes.byref(request), own.ctypes.data, work, ctypes.byref(result)
            )
            if status == NO_MEMORY:
                raise MemoryError
            if status < 0:
                raise LookupError("an ID table refers to rows or codes that do not exist")
            found.append(_read(result, len(self._tables)))
        self._works.append(work)
        return found


def fast_search(ranker: CodeRanker) -> NumpySearch:
    """Return the quickest search by code vectors on this machine."""
    opened = open_library()
    return NumpySearch(ranker) if opened is None else CompiledSearch(ranker, opened)


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
                opened.multiply.argtypes = (pointer, pointer, integer, pointer)
                opened.multiply.restype = None
                opened.search.argtypes = (pointer, pointer, integer, pointer, pointer, pointer, pointer)
                return opened
    logging.getLogger(__name__).info(
        "the compiled search is missing, NumPy replaces it and is a few times slower; "
        "`python -m genius_search.search.native.build` compiles it"
    )
    return None


def _pack(tables: Sequence[Float32[np.ndarray, "_ dim"]]) -> dict[str, np.ndarray]:
    """Return the arrays of the library's model, as it describes them."""
    sizes = [len(table) for table in tables]
    padded = [np.pad(table, ((0, -len(table) % BLOCK), (0, 0))) for table in tables]
    blocks = [table.reshape(-1, BLOCK, table.shape[1]).transpose(0, 2, 1).ravel() for table in padded]
    wide = [np.pad(table, ((0, CODES - len(table)), (0, 0))) for table in tables]
    levels = sum(total <= GRAM_CODES for total in accumulate(sizes))
    first = np.concatenate([*tables[:levels], np.zeros((0, tables[0].shape[1]), np.float32)])
    gram = [first @ table.T for table in wide[:levels]]
    return {
        "sizes": np.array(sizes, dtype=np.int32),
        "vectors": np.concatenate(blocks),
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
        _given_tables[table] = given
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
