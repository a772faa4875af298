"""What searches find and cost: ours by :class:`genius_search.Index`, as users search, beside rivals.

All methods have one thread and take turns.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Int64
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from genius_search import Index, SearchRequest
from genius_search.config import SearchConfig
from genius_search.errors import UsageError
from genius_search.index.build import MANY_ITEMS
from genius_search.index.encode import EncodedQuery
from genius_search.index.index import current_state
from genius_search.index.query import SnapshotSearcher
from genius_search.progress import Progress
from genius_search.search.vectors import EmbeddingBits, stored_width
from genius_search.writing import write_file, write_json
from research.bench.costs import cost_of_changes, cost_of_creating
from research.bench.engines import engine_builders, try_engine
from research.bench.given import (
    Found,
    Given,
    K,
    Queries,
    Search,
    exact_search,
    search_all,
    share_found,
)
from research.bench.measure import READ_BYTES, read_bandwidth, time_queries
from research.bench.rivals import PACKAGES, Rival, Vectors, builders, describe_packages
from research.figures import COLOURS, GRID, INK, new_figure
from research.table import Table

BITS: Final[tuple[EmbeddingBits, ...]] = (1, 2, 4)
MARGIN_CHANGES: Final = (-1.5, -1, -0.5, 0, 0.5, 1)
"""Added to the default margin; the shortlist is 2 to this power times as long."""
LISTS: Final = (8, 16, 32, 64, 128, 256)
NODES: Final = (16, 32, 64, 128, 256, 512)
"""Nodes of a graph in view."""
SHARES: Final = (0.5, 0.1, 0.01, 0.001)
"""Of the items, allowed at random."""
CHANGED: Final = 1000
"""Items that are added and deleted."""
REACHED: Final = 0.95
"""Of exact search's ten, by the graph whose time filtered searches are compared with."""
SCALE_BYTES: Final = 4
"""Of a stored embedding: its scale, its density and its length."""
OURS: Final = "GENIUS"
EXACT: Final = "exact"
LIBRARIES: Final = (
    *(OURS, "rabitqlib", "faiss", "hnswlib", "usearch", "scann"),
    *("turbovec", "scalable-vs", "zvec", "lancedb"),
)
CURVE_COLOURS: Final = (*COLOURS, "#8c510a", "#5e3c99", "#878787")
MARKERS: Final = "osD^vP*X"
APART: Final = 0.045
"""Of the height of a panel, between two labels, unless there are too many of them."""
LABEL_INCHES: Final = 0.19
"""Height of a label, with the space below it."""
Row = dict[str, Any]


class Method(NamedTuple):
    """A way of searching."""

    name: str
    effort: str
    find: Search
    item_bytes: float
    is_default: bool = False


def bench_search(
    given: Given,
    folder: Path,
    *,
    timed: int,
    rivals: bool,
    packages: Sequence[str] = (),
    progress: Progress,
) -> dict[str, list[Row]]:
    """Build what is not in the folder yet, and measure everything; return the rows of each part.

    ``packages`` are those of the rivals to measure; if there are none, all that are installed.
    """
    usual: EmbeddingBits = 4 if len(given.items) < MANY_ITEMS else 2
    built, methods = (
        [],
        [Method(EXACT, "", partial(exact_search, given.items), 4 * given.items.shape[1])],
    )
    for bits in BITS:
        index, cost = create(given, folder / f"ours-{bits}", bits=bits, with_fields=bits == usual)
        told = " and two fields" if bits == usual else ""
        built.append({"method": f"{OURS}, {bits} bit{'s' * (bits > 1)}{told}", **cost})
        methods += ours(index, bits, is_default=bits == usual)
        progress.say(f"created with {bits} bits: {cost}")
    if rivals:
        for rival in build_rivals(given.items, folder, built, packages, progress=progress):
            methods += sweep(rival)
    curves = measure(given, methods, timed)
    progress.say("measured by effort")
    graph = methods[0]
    for method, row in zip(methods, curves, strict=True):
        enough = (
            min(share for name, share in row.items() if name.startswith("of the ten")) >= REACHED
        )
        if method.name == "hnswlib" and enough and graph is methods[0]:
            graph = method
    default = folder / f"ours-{usual}.index"
    filtered = measure_filters(given, Index.open(default), graph, timed)
    progress.say("measured filters")
    with tempfile.TemporaryDirectory(dir=folder) as place:
        copied = shutil.copytree(default, Path(place) / "index")
        changes = [in_new_process(cost_of_changes, copied, given.queries[:CHANGED])]
    limits = measure_limits(len(given.items), methods)
    parts = {"curves": curves, "limits": limits, "filtered": filtered, "built": built}
    return {**parts, "changes": changes}


