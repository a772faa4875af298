"""From encoded queries to ranked items, by the compiled library, NumPy or PyTorch.

The library (``native/search.c``) returns, up to the rounding of scores, the results of
:func:`genius_search.search.cells.rank_cells` for IDs with fine codes, and otherwise those of
:func:`genius_search.search.beam.find_beams` and :func:`genius_search.search.beam.rank_items`. These
replace it where it is missing, or does not support the settings and tables. In large pools it
leaves out cells that :func:`~genius_search.search.cells.rank_cells` ranks, too
(:attr:`SearchSettings.margin <genius_search.config.SearchSettings.margin>`). The structures in this
module mirror those of search.c, field by field.
"""

from __future__ import annotations

import ctypes
import operator
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from jaxtyping import Float32, Int32, UInt8

from genius_search.config import SearchSettings, narrow_search
from genius_search.errors import ArtifactMismatch, UsageError, need_packages
from genius_search.native.build import BLOCK, CODES, NO_MEMORY, open_library
from genius_search.nn.codebooks import normalize
from genius_search.nn.spread import DENSITY_STEPS, HALF_NORM_STEPS, Residuals, TargetSpread
from genius_search.search.cells import CellGrid, pack_fine_vectors, rank_cells
from genius_search.search.rank import (
    Candidates,
    CodeRanker,
    Evidence,
    PackedSegments,
    SearchQuery,
    VectorReader,
)
from genius_search.search.table import (
    Allowed,
    IdTable,
    Restriction,
    SearchSegment,
    count_allowed,
)
from genius_search.search.vectors import RESIDUAL_BITS, StoredFineCodes, StoredVectors

if TYPE_CHECKING:  # most searches need no decoder in PyTorch
    from genius_search.nn.packed import PackedGenerator
    from genius_search.search.beam import Decoder

NO_EMBEDDINGS: Final = (
    "this index stores no embeddings; rank by codes, or create it with `embeddings='fused'`"
)
MAX_LEVELS: Final = 255
MAX_GRAM_CODES: Final = 1024
"""Inner products between code vectors are computed in advance for the first levels, up to this many
codes."""
MAX_START_CODES: Final = 1 << 20
"""Codes at the starts of a table's branches are copied in advance for the first levels, up to this
many."""
MAX_SPLIT_NUMBER: Final = 127 * 256 + 127
"""Largest 16-bit number 256 a + b whose bytes a and b are both signed."""
GROUP_DIMENSIONS: Final = 4
"""Adjacent dimensions of code vectors in 16 bits; an instruction multiplies four pairs of bytes."""
FIRST_ROWS: Final = 8192
"""Number of items in the best cells that are scanned before other cells are left out."""
MIN_QUERIES_PER_THREAD: Final = 16
"""A batch gets a further thread for each this many queries."""
HIT_TYPE: Final = np.dtype(
    [
        ("segment", "i8"),
        ("item", "i8"),
        ("row", "i8"),
        ("beam", "i8"),
        ("score", "f4"),
        ("unused", "f4"),
    ]
)
"""The structure Hit of search.c."""
RESULT_BYTES: Final = 16
"""Size of the structure Result of search.c: two 64-bit integers, num_hits and num_ranked."""


def search_segments(
    open_decoder: Callable[[], Decoder],
    compiled: CompiledSearch | None,
    segments: Sequence[SearchSegment],
    queries: Sequence[SearchQuery],
    config: SearchSettings,
    evidence: Evidence,
) -> list[Candidates]:
    """Rank the items of the cells near each query, or those under its beams if IDs are whole.

    Parameters
    ----------
    open_decoder
        returns the decoder of the search in PyTorch; called only if ``compiled`` cannot search.
    compiled
        a search with the decoder's results, for the settings and tables that it supports.

    Raises
    ------
    UsageError
        The data that the re-ranking needs is not available.
    """
    if config.rerank == "embeddings" and evidence.embeddings is None:
        raise UsageError(NO_EMBEDDINGS)
    if compiled is not None and compiled.supports(segments, config, evidence.embeddings):
        return compiled.search(segments, queries, config, evidence)
    if evidence.codes is not None and evidence.codes.fine is not None:
        ranker = evidence.codes
        return [rank_cells(ranker, segments, query, config, evidence) for query in queries]
    need_packages("without the compiled library, and for some settings, a search needs", "torch")
    return _search_in_torch(open_decoder(), segments, queries, config, evidence)


