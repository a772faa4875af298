"""From query embeddings to ranked items: by the compiled library, or by PyTorch for what that does not know.

The library (``native/search.c``) finds what :func:`genius_search.search.beam.search` and
:func:`genius_search.search.beam.rank_items` find, with the same scores up to rounding, in a small part of the
time. The structures here are its own.
"""

from __future__ import annotations

import ctypes
import operator
import os
import struct
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from jaxtyping import Float32, Int32, UInt8

from genius_search.config import SearchSettings
from genius_search.errors import ArtifactMismatch, UsageError, need_packages
from genius_search.native.build import BLOCK, CODES, NO_MEMORY, open_library
from genius_search.nn.codebooks import normalize
from genius_search.nn.spread import DENSITY_STEPS, HALF_NORM_STEPS, Residuals, TargetSpread
from genius_search.search.rank import CodeRanker, Evidence, Ranking, VectorReader, Wanted
from genius_search.search.table import IdTable, Restriction, SearchSegment
from genius_search.search.vectors import StoredVectors, is_residual

if TYPE_CHECKING:  # most searches need no decoder in PyTorch
    from genius_search.nn.packed import PackedGenerator
    from genius_search.search.beam import Decoder

NO_EMBEDDINGS: Final = (
    "this index stores no embeddings; rank by codes, or create it with `embeddings='fused'`"
)
MAX_LEVELS: Final = 255
GRAM_CODES: Final = 1024
"""Inner products between code vectors are computed in advance for the first levels, up to this many codes."""
CODED_STARTS: Final = 1 << 20
"""Codes at the starts of a table's branches are copied in advance for the first levels, up to this many."""
LARGEST: Final = 127 * 256 + 127
"""Of a code vector's numbers in 16 bits, whose lower byte is signed, too."""
GROUP: Final = 4
"""Dimensions of code vectors in 16 bits that lie side by side."""
QUERIES_A_THREAD: Final = 16
"""Fewest queries that a further thread is started for."""
HIT: Final = np.dtype(
    [*((name, "i8") for name in ("segment", "item", "row", "beam")), ("score", "f4"), ("", "f4")]
)


def find(
    decoder: Callable[[], Decoder],
    fast: CompiledSearch | None,
    segments: Sequence[SearchSegment],
    queries: Float32[np.ndarray, "queries dim"],
    wanted: Sequence[Wanted],
    config: SearchSettings,
    *,
    evidence: Evidence,
    embeddings: Sequence[Float32[np.ndarray, " dim"]],
) -> list[Ranking]:
    """Search for queries and rank the items under their beams.

    Parameters
    ----------
    decoder
        returns the decoder of the search in PyTorch; called only if ``fast`` cannot take its place.
    fast
        a search that finds what the decoder does, for the settings and tables that it covers.
    embeddings
        each query's vector in the space of the stored embeddings; see
        :func:`genius_search.search.beam.rank_items`.

    Raises
    ------
    UsageError
        The data that the re-ranking needs is not available.
    """
    if config.rerank == "embeddings" and evidence.embeddings is None:
        raise UsageError(NO_EMBEDDINGS)
    if fast is not None and fast.covers(segments, config, evidence.embeddings):
        return fast.search(segments, queries, wanted, config, evidence, embeddings)

    need_packages("without the compiled library, and for some settings, a search needs", "torch")
    import torch  # noqa: PLC0415  only here

    from genius_search.search.beam import (  # noqa: PLC0415
        GeometricDecoder,
        rank_items,
        search,
    )

    used = decoder()
    # A generator was trained with queries of unit length.
    given = queries if isinstance(used, GeometricDecoder) else normalize(queries)
    beams = search(
        used,
        segments,
        torch.from_numpy(given),
        config,
        level0=[one.level0 for one in wanted],
        restrictions=[one.restriction for one in wanted],
        widths=[one.width for one in wanted],
    )
    return [
        rank_items(
            segments,
            beams,
            number,
            vector,
            config=config,
            evidence=evidence,
            k=one.k,
            restriction=one.restriction,
            level0=one.level0,
            for_codes=queries[number],
        )
        for number, (one, vector) in enumerate(zip(wanted, embeddings, strict=True))
    ]