def build_rivals(
    items: Vectors,
    folder: Path,
    built: list[Row],
    packages: Sequence[str],
    *,
    progress: Progress,
) -> Iterator[Rival]:
    """Yield each rival that can be built; append what it cost, or why it is left out, to ``built``."""
    progress.say(describe_packages())
    runs = builders(items, folder)
    for module, engines in engine_builders(items, folder):
        package = PACKAGES[module]
        if packages and package not in packages:
            continue
        reason = why_not(module)
        if reason:
            progress.say(f"{package} is left out: {reason}")
            built.append({"method": package, "left out": reason})
        else:
            runs += [(module, build) for build in engines]
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


def why_not(module: str) -> str:
    """Return why an engine cannot run here, or nothing if it can; it is tried in a new process."""
    try:
        return str(in_new_process(try_engine, module))
    except BrokenProcessPool:
        return "it ended its process; it may need instructions that this processor lacks"
    except Exception as error:  # noqa: BLE001  whatever stops it is the reason
        return f"{type(error).__name__}: {error}"


def in_new_process(call: Callable[..., Any], *arguments: object) -> Any:
    """Return the result of a call in a process of its own, whose memory is not that of others."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as executor:
        return executor.submit(call, *arguments).result()


def create(
    given: Given, place: Path, *, bits: EmbeddingBits, with_fields: bool
) -> tuple[Index, Row]:
    """Return an index and what creating it cost; it is created only once."""
    folder, told, items = (
        place.with_suffix(".index"),
        place.with_suffix(".json"),
        place.parent / "items.npy",
    )
    if not told.exists():
        if not items.exists():
            np.save(items, given.items.astype(np.float16))
        shutil.rmtree(folder, ignore_errors=True)
        fields = fields_of(given) if with_fields else None
        write_json(told, in_new_process(cost_of_creating, items, folder, bits, fields))
    return Index.open(folder), json.loads(told.read_text(encoding="utf-8"))


def fields_of(given: Given) -> list[Row]:
    """Return two fields of each item: a random number, and its source if that is known."""
    drawn = np.random.default_rng(0).random(len(given.items)).round(6).tolist()
    sources = ["" for _ in drawn] if given.sources is None else given.sources.tolist()
    return [{"source": source, "draw": draw} for source, draw in zip(sources, drawn, strict=True)]


def find_rows(
    index: Index, config: SearchConfig | None = None, where: Sequence[str] = ()
) -> Search:
    """Return the search of an index, up to the rows of the items that were found."""
    searcher = SnapshotSearcher(*current_state(index), config)

    def encode(queries: Queries) -> list[EncodedQuery]:
        if not where:
            encoded = searcher.encode_vectors(queries, K)
        else:
            requests = [SearchRequest(vector=query, k=K, where=where) for query in queries]
            encoded = searcher.encode(requests)
        return [query for [query] in encoded]

    def find(queries: Queries) -> Found:
        encoded = encode(queries)
        rows = np.full((len(queries), K), -1)
        for own, ranking in zip(rows, searcher.rank(encoded), strict=True):
            own[: len(ranking.items)] = ranking.items
        return rows

    return find


def ours(index: Index, bits: EmbeddingBits, *, is_default: bool) -> Iterator[Method]:
    """Yield our searches by effort: with embeddings of so many bits, and once by codes alone."""
    usual = index.settings
    [segment] = current_state(index).snapshot.segments
    table = segment.table
    codes = (table.nbytes + table.bucket_starts.nbytes + table.items.nbytes) / table.num_items
    if segment.fine is not None:
        codes += segment.fine.blocks.nbytes / table.num_items
    stored = codes + stored_width(index.model.dim, bits) + SCALE_BYTES
    name = f"{bits} bit{'s' * (bits > 1)}"
    ways = [
        (name, usual, stored),
        (f"{name}, no correction", replace(usual, density_weight=0.0), stored),
    ]
    ways += [("codes", replace(usual, rerank="codes"), codes)] if bits == BITS[0] else []
    for name, settings, size in ways:
        for change in MARGIN_CHANGES:
            margin = settings.margin + change
            shortlist = round(settings.shortlist * 2**change)
            config = replace(settings, margin=margin, shortlist=shortlist)
            effort = f"margin {margin:g}, {shortlist} compared"
            marked = is_default and not change and settings is usual
            yield Method(f"{OURS}, {name}", effort, find_rows(index, config), size, marked)


def sweep(rival: Rival) -> Iterator[Method]:
    """Yield a rival by effort."""
    if rival.effort_unit is None:
        yield Method(rival.name, "all items", rival.search(0), rival.item_bytes)
        return
    for effort in LISTS if rival.effort_unit == "lists" else NODES:
        name = f"{effort} {rival.effort_unit}"
        yield Method(rival.name, name, rival.search(effort), rival.item_bytes)


def shares_by_kind(
    given: Given, truth: Int64[np.ndarray, "queries known"], found: Found
) -> dict[str, float]:
    """Return the share of the true ten that is found, and recall if answers are known, by kind of query."""
    shares, kinds = {}, np.full(len(given.queries), "") if given.kinds is None else given.kinds
    for kind in dict.fromkeys(kinds.tolist()):
        own, ending = np.flatnonzero(kinds == kind), f", {kind}" if kind else ""
        shares[f"of the ten{ending}"] = share_found(truth[own], found[own])
        if given.right is not None:
            some = given._replace(right=[given.right[row] for row in own])
            shares |= {f"R@{k}{ending}": some.recall(found[own], k) or 0.0 for k in (1, 5)}
    return shares


def measure(given: Given, methods: Sequence[Method], timed: int) -> list[Row]:
    """Time methods in turns, and compare what they find with exact search and right answers."""
    truth = exact_search(given.items, given.queries)
    drawn = given.queries[np.random.default_rng(0).permutation(len(given.queries))]
    names = [f"{method.name}, {method.effort}" for method in methods]
    finds = [method.find for method in methods]
    times = time_queries(dict(zip(names, finds, strict=True)), drawn, timed)
    rows = []
    for name, method in zip(names, methods, strict=True):
        found = truth if method.name == EXACT else search_all(method.find, given.queries)
        row: Row = {"method": method.name, "effort": method.effort, "bytes": method.item_bytes}
        row |= {"us": 1000 * times[name], "of exact's time": times[name] / times[names[0]]}
        rows.append(row | shares_by_kind(given, truth, found) | {"default": method.is_default})
    return rows


def measure_limits(num_items: int, methods: Sequence[Method]) -> list[Row]:
    """Return how long one thread takes to read all bytes of exact search and of ours once.

    No search that reads all of its bytes is quicker; one that leaves items out can be.
    """
    bandwidth = read_bandwidth(READ_BYTES)
    sizes = {
        method.name: method.item_bytes
        for method in methods
        if method.name == EXACT or method.name.startswith(OURS)
    }
    return [
        {
            "limit": f"reading all bytes of {name} once",
            "bytes": size,
            "MB": num_items * size / 1e6,
            "memory, GB/s": bandwidth / 1e9,
            "us, from memory": 1e6 * num_items * size / bandwidth,
            "us, read again and again": 1e6 * num_items * size / read_bandwidth(num_items * size),
        }
        for name, size in sizes.items()
        if "no correction" not in name
    ]


def measure_filters(given: Given, index: Index, graph: Method, timed: int) -> list[Row]:
    """Measure searches of the items that conditions allow, beside a graph's search of all items."""
    fields = fields_of(given)
    draws, sources = (np.array([field[name] for field in fields]) for name in ("draw", "source"))
    conditions = {f"draw<{share}": draws < share for share in SHARES}
    if given.sources is not None:
        conditions |= {
            f"source={name}": sources == name for name in dict.fromkeys(sources.tolist())
        }
    finds = {"graph": graph.find} | {where: find_rows(index, where=[where]) for where in conditions}
    first = {}
    for where, find in finds.items():
        began = time.process_time()
        find(given.queries[:1])
        first[where] = 1000 * (time.process_time() - began)
    times = time_queries(finds, given.queries, timed)
    rows = []
    for where, allowed in conditions.items():
        places = np.flatnonzero(allowed)
        truth = places[exact_search(given.items[places], given.queries)]
        found = search_all(finds[where], given.queries)
        row: Row = {
            "condition": where,
            "allowed": f"{allowed.mean():.2%}",
            "us": 1000 * times[where],
        }
        row |= {
            "of the graph's time": times[where] / times["graph"],
            "first time, ms": first[where],
        }
        rows.append(row | shares_by_kind(given._replace(right=None), truth, found))
        rows[-1]["graph"] = f"{graph.name}, {graph.effort}"
    return rows