def _search_in_torch(
    decoder: Decoder,
    segments: Sequence[SearchSegment],
    queries: Sequence[SearchQuery],
    config: SearchSettings,
    evidence: Evidence,
) -> list[Candidates]:
    """Find beams and rank the items under them in PyTorch."""
    import torch  # noqa: PLC0415  only here

    from genius_search.search.beam import (  # noqa: PLC0415
        GeometricDecoder,
        find_beams,
        rank_items,
    )

    fused = np.stack([query.fused for query in queries])
    # A generator was trained with queries of unit length.
    decoded = fused if isinstance(decoder, GeometricDecoder) else normalize(fused)
    beams = find_beams(
        decoder,
        segments,
        torch.from_numpy(decoded),
        config,
        level0=[query.level0 for query in queries],
        restrictions=[query.restriction for query in queries],
        widths=[query.beam or config.beam for query in queries],
    )
    return [
        rank_items(
            segments,
            beams,
            number,
            query.compared,
            config=config,
            evidence=evidence,
            k=query.k,
            restriction=query.restriction,
            level0=query.level0,
            code_vector=query.fused,
        )
        for number, query in enumerate(queries)
    ]


def open_compiled_search(
    ranker: CodeRanker, generator: PackedGenerator | None = None
) -> CompiledSearch | None:
    """Return the compiled search by code vectors, or by a generator.

    Returns
    -------
    None without the compiled library, with over 256 codes at a level, or if the code vectors of the
    generator's guide differ from the ranker's.
    """
    tables = ranker.tables()
    if max(map(len, tables)) > CODES or len(tables) > MAX_LEVELS:
        return None
    guide = None if generator is None else generator.guide
    if guide is not None and not np.array_equal(guide, np.concatenate(tables)):
        return None
    library = open_library()
    return None if library is None else CompiledSearch(ranker, library, generator)


def count_cores() -> int:
    """Return the number of cores for a batch: ``OMP_NUM_THREADS``, or all of this process."""
    try:
        return int(os.environ["OMP_NUM_THREADS"])
    except (KeyError, ValueError):
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1


def _fields(field_type: Any, names: str) -> list[tuple[str, Any]]:
    """Return the fields of a structure that have the same type."""
    return [(name, field_type) for name in names.split()]


class _Table(ctypes.Structure):
    """Table of search.c: an :class:`IdTable`."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "ids starts level_bounds start_codes bucket_starts items"),
        *_fields(ctypes.c_int64, "columns rows num_items num_start_codes"),
    )


class _Part(ctypes.Structure):
    """Part of search.c: a table, and its items that may be returned."""

    _fields_ = (
        *_fields(ctypes.c_void_p, "table words before allowed embeddings scales"),
        ("embedding_bytes", ctypes.c_int64),
        *_fields(ctypes.c_void_p, "densities fine cell_starts positions"),
        *_fields(ctypes.c_void_p, "sampled_counts allowed_counts lengths occupied"),
        ("num_occupied", ctypes.c_int64),
    )


class _Generator(ctypes.Structure):
    """Generator of search.c: the weights of a generator."""

    _fields_ = (
        *_fields(ctypes.c_int64, "width feedforward heads head_width prefixes blocks"),
        *_fields(ctypes.c_void_p, "prefix_weights prefix_biases prefix_keys_values prefix_sides"),
        *_fields(ctypes.c_void_p, "tokens embeddings distances token token_out up down"),
        *_fields(ctypes.c_void_p, "codes scales gates biases"),
    )


class _Model(ctypes.Structure):
    """Model of search.c: code vectors, and a generator or NULL."""

    _fields_ = (
        *_fields(ctypes.c_int64, "levels dim gram_levels first_level num_constant"),
        *_fields(ctypes.c_void_p, "generator sizes vectors bytes steps halves gram"),
        *_fields(ctypes.c_void_p, "residual_weights constant"),
        ("fine_codes", ctypes.c_int64),
        ("grid", ctypes.c_int64 * 3),
        *_fields(ctypes.c_int64, "cell_dim num_sampled"),
        *_fields(ctypes.c_void_p, "cell_vectors cell_steps cell_costs least_costs sampled_cells"),
        *_fields(ctypes.c_void_p, "fine_vectors fine_ends fine_norms"),
        *_fields(ctypes.c_float, "norm_weight largest_cell_cost"),
    )


_CodeBits = ctypes.c_uint8 * (CODES // 8)
"""Bit vector of codes: code c is bit ``c % 8`` of byte ``c // 8``."""