def quick_search(
    ranker: CodeRanker, generator: PackedGenerator | None = None
) -> CompiledSearch | None:
    """Return the compiled search by code vectors, or by a generator.

    None without the compiled library, with over 256 codes at a level, or if the generator's guide has other
    code vectors than the ranker.
    """
    tables = ranker.tables()
    if max(map(len, tables)) > CODES or len(tables) > MAX_LEVELS:
        return None
    guide = None if generator is None else generator.guide
    if guide is not None and not np.array_equal(guide, np.concatenate(tables)):
        return None
    opened = open_library()
    return None if opened is None else CompiledSearch(ranker, opened, generator)


def count_cores() -> int:
    """Return the number of cores for a batch: all that this process may use, or ``OMP_NUM_THREADS``."""
    try:
        return int(os.environ["OMP_NUM_THREADS"])
    except (KeyError, ValueError):
        return (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
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
        *_fields(ctypes.c_void_p, "generator sizes vectors bytes steps halves gram"),
        *_fields(ctypes.c_void_p, "residual_weights constant"),
        ("norm_weight", ctypes.c_float),
    )


class _Work(ctypes.Structure):
    """What the library's searches leave in their memory."""

    _fields_ = tuple(_fields(ctypes.c_void_p, "hits decoded results"))


_SEGMENT: Final = struct.Struct("6PqP")
_REQUEST: Final = struct.Struct("6q32s3fP2f")
_works: Final[list[_Work]] = []
"""Memory of the library's searches; each is used by one search at a time."""