TITLES: Final = {
    "curves": "Search by effort",
    "limits": "The physical limit",
    "filtered": "Filters",
    "built": "Building",
    "changes": f"{CHANGED:,} items added, {CHANGED:,} deleted",
    "distances": "Median distance to the tenth nearest of so many",
}
NOTES: Final = {
    "curves": "of the ten: share of exact search's first ten, by kind of query. us: CPU-microseconds of one "
    "query alone; ours up to the rows that it finds, as rivals.",
    "limits": "of memory: a buffer of 1 GiB is read at the bandwidth shown. Again and again: a buffer of "
    "these bytes is read, which the caches hold if it is small. A search that leaves items out can be quicker.",
    "filtered": "draw is random, source is where an item is from. First time: the condition is looked up.",
}


def tables_of(rows: Mapping[str, Sequence[Row]], command: str) -> Iterator[Table]:
    """Yield a table of each part, whose note names its list in ``results.json`` and the command."""
    for part, own in rows.items():
        headings = [*dict.fromkeys(name for row in own for name in row)]
        lines = [[row.get(name) for name in headings] for row in own]
        yield Table(
            name=part,
            title=TITLES[part],
            note=f"{NOTES.get(part, '')} {describe_source(part, command)}".strip(),
            headings=tuple(headings),
            lines=lines,
            decimals=None,
        )


