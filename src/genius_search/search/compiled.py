"""Search by the compiled library (``native/search.c``), whose structures these are.

It finds what :func:`genius_search.search.beam.search` and :func:`genius_search.search.rank.rank_items` find,
with the same scores up to rounding, in a small part of the time.
"""

from __future__ import annotations

import ctypes
import operator
import struct
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple, TypeGuard

import numpy as np
from jaxtyping import Float32, UInt8

from genius_search.config import SearchConfig
from genius_search.native.library import count_cores
from genius_search.nn.folded import EPSILON, BlockWeights, Combination, FoldedWeights
from genius_search.nn.spread import DENSITY_STEPS, HALF_NORM_STEPS, Residuals, SpreadOf
from genius_search.search.rank import CodeRanker, Found, Ranking, Vectors, Wanted
from genius_search.search.table import Allowed, IdTable, RankedBits, Restriction, SearchSegment
from genius_search.search.vectors import StoredVectors, is_residual

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
LARGEST_BYTE: Final = 127
ZERO_BYTE: Final = 128
GROUP: Final = 4
"""Dimensions of code vectors in 8 bits that lie side by side."""
QUERIES_A_THREAD: Final = 16
"""Fewest queries that a further thread is started for."""
HIT: Final = np.dtype(
    [*((name, "i8") for name in ("segment", "item", "row", "beam")), ("score", "f4"), ("", "f4")]
)


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class _Table(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_void_p, "ids starts level_bounds start_codes bucket_starts items"),
        *_fields(ctypes.c_int64, "columns rows num_items num_start_codes"),
    )


class _Generator(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_int64, "width feedforward heads head_width prefixes blocks"),
        *_fields(ctypes.c_void_p, "prefix_weights prefix_biases prefix_keys_values prefix_sides"),
        *_fields(ctypes.c_void_p, "tokens embeddings distances token token_out up down"),
        *_fields(ctypes.c_void_p, "codes scales gates biases"),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_int64, "levels dim gram_levels first_level num_constant"),
        *_fields(ctypes.c_void_p, "generator sizes vectors bytes steps coarsest longest halves gram"),
        *_fields(ctypes.c_void_p, "residual_weights constant"),
    )


class _Work(ctypes.Structure):
    """What the library's searches leave in their memory."""

    _fields_ = tuple(_fields(ctypes.c_void_p, "hits decoded results"))


_SEGMENT: Final = struct.Struct("7P")
_REQUEST: Final = struct.Struct("6q32s4fP2f")
_RESULT: Final = struct.Struct("2q")


