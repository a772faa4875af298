"""``python -m research.bench``: what a search finds and costs, beside faiss, hnswlib and rabitqlib.

The pools are a data set's own, and larger ones with invented vectors. All methods search the same embeddings,
begin behind the encoder, have one thread and take turns in one process.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from genius_search.errors import UsageError
from genius_search.model import Genius
from genius_search.progress import Progress
from genius_search.writing import write_file, write_json
from research.bench.coded import Codes, Ours, encode, fit
from research.bench.given import (
    Found,
    Given,
    K,
    Search,
    exact_search,
    invent,
    nearest_cosines,
    search_all,
    share_found,
)
from research.bench.measure import time_build, time_queries, time_rounds
from research.bench.rivals import Rival, builders, describe_packages, faiss_rival
from research.bench.settings import SearchSettings
from research.table import Table

REFERENCE: Final = "faiss HNSW32, ef 32"
"""Times are also given as multiples of this one's."""
REACHED: Final = 0.95
"""Share of the filtered truth's first ten that a filtered search should find."""
EFFORTS: Final = (16, 32, 64, 128, 256, 512, 1024)
EFFORT_QUERIES: Final = 64
"""Queries that decide how much effort a filtered search takes."""


class Pool(NamedTuple):
    """What is searched."""

    title: str
    items: int
    invented: int
    """Items that are not real."""

    @staticmethod
    def of(given: Given, seed: int) -> Pool:
        """Describe a pool."""
        count, invented = len(given.items), len(given.items) - given.real
        title = f"{count:,} items"
        if invented:
            real, other = nearest_cosines(given, seed)
            near = f"cosine with the nearest other item: real {real:.2f}, invented {other:.2f}"
            title += f", {invented:,} of them invented ({near})"
        return Pool(title, count, invented)


class Method(NamedTuple):
    """A way of searching, ready to answer."""

    search: Search
    ours: bool = False
    item_bytes: float | None = None
    build_seconds: float | None = None
    """CPU-seconds to build its index."""


Methods = dict[str, Method]
Row = dict[str, Any]
"""One measurement."""


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """Everything that was measured."""

    rows: dict[str, list[Row]]
    """Part -> its rows, as the JSON has them."""
    tables: Sequence[Table]
    """For people, each short enough for a terminal or a document."""


@dataclass(frozen=True)
class _Bench:
    """Settings of a run, and the rows measured so far."""

    settings: SearchSettings
    folder: Path
    progress: Progress
    model: Genius | None
    rows: dict[str, list[Row]]
    left_out: dict[str, None] = field(default_factory=dict)
    """Rivals that cannot be built, with the reason."""

    def add(self, part: str, rows: Sequence[Row], pool: Pool) -> None:
        """Keep rows of a pool."""
        self.progress.say(f"{pool.title}: {TITLES[part].lower()}, done")
        self.rows[part] += [{**pool._asdict(), **row} for row in rows]


def bench_search(
    given: Given, settings: SearchSettings, folder: Path, *, model: Genius | None = None, progress: Progress
) -> Measurements:
    """Measure every part in every pool, the smallest first."""
    bench = _Bench(settings, folder, progress, model, {part: [] for part in settings.parts})
    sizes = [len(given.items)]
    sizes += sorted({int(size) for size in settings.items if size > sizes[0]})
    progress.say(f"{len(given.queries):,} queries; pools of {', '.join(f'{size:,}' for size in sizes)} items")
    progress.begin("search", len(sizes))
    for number, size in enumerate(sizes):
        given = invent(given, size, settings.seed) if number else given
        _measure_pool(bench, given)
        progress.advance(number + 1, {})
    return Measurements(rows=bench.rows, tables=list(_tables(bench)))