class CompiledSearch:
    """Search by code vectors, or by a generator, in the compiled library.

    Parameters
    ----------
    ranker
        scores IDs by the code vectors; its tables must not change.
    generator
        what scores the codes that follow a prefix; without it, nearness to the query does.
    """

    def __init__(
        self, ranker: CodeRanker, library: ctypes.CDLL, generator: PackedGenerator | None = None
    ) -> None:
        self._library = library
        self._spread = ranker.spread
        tables = ranker.tables()
        self._num_levels, self._dim = len(tables), tables[0].shape[1]
        residuals = ranker.spread.residuals or Residuals.unweighted(self._dim)
        norm_weight = ranker.norm_weight if generator is None else 1.0  # as its guide was trained
        self._arrays = _pack_tables(tables, norm_weight)
        self._arrays |= {
            "residual_weights": np.ascontiguousarray(residuals.weights),
            "constant": np.ascontiguousarray(residuals.constant),
        }
        self._model = _Model(
            levels=self._num_levels,
            dim=self._dim,
            gram_levels=self._arrays["gram"].shape[1],
            first_level=self._spread.level,
            num_constant=len(residuals.constant),
            norm_weight=norm_weight,
            **_pointers(self._arrays),
        )
        self._packed = generator
        if generator is not None:
            self._generator = _Generator(**generator.sizes, **_pointers(generator.arrays))
            self._model.generator = ctypes.addressof(self._generator)
        self._given_model = ctypes.addressof(self._model)
        self._among: dict[frozenset[int], tuple[TargetSpread, bytes]] = {}

    def covers(
        self,
        segments: Sequence[SearchSegment],
        config: SearchSettings,
        vectors: Sequence[VectorReader] | None = None,
    ) -> bool:
        """Return whether this search knows such settings, tables and stored embeddings."""
        if config.rerank == "none" or (config.scores == "vocabulary" and self._packed is not None):
            return False
        for segment in segments:
            if segment.table.ids.dtype != np.uint8:
                return False
        return not vectors or config.rerank != "embeddings" or isinstance(vectors[0], StoredVectors)

    def search(
        self,
        segments: Sequence[SearchSegment],
        queries: Float32[np.ndarray, "queries dim"],
        wanted: Sequence[Wanted],
        config: SearchSettings,
        evidence: Evidence,
        embeddings: Sequence[Float32[np.ndarray, " dim"]],
    ) -> list[Ranking]:
        """Find the best items for each query, by codes or by stored embeddings; see :func:`find`.

        A batch is searched by several threads.
        """
        threads = len(wanted) // QUERIES_A_THREAD
        if threads > 1:
            threads = min(threads, count_cores())
        if threads <= 1:
            return self._search_in_turn(segments, queries, wanted, config, evidence, embeddings)
        bounds = [len(wanted) * number // threads for number in range(threads + 1)]

        def search_some(low: int, high: int) -> list[Ranking]:
            some = slice(low, high)
            return self._search_in_turn(
                segments, queries[some], wanted[some], config, evidence, embeddings[some]
            )

        with ThreadPoolExecutor(threads) as executor:
            found = executor.map(search_some, bounds[:-1], bounds[1:])
            return [one for some in found for one in some]

    def _search_in_turn(
        self,
        segments: Sequence[SearchSegment],
        queries: Float32[np.ndarray, "queries dim"],
        wanted: Sequence[Wanted],
        config: SearchSettings,
        evidence: Evidence,
        embeddings: Sequence[Float32[np.ndarray, " dim"]],
    ) -> list[Ranking]:
        """Search for queries one after the other, in one call of the library."""
        vectors = evidence.embeddings if config.rerank == "embeddings" else None
        bits = vectors[0].bits if vectors and isinstance(vectors[0], StoredVectors) else 16
        views: dict[int, tuple[int, bytes, int]] = {}
        requests = []
        for width, k, level0, restriction in wanted:
            if id(restriction) not in views:
                made_of = (segments, restriction, vectors)
                last = evidence.last_view  # another thread may replace it
                if last is None or any(map(operator.is_not, last[0], made_of)):
                    num_items = sum(segment.table.num_items for segment in segments)
                    last = made_of, _give_segments(*made_of, evidence.densities), num_items
                    evidence.last_view = last
                views[id(restriction)] = (len(views) * len(segments), *last[1:])
            position, _, num_items = views[id(restriction)]
            if level0 not in self._among:
                among = self._spread.target_spread(level0)
                self._among[level0] = among, _bits_of(level0)
            among, allowed = self._among[level0]
            density_step = config.density_weight / DENSITY_STEPS
            best = k if vectors is None else config.shortlist and max(k, config.shortlist)
            requests.append(
                _REQUEST.pack(
                    position,
                    width,
                    config.candidates,
                    min(best, num_items),  # there is memory for each of them
                    0 if vectors is None else min(k, num_items),
                    bits,
                    allowed,
                    1 / HALF_NORM_STEPS,
                    density_step
                    if vectors is None
                    else 0.0,  # a shortlist is chosen without densities
                    0.0 if evidence.is_raw else density_step,  # the densities are not the encoder's
                    among.usage.ctypes.data,
                    among.deviation,
                    evidence.fade_width,
                )
            )
        given = in_space = np.asarray(queries, dtype=np.float32).tobytes()
        if vectors is not None and not is_residual(bits):
            in_space = b"".join([np.asarray(one, dtype=np.float32).tobytes() for one in embeddings])
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
                raise ArtifactMismatch(
                    "an ID table refers to rows, codes or levels that do not exist; create the index again"
                )
            return _read(work, len(requests), self._num_levels)
        finally:
            _works.append(work)


def _pointers(arrays: dict[str, np.ndarray]) -> dict[str, int]:
    return {name: array.ctypes.data for name, array in arrays.items()}


def _pack_bytes(rounded: Int32[np.ndarray, "codes dim"]) -> UInt8[np.ndarray, " bytes"]:
    """Arrange a level's code vectors in 16 bits for the library: blocks of 64, in groups of four dimensions.

    In each group the upper bytes come first, then the lower ones; both are signed, and stored plus 128.
    """
    codes, dim = rounded.shape
    padded = np.pad(rounded, ((0, -codes % BLOCK), (0, -dim % GROUP)))
    upper = (padded + 128) >> 8
    halves = np.stack([upper, padded - 256 * upper]) + 128
    blocks = halves.astype(np.uint8).reshape(2, -1, BLOCK, len(padded[0]) // GROUP, GROUP)
    return np.ascontiguousarray(blocks.transpose(1, 3, 0, 2, 4)).ravel()


def _pack_tables(
    tables: Sequence[Float32[np.ndarray, "_ dim"]], norm_weight: float
) -> dict[str, np.ndarray]:
    """Return the arrays of the library's model, as it describes them."""
    vectors = np.concatenate(tables)
    sizes = [len(table) for table in tables]
    wide = [np.pad(table, ((0, CODES - len(table)), (0, 0))) for table in tables]
    levels = sum(total <= GRAM_CODES for total in accumulate(sizes))
    first = vectors[: sum(sizes[:levels])]
    gram = [norm_weight * (first @ table.T) for table in wide[:levels]]
    starts = [0, *accumulate(sizes[:-1])]
    largest = np.abs(vectors).max(axis=1)
    # Powers of two, with which small integers are exact.
    steps = np.exp2(np.ceil(np.log2(np.where(largest > 0, largest, 1) / np.float32(LARGEST))))
    rounded = np.rint(vectors / steps[:, None]).astype(np.int32)
    return {
        "sizes": np.array(sizes, dtype=np.int32),
        "vectors": np.ascontiguousarray(vectors),
        "bytes": np.concatenate([_pack_bytes(level) for level in np.split(rounded, starts[1:])]),
        "steps": steps.astype(np.float32),
        "halves": np.stack([np.square(table).sum(axis=1) * (norm_weight / 2) for table in wide]),
        "gram": np.ascontiguousarray(np.stack(gram, axis=1))
        if gram
        else np.zeros((0, 0, CODES), np.float32),
    }


def _bits_of(level0: frozenset[int]) -> bytes:
    """Return a bit vector of the allowed codes at level 0."""
    bits = sum(1 << code for code in level0 if code < CODES) if level0 else (1 << CODES) - 1
    return bits.to_bytes(CODES // 8, "little")


def _give_segments(
    segments: Sequence[SearchSegment],
    restriction: Restriction | None,
    vectors: Sequence[Any] | None,
    densities: Sequence[UInt8[np.ndarray, " _"]] | None,
) -> bytes:
    """Return the library's view of the segments, of their allowed items, and of their embeddings."""
    packed = b""
    for number, segment in enumerate(segments):
        allowed = segment.alive if restriction is None else restriction[number]
        masks = () if allowed is None else (allowed.ids.words, allowed.ids.before, allowed.items)
        packed += _SEGMENT.pack(
            _give_table(segment.table),
            *([mask.ctypes.data for mask in masks] or (0, 0, 0)),
            *((0, 0, 0) if vectors is None else vectors[number].addresses),
            0 if vectors is None or densities is None else densities[number].ctypes.data,
        )
    return packed


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
            columns=table.ids.shape[1],
            rows=len(table),
            num_items=table.num_items,
            num_start_codes=known,
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
        given = _given_tables.setdefault(
            table, given
        )  # another thread may have been first, and use its own
    return int(given.address)


def _read(work: _Work, num_queries: int, num_levels: int) -> list[Ranking]:
    """Copy the hits of queries out of the memory of their search."""
    results = np.frombuffer(ctypes.string_at(work.results, num_queries * 16), np.int64).reshape(
        -1, 2
    )
    count = int(results[:, 0].sum())
    hits = np.frombuffer(ctypes.string_at(work.hits, count * HIT.itemsize), HIT)
    decoded = np.frombuffer(ctypes.string_at(work.decoded, count * num_levels * 4), np.float32)
    decoded = decoded.reshape(count, num_levels)
    found, start = [], 0
    for num_hits, touched in results.tolist():
        own, steps = hits[start : start + num_hits], decoded[start : start + num_hits]
        found.append(
            Ranking(
                own["segment"], own["item"], own["row"], own["score"], own["beam"], steps, touched
            )
        )
        start += num_hits
    return found
