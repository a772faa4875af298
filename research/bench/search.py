"""Measure our search, by :class:`genius_search.Index` as users search, and other packages.

All methods have one thread and take turns.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Int64

from genius_search import Index, SearchRequest
from genius_search.config import SearchConfig
from genius_search.errors import UsageError
from genius_search.index.build import MANY_ITEMS
from genius_search.index.encode import EncodedQuery
from genius_search.index.index import current_state
from genius_search.index.query import SnapshotSearcher
from genius_search.progress import Progress
from genius_search.search.vectors import EmbeddingBits, stored_width
from genius_search.writing import write_json
from research.bench.costs import measure_changes, measure_creation
from research.bench.data import (
    BenchData,
    HitRows,
    K,
    Queries,
    Search,
    exact_search,
    search_all,
    share_of_exact_hits,
)
from research.bench.engines import engine_builders, try_engine
from research.bench.measure import READ_BYTES, measure_bandwidth, time_queries
from research.bench.rivals import PACKAGES, Rival, Vectors, describe_packages, rival_builders

BITS: Final[tuple[EmbeddingBits, ...]] = (1, 2, 4)
MARGIN_CHANGES: Final = (-1.5, -1, -0.5, 0, 0.5, 1)
"""Added to the default margin; the shortlist is 2 to this power times as long."""
LIST_EFFORTS: Final = (8, 16, 32, 64, 128, 256)
"""Numbers of lists that a search reads."""
NODE_EFFORTS: Final = (16, 32, 64, 128, 256, 512)
"""Numbers of candidate nodes that a search of a graph keeps."""
ALLOWED_SHARES: Final = (0.5, 0.1, 0.01, 0.001)
"""Shares of the items that random conditions allow."""
NUM_CHANGED: Final = 1000
"""Items that are added and deleted."""
MIN_GRAPH_SHARE: Final = 0.95
"""Share of exact search's hits of the graph whose time filtered searches are compared with."""
SCALE_BYTES: Final = 4
"""Bytes of a stored embedding's scale, density and length."""
OURS: Final = "GENIUS"
EXACT: Final = "exact"

Row = dict[str, Any]


class Method(NamedTuple):
    """A method of search with one effort."""

    name: str
    effort: str
    find: Search
    item_bytes: float
    is_default: bool = False


def bench_search(
    data: BenchData,
    folder: Path,
    *,
    num_timed: int,
    with_rivals: bool,
    packages: Sequence[str] = (),
    progress: Progress,
) -> dict[str, list[Row]]:
    """Build the indexes that are not in the folder yet, and measure; return the rows of each part.

    Parameters
    ----------
    num_timed
        number of queries that are timed.
    packages
        rivals to measure; if empty, all that are installed.
    """
    default_bits: EmbeddingBits = 4 if len(data.items) < MANY_ITEMS else 2
    built: list[Row] = []
    exact_bytes = 4 * data.items.shape[1]
    methods = [Method(EXACT, "", partial(exact_search, data.items), exact_bytes)]
    for bits in BITS:
        is_default = bits == default_bits
        path = folder / f"ours-{bits}"
        index, cost = create_index(data, path, bits=bits, with_fields=is_default)
        name = f"{OURS}, {_name_bits(bits)}" + (" and two fields" if is_default else "")
        built.append({"method": name, **cost})
        methods += vary_effort(index, bits, is_default=is_default)
        progress.say(f"created with {bits} bits: {cost}")
    if with_rivals:
        for rival in build_rivals(data.items, folder, built, packages, progress=progress):
            methods += vary_rival_effort(rival)
    curves = measure_methods(data, methods, num_timed)
    progress.say("measured by effort")
    default_folder = folder / f"ours-{default_bits}.index"
    graph = choose_graph(methods, curves)
    filtered = measure_filters(data, Index.open(default_folder), graph, num_timed)
    progress.say("measured filters")
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        copy = shutil.copytree(default_folder, Path(temporary) / "index")
        changes = [run_in_new_process(measure_changes, copy, data.queries[:NUM_CHANGED])]
    limits = measure_limits(len(data.items), methods)
    parts = {"curves": curves, "limits": limits, "filtered": filtered, "built": built}
    return {**parts, "changes": changes}


def create_index(
    data: BenchData, path: Path, *, bits: EmbeddingBits, with_fields: bool
) -> tuple[Index, Row]:
    """Return an index and the cost of creating it; an existing index is opened."""
    folder, cost_file = path.with_suffix(".index"), path.with_suffix(".json")
    item_file = path.parent / "items.npy"
    if not cost_file.exists():
        if not item_file.exists():
            np.save(item_file, data.items.astype(np.float16))
        shutil.rmtree(folder, ignore_errors=True)
        fields = make_fields(data) if with_fields else None
        cost = run_in_new_process(measure_creation, item_file, folder, bits, fields)
        write_json(cost_file, cost)
    return Index.open(folder), json.loads(cost_file.read_text(encoding="utf-8"))