def _measure_pool(bench: _Bench, given: Given) -> None:
    """Measure every part in a pool."""
    settings, parts = bench.settings, bench.settings.parts
    pool = Pool.of(given, settings.seed)
    bench.progress.say(f"{pool.title}: fitting codebooks and encoding")
    codes, seconds = time_build(lambda: _encode(bench, given))
    ours = Ours(codes, given.items)
    rivals = list(_build_rivals(bench, given))
    if "plain" in parts:
        methods = {title: Method(search, True, size, seconds) for title, search, size in ours.methods()}
        others = {} if pool.invented else ours.other_ways(bench.model)
        methods |= {name: Method(one, True, ours.item_bytes) for name, one in others.items()}
        for rival, seconds in rivals:
            for effort in rival.efforts or (0,):
                search = rival.search(effort)
                methods[rival.title(effort)] = Method(search, False, rival.item_bytes, seconds)
        bench.add("plain", measure(settings, methods, given, exact_search(given.items, given.queries)), pool)
    for share in settings.shares if "filtered" in parts else ():
        found = _filtered(settings, given, ours, [rival for rival, _ in rivals], share / 100)
        bench.add("filtered", found, pool)


def _encode(bench: _Bench, given: Given) -> Codes:
    """Return a pool's codes: of the model's codebooks if there is one and nothing is invented."""
    if bench.model is not None and len(given.items) == given.real:
        return encode(bench.model.codebooks, given)
    with tempfile.TemporaryDirectory(dir=bench.folder) as place:
        return encode(fit(given, Path(place) / "codebooks", progress=bench.progress), given)


def _build_rivals(bench: _Bench, given: Given) -> Iterator[tuple[Rival, float]]:
    """Build all rivals that a pool's size allows, with the CPU-seconds of each."""
    settings = bench.settings
    graphs = len(given.items) <= settings.graph_items
    for builder in builders(given.items, graphs=graphs, seed=settings.seed):
        try:
            rival, seconds = time_build(builder)
        except UsageError as error:  # it cannot be built of such vectors
            bench.left_out[str(error)] = None
            continue
        bench.progress.say(f"built {rival.name} in {seconds:.0f} s")
        yield rival, seconds


def measure(settings: SearchSettings, methods: Methods, given: Given, truth: Found) -> list[Row]:
    """Time methods side by side, and compare what they find with the right answers and exact search."""
    queries = given.queries
    alone = time_queries({name: method.search for name, method in methods.items()}, queries, settings.timed)
    some = queries[: settings.batch]
    batched = time_rounds(
        {name: partial(method.search, some) for name, method in methods.items()},
        rounds=settings.rounds,
        per=len(some),
    )
    reference = alone.get(REFERENCE)
    rows = []
    for name, method in methods.items():
        row: Row = {"method": name, "ours": method.ours}
        found = search_all(method.search, queries)
        row |= {f"recall_{k}": given.recall(found, k) for k in (1, 5, 10)}
        row |= {f"of_exact_{k}": share_found(truth, found, k) for k in (5, 10)}
        cpu_ms = alone[name]
        row |= {"alone_us": 1000 * cpu_ms, "times_reference": reference and cpu_ms / reference}
        row |= {"batch_us": 1000 * batched[name], "item_bytes": method.item_bytes}
        rows.append({**row, "build_cpu_seconds": method.build_seconds})
    return rows


def _filtered(
    settings: SearchSettings, given: Given, ours: Ours, rivals: Sequence[Rival], share: float
) -> list[Row]:
    """Measure searches of some of the items, each rival with the least effort that finds enough."""
    allowed = np.random.default_rng(settings.seed).random(len(given.items)) < share
    allowed[0] = True
    rows = np.flatnonzero(allowed)
    copied = faiss_rival("Flat", given.items[rows])
    truth = rows[exact_search(given.items[rows], given.queries)]
    methods = {
        title.replace("all items", "all allowed items"): Method(search, ours=True)
        for title, search, _ in ours.allowing(allowed).methods()
    }

    def search_copy(queries: np.ndarray) -> Found:
        places = copied.find(queries, 0, None)
        return np.where(places < 0, -1, rows[places])

    methods["exact search of a copy of the allowed items"] = Method(search_copy)
    for rival in rivals:
        if rival.limit is not None:
            limit = rival.limit(allowed)
            effort = _least_effort(rival, given.queries[:EFFORT_QUERIES], limit, truth[:EFFORT_QUERIES])
            methods[rival.title(effort)] = Method(rival.search(effort, limit))
    found = measure(settings, methods, given._replace(right=None), truth)
    return [{"allowed": f"{share:.1%}", **row} for row in found]