class _Request(ctypes.Structure):
    """Request of search.c: a query's limits, and the costs that its scores lose."""

    _fields_ = (
        *_fields(ctypes.c_int64, "first_part width candidates k compared_k compared_bits"),
        ("level0", _CodeBits),
        *_fields(ctypes.c_float, "half_norm_step density_step compared_density_step"),
        ("usage", ctypes.c_void_p),
        *_fields(ctypes.c_float, "reference fade_width margin"),
        ("first_rows", ctypes.c_int64),
    )


class _Work(ctypes.Structure):
    """The first fields of Work of search.c: the hits of its last search, in its memory."""

    _fields_ = tuple(_fields(ctypes.c_void_p, "hits decoded results"))


class _FirstCodes(NamedTuple):
    """Data of the allowed level-0 codes of a query; cached."""

    spread: TargetSpread
    """Statistics of the items with one of the codes."""
    bits: Any
    """The codes as :data:`_CodeBits`."""


class PreparedSearch(NamedTuple):
    """A search in the compiled library of which all is ready but the vectors of the query."""

    compiled: CompiledSearch
    packed: PackedSegments
    request: bytes
    compares_fused: bool
    """Whether the library reads the fused embedding in place of the compared vector, too."""

    def search(
        self, fused: Float32[np.ndarray, " dim"], compared: Float32[np.ndarray, " dim"]
    ) -> Candidates:
        """Find the best items for a query."""
        fused_bytes = np.asarray(fused, dtype=np.float32).tobytes()
        compared_bytes = fused_bytes
        if not self.compares_fused:
            compared_bytes = np.asarray(compared, dtype=np.float32).tobytes()
        parts = self.packed.parts
        num_segments = len(parts) // ctypes.sizeof(_Part)
        [candidates] = self.compiled._call_library(  # noqa: SLF001  of this module
            parts, num_segments, self.request, fused_bytes, compared_bytes, 1
        )
        return candidates


_free_works: Final[list[_Work]] = []
"""Memory of the library's searches that no search uses now; a search takes one and returns it."""