def describe_source(part: str, command: str) -> str:
    """Return where the figures of a table or a picture come from."""
    return f"From results.json, {part}: {command}"


def write(
    rows: Mapping[str, Sequence[Row]], folder: Path, pictures: Path, about: Mapping[str, Any]
) -> list[Table]:
    """Write ``results.json``, ``results.md`` and the figures; return the tables."""
    tables = [*tables_of(rows, about["command"])]
    write_json(folder / "results.json", {**rows, **about})
    told = "{machine}; {date}; `{command}`".format_map(about)
    text = "\n\n".join([*(one.markdown() for one in tables), describe_packages(), told])
    write_file(folder / "results.md", f"{text}\n".encode())
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "0"}):
        for name, figure in draw(rows["curves"]):
            source = describe_source("curves", about["command"])
            figure.supxlabel(source, x=0.01, ha="left", color=INK, fontsize=7)
            figure.savefig(pictures / f"{name}.svg", metadata={"Date": None})
    return tables


def draw(rows: Sequence[Row]) -> Iterator[tuple[str, Figure]]:
    """Yield two figures: the share of exact search's ten by time, and by bytes at the default's time."""
    methods: dict[str, list[Row]] = {}
    for row in rows:
        if row["method"] != EXACT:
            methods.setdefault(row["method"], []).append(row)
    limit = next(row["us"] for row in rows if row["default"])
    in_time = {name: [row for row in own if row["us"] <= limit] for name, own in methods.items()}
    shares = [name for name in rows[0] if name.startswith("of the ten")]
    for name, x, label, curves in (
        ("recall-time", "us", "CPU-µs of a query", methods),
        (
            "recall-bytes",
            "bytes",
            f"bytes an item, searched in at most {limit:,.0f} CPU-µs",
            in_time,
        ),
    ):
        figure = new_figure(8.0, max(4.2, LABEL_INCHES * len(curves)) * len(shares))
        for axes, share in zip(
            figure.subplots(len(shares), 1, squeeze=False)[:, 0], shares, strict=True
        ):
            ends = {}
            for number, (method, own) in enumerate(curves.items()):
                shown = own if x == "us" else sorted(own, key=lambda row: row[share])[-1:]
                if shown:
                    points = [(row[x], row[share]) for row in shown]
                    ends[method] = _curve(axes, method, number, points)
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.set_xlabel(label, color=INK)
            axes.set_ylabel(share.replace("of the ten", "share of exact search's ten"), color=INK)
            axes.grid(visible=True, which="major", color=GRID, linewidth=0.8)
            axes.spines[["top", "right"]].set_visible(False)
            _label(axes, ends)
        yield name, figure


def _curve(
    axes: Axes, method: str, number: int, points: Sequence[tuple[float, float]]
) -> tuple[float, float, str]:
    """Draw a method in the colour of its library, and return where it ends, and the colour."""
    library = method.split(maxsplit=1)[0].rstrip(",")
    colour = CURVE_COLOURS[LIBRARIES.index(library)]
    axes.plot(
        *zip(*points, strict=True),
        color=colour,
        marker=MARKERS[number % len(MARKERS)],
        markersize=4.5,
        linewidth=2.4 if library == OURS else 1.2,
        linestyle="-" if library == OURS else "--",
    )
    return *points[-1], colour


def _label(axes: Axes, ends: Mapping[str, tuple[float, float, str]]) -> None:
    """Write the name of each curve beside its end, no two over one another."""
    low, high = axes.get_ylim()
    place, apart = 1.0, min(APART, 1 / len(ends))
    for method, (x, y, colour) in sorted(ends.items(), key=lambda end: -end[1][1]):
        place = min(place - apart, (y - low) / (high - low))
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.4, "relpos": (0, 0.5)}
        axes.annotate(
            method, (x, y), (1.01, place), textcoords="axes fraction", color=colour, fontsize=8, va="center",
            arrowprops=line,
        )  # fmt: skip