class CompiledSearch:
    """Search by code vectors, or by a generator, in the compiled library.

    Parameters
    ----------
    ranker
        scores IDs by the code vectors; its tables must not change.
    generator
        the weights of what scores the codes that follow a prefix, and how they are combined with nearness;
        without them, nearness to the query scores the codes.
    """

    def __init__(
        self,
        ranker: CodeRanker,
        library: ctypes.CDLL,
        generator: tuple[FoldedWeights, Combination] | None = None,
    ) -> None:
        self._library = library
        self._tables = ranker.tables()
        self._spread = ranker.spread
        self._generates = generator is not None
        self._known_usage: dict[frozenset[int], tuple[SpreadOf, np.ndarray]] = {}
        residuals = ranker.spread.residuals or Residuals.plain(self._tables[0].shape[1])
        self._arrays = _pack_tables(self._tables)
        self._arrays |= {
            "residual_weights": np.ascontiguousarray(residuals.weights),
            "constant": np.ascontiguousarray(residuals.constant),
        }
        self._model = model = _Model(
            levels=len(self._tables),
            dim=self._tables[0].shape[1],
            gram_levels=self._arrays["gram"].shape[1],
            first_level=self._spread.level,
            num_constant=len(residuals.constant),
            **_pointers(self._arrays),
        )
        if generator is not None:
            w, combination = generator
            self._generator_arrays = _pack_generator(w, combination)
            self._generator_fields = _Generator(
                width=w.embeddings.shape[1],
                feedforward=len(w.blocks[0].down),
                heads=w.heads,
                head_width=w.prefix_sides.shape[1],
                prefixes=w.prefixes,
                blocks=len(w.blocks),
                **_pointers(self._generator_arrays),
            )
            model.generator = ctypes.addressof(self._generator_fields)
        self._given_model = ctypes.addressof(model)
        self._last_view: tuple[tuple[Any, ...], tuple[bytes, int]] | None = None
        self._last_compared: tuple[Sequence[SearchSegment], Sequence[Vectors], bool] | None = None

    def covers(self, segments: Sequence[SearchSegment], config: SearchConfig) -> bool:
        """Return whether this search knows such settings and tables."""
        return (
            config.rerank != "none"
            and (config.scores == "level" or (config.scores == "vocabulary" and not self._generates))
            and all(
                segment.table.ids.dtype == np.uint8 and segment.table.items.dtype == np.int32
                for segment in segments
            )
        )

    def search(
        self,
        segments: Sequence[SearchSegment],
        queries: Float32[np.ndarray, "queries dim"],
        wanted: Sequence[Wanted],
        config: SearchConfig,
        compared: Compared | None = None,
    ) -> list[Found]:
        """Find the best items for each query: by codes, or among those by their embeddings.

        Without ``compared`` and with ``k`` 0, list all items under the beams.
        """
        threads = len(wanted) // QUERIES_A_THREAD
        if threads > 1:
            threads = min(threads, count_cores())
        if threads <= 1:
            return self._search_in_turn(segments, queries, wanted, config, compared)
        bounds = [len(wanted) * number // threads for number in range(threads + 1)]

        def search_some(low: int, high: int) -> list[Found]:
            own = compared and compared._replace(queries=compared.queries[low:high])
            return self._search_in_turn(segments, queries[low:high], wanted[low:high], config, own)

        with ThreadPoolExecutor(threads) as executor:
            found = executor.map(search_some, bounds[:-1], bounds[1:])
            return [one for some in found for one in some]

    def can_compare(
        self, vectors: Sequence[Vectors], segments: Sequence[SearchSegment]
    ) -> TypeGuard[Sequence[StoredVectors]]:
        """Return whether the library can read the stored embeddings of segments."""
        last = self._last_compared
        if last is None or last[0] is not segments or last[1] is not vectors:
            stored = [one for one in vectors if isinstance(one, StoredVectors)]
            answer = len(stored) == len(segments) and all(
                one.bits == stored[0].bits and one.fits(segment.table.num_items, self._tables[0].shape[1])
                for one, segment in zip(stored, segments, strict=True)
            )
            last = self._last_compared = (segments, vectors, answer)
        return last[2]

    def _search_in_turn(
        self,
        segments: Sequence[SearchSegment],
        queries: Float32[np.ndarray, "queries dim"],
        wanted: Sequence[Wanted],
        config: SearchConfig,
        compared: Compared | None,
    ) -> list[Found]:
        """Search for queries one after the other, in one call of the library."""
        bits = 16 if compared is None or not compared.vectors else compared.vectors[0].bits
        views: dict[int, tuple[int, bytes, int]] = {}
        requests = []
        for width, k, level0, restriction in wanted:
            if id(restriction) not in views:
                view = self._view(segments, restriction, compared)
                views[id(restriction)] = (len(views) * len(segments), *view)
            position, _, num_items = views[id(restriction)]
            among, usage = self._usage_among(level0)
            density_step = config.density_weight * among.density_unit / DENSITY_STEPS
            best = k if compared is None else config.shortlist and max(k, config.shortlist)
            requests.append(
                _REQUEST.pack(
                    position,
                    width,
                    config.candidates,
                    min(best, num_items),  # there is memory for each of them
                    0 if compared is None else min(k, num_items),
                    bits,
                    _give_codes(level0),
                    1 / HALF_NORM_STEPS,
                    density_step,
                    config.generator_weight,
                    0.0 if compared is None or compared.is_raw else density_step,
                    usage.ctypes.data,
                    among.first,
                    0.0,
                )
            )
        given = in_space = np.asarray(queries, dtype=np.float32).tobytes()
        if compared is not None and not is_residual(bits):
            in_space = b"".join([np.asarray(query, dtype=np.float32).tobytes() for query in compared.queries])
        try:
            work = _works.pop()
        except IndexError:
            address = self._library.make_work()
            if not address:
                raise MemoryError from None
            work = _Work.from_address(address)
        try:
            status = self._library.search(
                self._given_model,
                b"".join([packed for _, packed, _ in views.values()]),
                len(segments),
                b"".join(requests),
                given,
                in_space,
                len(requests),
                ctypes.addressof(work),
            )
            if status == NO_MEMORY:
                raise MemoryError
            if status < 0:
                raise LookupError("an ID table refers to rows or codes that do not exist")
            return _read(work, len(requests), len(self._tables))
        finally:
            _works.append(work)

    def _usage_among(self, level0: frozenset[int]) -> tuple[SpreadOf, Float32[np.ndarray, " codes"]]:
        """Return what is known of the items with these first codes, and their usage for the library."""
        if level0 not in self._known_usage:
            among = self._spread.among(level0)
            self._known_usage[level0] = among, np.pad(among.usage, (0, CODES - len(among.usage)))
        return self._known_usage[level0]

    def _view(
        self, segments: Sequence[SearchSegment], restriction: Restriction | None, compared: Compared | None
    ) -> tuple[bytes, int]:
        """Return what the library reads of segments, and their number of items; kept for the next query."""
        made_of = (segments, restriction, *(compared[1:3] if compared else (None, None)))
        last = self._last_view  # another thread may replace it
        if last is None or any(map(operator.is_not, last[0], made_of)):
            num_items = sum(segment.table.num_items for segment in segments)
            last = self._last_view = (made_of, (_give_segments(*made_of), num_items))
        return last[1]


class Compared(NamedTuple):
    """Stored embeddings that the library compares with queries."""

    queries: Sequence[Float32[np.ndarray, " dim"]]
    vectors: Sequence[StoredVectors]
    """Of each segment."""
    densities: Sequence[UInt8[np.ndarray, " items"]] | None
    """Of each segment; None: those of the IDs are taken."""
    is_raw: bool = False
    """Whether they are the encoder's features, whose densities cost nothing."""


_works: Final[list[_Work]] = []
"""Memory of the library's searches; each is used by one search at a time."""


def _pointers(arrays: dict[str, np.ndarray]) -> dict[str, int]:
    return {name: array.ctypes.data for name, array in arrays.items()}


def _pack(matrix: Float32[np.ndarray, "inputs outputs"]) -> Float32[np.ndarray, " weights"]:
    """Arrange a matrix for the library's products: blocks of 64 outputs."""
    padded = np.pad(matrix, ((0, 0), (0, -matrix.shape[1] % BLOCK)))
    return padded.reshape(len(matrix), -1, BLOCK).transpose(1, 0, 2).ravel().astype(np.float32)


def _pack_bytes(rounded: Float32[np.ndarray, "codes dim"]) -> UInt8[np.ndarray, " bytes"]:
    """Arrange a level's rounded code vectors for the library: blocks of 64, in groups of four dimensions."""
    codes, dim = rounded.shape
    padded = np.pad(rounded, ((0, -codes % BLOCK), (0, -dim % GROUP))) + ZERO_BYTE
    blocks = padded.astype(np.uint8).reshape(-1, BLOCK, len(padded[0]) // GROUP, GROUP)
    return np.ascontiguousarray(blocks.transpose(0, 2, 1, 3)).ravel()


def _pack_generator(w: FoldedWeights, c: Combination) -> dict[str, np.ndarray]:
    """Return the arrays of the library's generator, as it describes them."""
    squares = np.square(w.embeddings).mean(axis=1, keepdims=True)
    normed = w.embeddings / np.sqrt((squares + EPSILON) * w.embeddings.shape[1])
    arrays = {
        "prefix_weights": _pack(w.prefix_weights),
        "prefix_biases": w.prefix_biases,
        "prefix_keys_values": _pack(w.prefix_keys_values),
        "prefix_sides": np.concatenate([_pack(side) for side in w.prefix_sides]),
        "tokens": normed @ w.blocks[0].token,  # the first block's, which depend on nothing else
        "embeddings": w.embeddings,
        "distances": w.distances,
        **{
            name: np.concatenate([_pack(getattr(block, name)) for block in w.blocks])
            for name in BlockWeights._fields
        },
        "codes": np.concatenate([_pack(logits) for logits in w.codes]),
        "scales": c.scales,
        "gates": c.gates,
        "biases": np.stack([np.pad(bias, (0, CODES - len(bias))) for bias in c.biases]),
    }
    return {name: np.ascontiguousarray(array, dtype=np.float32) for name, array in arrays.items()}


def _pack_tables(tables: Sequence[Float32[np.ndarray, "_ dim"]]) -> dict[str, np.ndarray]:
    """Return the arrays of the library's model, as it describes them."""
    vectors = np.concatenate(tables)
    sizes = [len(table) for table in tables]
    wide = [np.pad(table, ((0, CODES - len(table)), (0, 0))) for table in tables]
    levels = sum(total <= GRAM_CODES for total in accumulate(sizes))
    first = vectors[: sum(sizes[:levels])]
    gram = [first @ table.T for table in wide[:levels]]
    starts = [0, *accumulate(sizes[:-1])]
    steps = np.abs(vectors).max(axis=1) / np.float32(LARGEST_BYTE)
    rounded = np.rint(vectors / np.where(steps > 0, steps, 1)[:, None])
    return {
        "sizes": np.array(sizes, dtype=np.int32),
        "vectors": np.ascontiguousarray(vectors),
        "bytes": np.concatenate([_pack_bytes(level) for level in np.split(rounded, starts[1:])]),
        "steps": steps,
        "coarsest": np.maximum.reduceat(steps, starts),
        "longest": np.maximum.reduceat(np.linalg.norm(vectors, axis=1), starts),
        "halves": np.stack([np.square(table).sum(axis=1) / 2 for table in wide]),
        "gram": np.ascontiguousarray(np.stack(gram, axis=1)) if gram else np.zeros((0, 0, CODES), np.float32),
    }


@lru_cache(maxsize=64)
def _give_codes(level0: frozenset[int]) -> bytes:
    """Return a bit vector of the allowed codes at level 0."""
    bits = sum(1 << code for code in level0 if code < CODES) if level0 else (1 << CODES) - 1
    return bits.to_bytes(CODES // 8, "little")


def _give_segments(
    segments: Sequence[SearchSegment],
    restriction: Restriction | None,
    vectors: Sequence[StoredVectors] | None,
    densities: Sequence[UInt8[np.ndarray, " _"]] | None,
) -> bytes:
    """Return the library's view of the segments, of their allowed items, and of their embeddings."""
    packed = b""
    for number, segment in enumerate(segments):
        allowed = segment.alive if restriction is None else restriction[number]
        packed += _SEGMENT.pack(
            _give_table(segment.table),
            *((0, 0, 0) if allowed is None else _give_allowed(allowed)),
            *((0, 0) if vectors is None else vectors[number].addresses),
            0 if vectors is None or densities is None else densities[number].ctypes.data,
        )
    return packed


_given_allowed: weakref.WeakKeyDictionary[RankedBits, tuple[np.ndarray, tuple[int, int, int]]] = (
    weakref.WeakKeyDictionary()
)


def _give_allowed(allowed: Allowed) -> tuple[int, int, int]:
    given = _given_allowed.get(allowed.ids)
    if given is None or given[0] is not allowed.items:
        words, before, items = allowed.ids.words, allowed.ids.before, allowed.items
        given = (items, (words.ctypes.data, before.ctypes.data, items.ctypes.data))
        _given_allowed[allowed.ids] = given
    return given[1]


_given_tables: weakref.WeakKeyDictionary[IdTable, _Table] = weakref.WeakKeyDictionary()


def _give_table(table: IdTable) -> int:
    """Return the address of the library's view of a table."""
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
        given.address = ctypes.addressof(given)
        given = _given_tables.setdefault(table, given)  # another thread may have been first, and use its own
    return int(given.address)


def _read(work: _Work, num_queries: int, num_levels: int) -> list[Found]:
    """Copy the hits of queries out of the memory of their search."""
    results = list(_RESULT.iter_unpack(ctypes.string_at(work.results, num_queries * _RESULT.size)))
    count = sum(num_hits for num_hits, _ in results)
    hits = np.frombuffer(ctypes.string_at(work.hits, count * HIT.itemsize), HIT)
    decoded = np.frombuffer(ctypes.string_at(work.decoded, count * num_levels * 4), np.float32)
    decoded = decoded.reshape(count, num_levels)
    found, start = [], 0
    for num_hits, touched in results:
        own = hits[start : start + num_hits]
        ranking = Ranking(own["segment"], own["item"], own["row"], own["score"], own["beam"], touched)
        found.append(Found(ranking, decoded[start : start + num_hits]))
        start += num_hits
    return found