def make_fields(data: BenchData) -> list[Row]:
    """Return two fields of each item: a random number, and its source or an empty string."""
    draws = np.random.default_rng(0).random(len(data.items)).round(6).tolist()
    sources = ["" for _ in draws] if data.sources is None else data.sources.tolist()
    return [{"source": source, "draw": draw} for source, draw in zip(sources, draws, strict=True)]


def vary_effort(index: Index, bits: EmbeddingBits, *, is_default: bool) -> Iterator[Method]:
    """Yield our methods by effort: with embeddings of some bits, and once by codes alone.

    Parameters
    ----------
    is_default
        whether an index has this number of bits by default.
    """
    defaults = index.settings
    [segment] = current_state(index).snapshot.segments
    table = segment.table
    code_bytes = (table.nbytes + table.bucket_starts.nbytes + table.items.nbytes) / table.num_items
    if segment.fine is not None:
        code_bytes += segment.fine.blocks.nbytes / table.num_items
    item_bytes = code_bytes + stored_width(index.model.dim, bits) + SCALE_BYTES
    name = _name_bits(bits)
    variants = [
        (name, defaults, item_bytes),
        (f"{name}, no correction", replace(defaults, density_weight=0.0), item_bytes),
    ]
    if bits == BITS[0]:
        variants.append(("codes", replace(defaults, rerank="codes"), code_bytes))
    for variant, settings, size in variants:
        for change in MARGIN_CHANGES:
            margin = settings.margin + change
            shortlist = round(settings.shortlist * 2**change)
            config = replace(settings, margin=margin, shortlist=shortlist)
            effort = f"margin {margin:g}, {shortlist} compared"
            is_default_method = is_default and not change and settings is defaults
            search = make_search(index, config)
            yield Method(f"{OURS}, {variant}", effort, search, size, is_default_method)


def _name_bits(bits: int) -> str:
    return f"{bits} bit{'s' * (bits > 1)}"


def make_search(
    index: Index, config: SearchConfig | None = None, where: Sequence[str] = ()
) -> Search:
    """Return a function that searches an index and returns the rows of the hits."""
    searcher = SnapshotSearcher(*current_state(index), config)

    def encode(queries: Queries) -> list[EncodedQuery]:
        if not where:
            encoded = searcher.encode_vectors(queries, K)
        else:
            requests = [SearchRequest(vector=query, k=K, where=where) for query in queries]
            encoded = searcher.encode(requests)
        return [query for [query] in encoded]

    def search(queries: Queries) -> HitRows:
        rows = np.full((len(queries), K), -1)
        for hit_rows, ranking in zip(rows, searcher.rank(encode(queries)), strict=True):
            hit_rows[: len(ranking.items)] = ranking.items
        return rows

    return search


def build_rivals(
    items: Vectors, folder: Path, built: list[Row], packages: Sequence[str], *, progress: Progress
) -> Iterator[Rival]:
    """Yield each rival that can be built here; append its cost, or the obstacle, to ``built``."""
    progress.say(describe_packages())
    runs: list[tuple[str, Callable[[], Rival]]] = rival_builders(items, folder)
    for module, builders in engine_builders(items, folder):
        if packages and PACKAGES[module] not in packages:
            continue
        if obstacle := find_obstacle(module):
            progress.say(f"{PACKAGES[module]} is left out: {obstacle}")
            built.append({"method": PACKAGES[module], "left out": obstacle})
        else:
            runs += [(module, builder) for builder in builders]
    for module, build in runs:
        if packages and PACKAGES[module] not in packages:
            continue
        try:
            rival = build()
        except UsageError as error:  # it cannot be built of such vectors
            progress.say(str(error))
            built.append({"method": PACKAGES[module], "left out": str(error)})
            continue
        built.append({"method": rival.name, "CPU-s": rival.build_seconds})
        progress.say(f"built {rival.name} in {rival.build_seconds:.0f} CPU-s")
        yield rival


def find_obstacle(module: str) -> str:
    """Return why an engine cannot run here, or an empty string; it is tried in a new process."""
    try:
        return str(run_in_new_process(try_engine, module))
    except BrokenProcessPool:
        return "it ended its process; it may need instructions that this processor lacks"
    except Exception as error:  # noqa: BLE001  any error is an obstacle
        return f"{type(error).__name__}: {error}"