def _least_effort(rival: Rival, queries: np.ndarray, limit: object, truth: np.ndarray) -> int:
    """Return the least effort that finds enough of the truth, or the most that is tried."""
    efforts = rival.efforts if rival.has_lists or not rival.efforts else EFFORTS
    for effort in efforts or (0,):
        if share_found(truth, rival.find(queries, effort, limit), K) >= REACHED:
            break
    return effort


SHARES: Final = {"of_exact_5": "of exact's 5", "of_exact_10": "of exact's 10"}
COLUMNS: Final = {
    "plain": {
        "method": "method", "recall_1": "R@1", "recall_5": "R@5", "recall_10": "R@10", **SHARES,
        "alone_us": "alone, CPU-µs", "times_reference": "× HNSW32", "batch_us": "in a batch",
        "item_bytes": "bytes", "build_cpu_seconds": "build, CPU-s",
    },
    "filtered": {
        "method": "method", "allowed": "allowed", **SHARES, "alone_us": "alone, CPU-µs",
        "batch_us": "in a batch",
    },
}  # fmt: skip
TITLES: Final = {
    "plain": "All items",
    "filtered": "Filtered",
}
NOTES: Final = {
    "plain": "R@k: share of queries with a right answer among the first k; then shares of exact search's "
    "first five and ten. Time of a query alone, as a multiple of faiss's HNSW32 with 32 nodes in view, and "
    "in a batch. Graphs have 32 links (64 below) and see 40 nodes while they are built. Bytes that grow with "
    "the pool, for each item. Ours takes the time to fit codebooks and to "
    "encode, once for all its rows.",
    "filtered": "Drawn items are allowed. Graphs and lists get the least effort that finds "
    f"{REACHED:.0%} of the filtered truth's first ten, of {EFFORTS[0]} to {EFFORTS[-1]:,} nodes in view, "
    "or of the lists as above; if none does, the most. faiss's residual codes, and rabitqlib's Python, "
    "know no filters.",
}


def _tables(bench: _Bench) -> Iterator[Table]:
    """Yield a table for each part and pool, our rows in bold."""
    first = describe_packages(bench.left_out)
    if bench.settings.quick:
        first += " A quick run, to try the command: its figures mean nothing."
    for part, rows in bench.rows.items():
        for number, pool in enumerate(dict.fromkeys(row["title"] for row in rows)):
            own = [row for row in rows if row["title"] == pool]
            known = {name for row in own for name, value in row.items() if value is not None}
            columns = {name: shown for name, shown in COLUMNS[part].items() if name in known}
            ours = [line for line, row in enumerate(own) if row["ours"]]
            note = " ".join([*([first] if first else []), *([] if number else [NOTES[part]])])
            yield Table(
                name=f"{part}-{number + 1}",
                title=f"{TITLES[part]}: {pool}",
                note=note,
                headings=tuple(columns.values()),
                lines=[[row.get(name) for name in columns] for row in own],
                decimals=None,
                bold=frozenset(product(ours, range(len(columns)))),
            )
            first = ""


def write(folder: Path, found: Measurements, about: Mapping[str, Any]) -> dict[str, Any]:
    """Write ``results.json`` and the tables as ``results.md``; return the JSON."""
    title = "Search beside other indexes"
    document: dict[str, Any] = {"title": title}
    document |= {name: [{**row, **about} for row in rows] for name, rows in found.rows.items()}
    write_json(folder / "results.json", document)
    facts = "{machine}; {date}; `{command}`; seed {seed}".format_map(about)
    text = "\n\n".join([f"# {title}", *(one.markdown() for one in found.tables), facts]) + "\n"
    write_file(folder / "results.md", text.encode())
    return document