class CompiledSearch:
    """Search by code vectors, or by a generator, in the compiled library.

    Parameters
    ----------
    ranker
        scores IDs by the code vectors; its tables must not change.
    generator
        scores the codes that follow a prefix; without it, their distance to the query does.
    """

    def __init__(
        self, ranker: CodeRanker, library: ctypes.CDLL, generator: PackedGenerator | None = None
    ) -> None:
        self._library = library
        self._spread = ranker.spread
        tables = ranker.tables()
        self._num_levels = len(tables)
        dim = tables[0].shape[1]
        residuals = ranker.spread.residuals or Residuals.unweighted(dim)
        norm_weight = ranker.norm_weight if generator is None else 1.0  # as its guide was trained
        self._arrays = _pack_tables(tables, norm_weight)
        self._arrays["residual_weights"] = np.ascontiguousarray(residuals.weights)
        self._arrays["constant"] = np.ascontiguousarray(residuals.constant)
        self._model = _Model(
            levels=self._num_levels,
            dim=dim,
            gram_levels=self._arrays["gram"].shape[1],
            first_level=self._spread.level,
            num_constant=len(residuals.constant),
            norm_weight=norm_weight,
            **_addresses(self._arrays),
        )
        self._grid: CellGrid | None = None
        if ranker.fine is not None and generator is None:
            self._grid = CellGrid(tables, norm_weight, has_modality_level=bool(self._spread.level))
            cell_arrays = {**self._grid.arrays, **pack_fine_vectors(ranker.fine)}
            self._arrays |= cell_arrays
            self._model.fine_codes = ranker.fine.num_codes
            self._model.grid = self._grid.sizes
            self._model.cell_dim = self._grid.dim
            self._model.num_sampled = len(self._grid.arrays["sampled_cells"])
            self._model.largest_cell_cost = self._grid.largest_cost
            for name, address in _addresses(cell_arrays).items():
                setattr(self._model, name, address)
        self._packed_generator = generator  # the library reads its arrays
        if generator is not None:
            self._generator = _Generator(**generator.sizes, **_addresses(generator.arrays))
            self._model.generator = ctypes.addressof(self._generator)
        self._model_address = ctypes.addressof(self._model)
        self._first_codes: dict[frozenset[int], _FirstCodes] = {}
        self._last_requests: dict[frozenset[int], tuple[tuple[Any, ...], bytes]] = {}
        """The last request for each set of first codes, and what it depends on."""

    def supports(
        self,
        segments: Sequence[SearchSegment],
        config: SearchSettings,
        vectors: Sequence[VectorReader] | None = None,
    ) -> bool:
        """Return whether this search supports such settings, tables and stored embeddings."""
        has_generator = self._packed_generator is not None
        if config.rerank == "none" or (config.scores == "vocabulary" and has_generator):
            return False
        for segment in segments:
            if segment.table.ids.dtype != np.uint8:
                return False
        return not vectors or config.rerank != "embeddings" or isinstance(vectors[0], StoredVectors)

    def search(
        self,
        segments: Sequence[SearchSegment],
        queries: Sequence[SearchQuery],
        config: SearchSettings,
        evidence: Evidence,
    ) -> list[Candidates]:
        """Find the best items for each query, by codes or by stored embeddings.

        A batch is searched by several threads.
        """
        threads = len(queries) // MIN_QUERIES_PER_THREAD
        if threads > 1:
            threads = min(threads, count_cores())
        if threads <= 1:
            return self._search_batch(segments, queries, config, evidence)

        def search_slice(low: int, high: int) -> list[Candidates]:
            return self._search_batch(segments, queries[low:high], config, evidence)

        bounds = [len(queries) * number // threads for number in range(threads + 1)]
        with ThreadPoolExecutor(threads) as executor:
            slices = executor.map(search_slice, bounds[:-1], bounds[1:])
            return [ranking for rankings in slices for ranking in rankings]

    def _search_batch(
        self,
        segments: Sequence[SearchSegment],
        queries: Sequence[SearchQuery],
        config: SearchSettings,
        evidence: Evidence,
    ) -> list[Candidates]:
        """Search for queries one after the other, in one call of the library.

        Queries with the same restriction share their parts. With three segments, parts 0, 1 and 2
        belong to the first restriction, parts 3, 4 and 5 to the second, and so on.
        """
        vectors = evidence.embeddings if config.rerank == "embeddings" else None
        bits = _bits_of(vectors)
        packed_of: dict[int, tuple[int, PackedSegments]] = {}
        requests = []
        for query in queries:
            if id(query.restriction) not in packed_of:
                packed = _pack_segments(segments, query.restriction, vectors, evidence, self._grid)
                packed_of[id(query.restriction)] = len(packed_of) * len(segments), packed
            first_part, packed = packed_of[id(query.restriction)]
            requests.append(self._request(query, config, evidence, bits, first_part, packed))
        fused = [np.asarray(query.fused, dtype=np.float32).tobytes() for query in queries]
        compared = fused
        if vectors is not None and bits not in RESIDUAL_BITS:
            compared = [np.asarray(query.compared, dtype=np.float32).tobytes() for query in queries]
        return self._call_library(
            b"".join([packed.parts for _, packed in packed_of.values()]),
            len(segments),
            b"".join(requests),
            b"".join(fused),
            b"".join(compared),
            len(requests),
        )

    def prepare(
        self,
        segments: Sequence[SearchSegment],
        query: SearchQuery,
        config: SearchSettings,
        evidence: Evidence,
    ) -> PreparedSearch:
        """Return the search for queries that differ from one in their vectors alone."""
        vectors = evidence.embeddings if config.rerank == "embeddings" else None
        bits = _bits_of(vectors)
        packed = _pack_segments(segments, query.restriction, vectors, evidence, self._grid)
        request = self._request(query, config, evidence, bits, 0, packed)
        return PreparedSearch(self, packed, request, vectors is None or bits in RESIDUAL_BITS)

    def _request(
        self,
        query: SearchQuery,
        config: SearchSettings,
        evidence: Evidence,
        bits: int,
        first_part: int,
        packed: PackedSegments,
    ) -> bytes:
        """Return the request of a query; the last one is cached, since most are alike.

        ``bits`` are those per number of the stored embeddings.
        """
        num_items = packed.num_items  # the library has memory for as many hits
        if self._grid is not None and query.restriction is not None:
            config = narrow_search(config, num_items, packed.num_allowed)
        key = (
            config,
            query.level0,
            query.k,
            query.beam or config.beam,
            num_items,
            first_part,
            bits,
            evidence.is_raw,
            evidence.fade_width,
        )
        last = self._last_requests.get(query.level0)  # another thread may replace it
        if last is None or last[0] != key:
            last = key, bytes(self._pack_request(*key))
            self._last_requests[query.level0] = last
        return last[1]

    def _pack_request(
        self,
        config: SearchSettings,
        level0: frozenset[int],
        num_hits: int,
        width: int,
        num_items: int,
        first_part: int,
        bits: int,
        is_raw: bool,  # noqa: FBT001  called by position
        fade_width: float,
    ) -> _Request:
        """Return the structure of a request; see :meth:`_request`."""
        first_codes = self._first_codes.get(level0)
        if first_codes is None:
            spread = self._spread.target_spread(level0)
            first_codes = _FirstCodes(spread, _code_bits(level0))
            self._first_codes[level0] = first_codes
        density_step = config.density_weight / DENSITY_STEPS
        request = _Request(
            first_part=first_part,
            width=width,
            candidates=config.candidates,
            compared_bits=bits,
            level0=first_codes.bits,
            half_norm_step=1 / HALF_NORM_STEPS,
            usage=first_codes.spread.usage.ctypes.data,
            reference=first_codes.spread.deviation,
            fade_width=fade_width,
            margin=config.margin,
            first_rows=FIRST_ROWS,
        )
        if config.rerank == "embeddings":
            # A shortlist is chosen without densities, and those of raw features are not stored.
            shortlist = config.shortlist and max(num_hits, config.shortlist)
            request.k = min(shortlist, num_items)
            request.compared_k = min(num_hits, num_items)
            request.compared_density_step = 0.0 if is_raw else density_step
        else:
            request.k = min(num_hits, num_items)
            request.density_step = density_step
        return request

    def _call_library(
        self,
        parts: bytes,
        num_segments: int,
        requests: bytes,
        fused: bytes,
        compared: bytes,
        num_queries: int,
    ) -> list[Candidates]:
        """Call the library with memory that no other search uses, and copy the hits out of it."""
        try:
            work = _free_works.pop()
        except IndexError:
            address = self._library.make_work()
            if not address:
                raise MemoryError from None
            work = _Work.from_address(address)
        try:
            status = self._library.search(
                self._model_address,
                parts,
                num_segments,
                requests,
                fused,
                compared,
                num_queries,
                ctypes.addressof(work),
            )
            if status == NO_MEMORY:
                raise MemoryError
            if status < 0:
                raise ArtifactMismatch(
                    "an ID table refers to rows, codes or levels that do not exist; create the "
                    "index again"
                )
            return _read_candidates(work, num_queries, self._num_levels)
        finally:
            _free_works.append(work)


def _bits_of(vectors: Sequence[VectorReader] | None) -> int:
    """Return the bits per number of the stored embeddings; 16 without them."""
    return vectors[0].bits if vectors and isinstance(vectors[0], StoredVectors) else 16


def _addresses(arrays: dict[str, np.ndarray]) -> dict[str, int]:
    return {name: array.ctypes.data for name, array in arrays.items()}


def _pack_bytes(rounded: Int32[np.ndarray, "codes dim"]) -> UInt8[np.ndarray, " bytes"]:
    """Arrange a level's code vectors in 16 bits for the library: [blocks][groups][2][BLOCK][4].

    A number n is split into signed bytes, n = 256 a + b, which are stored as a + 128 and b + 128.
    A block has 64 codes. Within a block, each group of four dimensions has the upper bytes of all
    codes, then the lower bytes.
    """
    num_codes, dim = rounded.shape
    padded = np.pad(rounded, ((0, -num_codes % BLOCK), (0, -dim % GROUP_DIMENSIONS)))
    upper = (padded + 128) >> 8
    split = np.stack([upper, padded - 256 * upper]) + 128
    num_groups = len(padded[0]) // GROUP_DIMENSIONS
    blocks = split.astype(np.uint8).reshape(2, -1, BLOCK, num_groups, GROUP_DIMENSIONS)
    return np.ascontiguousarray(blocks.transpose(1, 3, 0, 2, 4)).ravel()


def _pack_tables(
    tables: Sequence[Float32[np.ndarray, "_ dim"]], norm_weight: float
) -> dict[str, np.ndarray]:
    """Return the arrays of the library's model, by the names of its fields."""
    vectors = np.concatenate(tables)
    sizes = [len(table) for table in tables]
    padded = [np.pad(table, ((0, CODES - len(table)), (0, 0))) for table in tables]
    # gram[c][l][d] = w e_c · e_d, for all codes c and d of the first levels
    num_gram_levels = sum(total <= MAX_GRAM_CODES for total in accumulate(sizes))
    gram_vectors = vectors[: sum(sizes[:num_gram_levels])]
    gram = [norm_weight * (gram_vectors @ table.T) for table in padded[:num_gram_levels]]
    no_gram = np.zeros((0, 0, CODES), np.float32)
    # Each vector is rounded to integers times a step, a power of two, which products keep exact.
    largest = np.abs(vectors).max(axis=1)
    smallest_steps = np.where(largest > 0, largest, 1) / np.float32(MAX_SPLIT_NUMBER)
    steps = np.exp2(np.ceil(np.log2(smallest_steps)))
    rounded = np.rint(vectors / steps[:, None]).astype(np.int32)
    levels = np.split(rounded, [*accumulate(sizes[:-1])])
    return {
        "sizes": np.array(sizes, dtype=np.int32),
        "vectors": np.ascontiguousarray(vectors),
        "bytes": np.concatenate([_pack_bytes(level) for level in levels]),
        "steps": steps.astype(np.float32),
        "halves": np.stack([np.square(table).sum(axis=1) * (norm_weight / 2) for table in padded]),
        "gram": np.ascontiguousarray(np.stack(gram, axis=1)) if gram else no_gram,
    }


def _code_bits(level0: frozenset[int]) -> Any:
    """Return the bit vector of the allowed codes at level 0; an empty set allows any."""
    bits = sum(1 << code for code in level0 if code < CODES) if level0 else (1 << CODES) - 1
    return _CodeBits.from_buffer_copy(bits.to_bytes(CODES // 8, "little"))


def _pack_segments(
    segments: Sequence[SearchSegment],
    restriction: Restriction | None,
    vectors: Sequence[Any] | None,
    evidence: Evidence,
    grid: CellGrid | None,
) -> PackedSegments:
    """Return the parts of the library for a restriction.

    Those of searches without conditions are cached, and those of the last search with conditions.
    """
    sources = (segments, restriction, vectors)
    cache = "packed_all" if restriction is None else "packed_allowed"
    cached: PackedSegments | None = getattr(evidence, cache)  # another thread may replace it
    if cached is not None and not any(map(operator.is_not, cached.sources[:3], sources)):
        return cached
    parts = []
    arrays: list[np.ndarray] = []
    occupied = None
    if grid is not None and restriction is not None:
        occupied = grid.occupied(segments, restriction)
    for number, segment in enumerate(segments):
        part = _Part(table=_table_address(segment.table))
        if occupied is not None:
            part.occupied = occupied.ctypes.data
            part.num_occupied = len(occupied)
        allowed = segment.alive if restriction is None else restriction[number]
        if allowed is not None:
            part.words = allowed.ids.words.ctypes.data
            part.before = allowed.ids.before.ctypes.data
            part.allowed = allowed.items.ctypes.data
        if vectors is not None:
            part.embeddings, part.scales, part.embedding_bytes = vectors[number].addresses
        if evidence.densities is not None and (vectors is not None or grid is not None):
            part.densities = evidence.densities[number].ctypes.data
        if grid is not None and segment.fine is not None:
            arrays += _pack_cells(part, segment, segment.fine, allowed, grid)
        parts.append(part)
    num_items = sum(segment.table.num_items for segment in segments)
    num_allowed = num_items if restriction is None else count_allowed(segments, restriction)
    packed = PackedSegments((*sources, arrays, occupied), b"".join(parts), num_items, num_allowed)
    setattr(evidence, cache, packed)
    return packed


def _pack_cells(
    part: _Part,
    segment: SearchSegment,
    fine: StoredFineCodes,
    allowed: Allowed | None,
    grid: CellGrid,
) -> list[np.ndarray]:
    """Set the fields of a part that the search of cells reads, and return their arrays."""
    starts = grid.starts(segment.table)
    positions = None if allowed is None else allowed.positions
    sampled_counts, allowed_counts = grid.counts(segment.table, allowed)
    part.cell_starts = starts.ctypes.data
    part.fine = fine.blocks.ctypes.data
    part.sampled_counts = sampled_counts.ctypes.data
    part.allowed_counts = allowed_counts.ctypes.data
    if positions is not None:
        part.positions = positions.words.ctypes.data
    if fine.lengths is not None:
        part.lengths = fine.lengths.ctypes.data
    return [starts, sampled_counts, allowed_counts]


class _PackedTable(NamedTuple):
    """A table as the library reads it, and the arrays whose addresses it holds."""

    structure: _Table
    arrays: dict[str, np.ndarray]


_packed_tables: weakref.WeakKeyDictionary[IdTable, _PackedTable] = weakref.WeakKeyDictionary()


def _table_address(table: IdTable) -> int:
    """Return the address of a table's structure, which lives as long as the table."""
    packed = _packed_tables.get(table)
    if packed is None:
        # Another thread may have packed the table in the meantime; both then use its structure.
        packed = _packed_tables.setdefault(table, _pack_table(table))
    return ctypes.addressof(packed.structure)


def _pack_table(table: IdTable) -> _PackedTable:
    bounds = np.ascontiguousarray(table.level_bounds, dtype=np.int64)
    num_start_codes = bounds[bounds <= MAX_START_CODES][-1]
    start_codes = [
        table.ids[table.starts[low:high], level]
        for level, (low, high) in enumerate(pairwise(bounds.tolist()))
        if high <= num_start_codes
    ]
    arrays = {
        "ids": np.ascontiguousarray(table.ids),
        "starts": np.ascontiguousarray(table.starts),
        "level_bounds": bounds,
        "start_codes": np.concatenate(start_codes),
        "bucket_starts": np.ascontiguousarray(table.bucket_starts),
        "items": np.ascontiguousarray(table.items),
    }
    structure = _Table(
        columns=table.ids.shape[1],
        rows=len(table),
        num_items=table.num_items,
        num_start_codes=num_start_codes,
        **_addresses(arrays),
    )
    return _PackedTable(structure, arrays)


def _read_candidates(work: _Work, num_queries: int, num_levels: int) -> list[Candidates]:
    """Copy the hits of queries out of the memory of their search."""
    results = ctypes.string_at(work.results, num_queries * RESULT_BYTES)
    counts = memoryview(results).cast("q").tolist()  # hits and ranked items, query by query
    num_hits = sum(counts[::2])
    hits = np.frombuffer(ctypes.string_at(work.hits, num_hits * HIT_TYPE.itemsize), HIT_TYPE)
    decoded = np.frombuffer(ctypes.string_at(work.decoded, num_hits * num_levels * 4), np.float32)
    decoded = decoded.reshape(num_hits, num_levels)
    all_candidates = []
    start = 0
    for count, num_ranked in zip(counts[::2], counts[1::2], strict=True):
        rows = slice(start, start + count)
        start += count
        part = hits[rows]
        all_candidates.append(
            Candidates(
                part["segment"],
                part["item"],
                part["row"],
                part["score"],
                part["beam"],
                decoded[rows],
                num_ranked,
            )
        )
    return all_candidates