def run_in_new_process(call: Callable[..., Any], *arguments: object) -> Any:
    """Return the result of a call in a new process, whose memory holds nothing else."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        return executor.submit(call, *arguments).result()


def vary_rival_effort(rival: Rival) -> Iterator[Method]:
    """Yield the methods of a rival by effort."""
    if rival.effort_unit is None:
        yield Method(rival.name, "all items", rival.search(0), rival.item_bytes)
        return
    for effort in LIST_EFFORTS if rival.effort_unit == "lists" else NODE_EFFORTS:
        name = f"{effort} {rival.effort_unit}"
        yield Method(rival.name, name, rival.search(effort), rival.item_bytes)


def measure_methods(data: BenchData, methods: Sequence[Method], num_timed: int) -> list[Row]:
    """Time methods in turns, and compare their hits with exact search and right answers.

    The first method is exact search.
    """
    exact_hits = exact_search(data.items, data.queries)
    shuffled = data.queries[np.random.default_rng(0).permutation(len(data.queries))]
    names = [f"{method.name}, {method.effort}" for method in methods]
    searches = {name: method.find for name, method in zip(names, methods, strict=True)}
    times = time_queries(searches, shuffled, num_timed)
    rows = []
    for name, method in zip(names, methods, strict=True):
        is_exact = method.name == EXACT
        hits = exact_hits if is_exact else search_all(method.find, data.queries)
        row: Row = {"method": method.name, "effort": method.effort, "bytes": method.item_bytes}
        row |= {"us": 1000 * times[name], "of exact's time": times[name] / times[names[0]]}
        rows.append(row | measure_hits(data, exact_hits, hits) | {"default": method.is_default})
    return rows


def measure_hits(
    data: BenchData, exact_hits: Int64[np.ndarray, "queries exact_hits"], hits: HitRows
) -> dict[str, float]:
    """Return the share of exact search's hits, and R@k if there are answers, by kind of query."""
    measures: dict[str, float] = {}
    kinds = np.full(len(data.queries), "") if data.kinds is None else data.kinds
    for name in dict.fromkeys(kinds.tolist()):
        queries = np.flatnonzero(kinds == name)
        suffix = f", {name}" if name else ""
        measures[f"of the ten{suffix}"] = share_of_exact_hits(exact_hits[queries], hits[queries])
        if data.answers is not None:
            judged = data._replace(answers=[data.answers[query] for query in queries])
            for k in (1, 5):
                measures[f"R@{k}{suffix}"] = judged.recall(hits[queries], k) or 0.0
    return measures


def choose_graph(methods: Sequence[Method], curves: Sequence[Row]) -> Method:
    """Return hnswlib with the least effort that is good enough, or exact search."""
    for method, row in zip(methods, curves, strict=True):
        shares = [share for name, share in row.items() if name.startswith("of the ten")]
        if method.name == "hnswlib" and min(shares) >= MIN_GRAPH_SHARE:
            return method
    return methods[0]


def measure_filters(data: BenchData, index: Index, graph: Method, num_timed: int) -> list[Row]:
    """Measure searches with conditions, and compare their time with a graph without conditions."""
    fields = make_fields(data)
    draws, sources = (np.array([field[name] for field in fields]) for name in ("draw", "source"))
    conditions = {f"draw<{share}": draws < share for share in ALLOWED_SHARES}
    if data.sources is not None:
        for name in dict.fromkeys(sources.tolist()):
            conditions[f"source={name}"] = sources == name
    searches = {"graph": graph.find}
    searches |= {condition: make_search(index, where=[condition]) for condition in conditions}
    first_times = {}
    for condition, search in searches.items():
        began = time.process_time()
        search(data.queries[:1])
        first_times[condition] = 1000 * (time.process_time() - began)
    times = time_queries(searches, data.queries, num_timed)
    unjudged = data._replace(answers=None)
    rows = []
    for condition, is_allowed in conditions.items():
        allowed = np.flatnonzero(is_allowed)
        exact_hits = allowed[exact_search(data.items[allowed], data.queries)]
        hits = search_all(searches[condition], data.queries)
        row: Row = {
            "condition": condition,
            "allowed": f"{is_allowed.mean():.2%}",
            "us": 1000 * times[condition],
            "of the graph's time": times[condition] / times["graph"],
            "first time, ms": first_times[condition],
        }
        row |= measure_hits(unjudged, exact_hits, hits)
        rows.append(row | {"graph": f"{graph.name}, {graph.effort}"})
    return rows


def measure_limits(num_items: int, methods: Sequence[Method]) -> list[Row]:
    """Return how long one thread takes to read all bytes of exact search, and of ours, once.

    No search that reads all bytes is quicker; a search that leaves items out can be.
    """
    bandwidth = measure_bandwidth(READ_BYTES)
    sizes = {
        method.name: method.item_bytes
        for method in methods
        if method.name == EXACT or method.name.startswith(OURS)
    }
    rows = []
    for name, item_bytes in sizes.items():
        if "no correction" in name:
            continue
        size = num_items * item_bytes
        rows.append(
            {
                "limit": f"reading all bytes of {name} once",
                "bytes": item_bytes,
                "MB": size / 1e6,
                "memory, GB/s": bandwidth / 1e9,
                "us, from memory": 1e6 * size / bandwidth,
                "us, read again and again": 1e6 * size / measure_bandwidth(size),
            }
        )
    return rows
