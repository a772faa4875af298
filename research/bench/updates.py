"""Searches of an index while items are added and deleted, beside rivals that can do the same."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from genius_search.index.create import usual_bits
from genius_search.index.items import Item
from genius_search.index.snapshot import Snapshot
from genius_search.index.store import IndexManifest
from genius_search.index.writer import Writer, one_writer
from genius_search.nn.quantizer import Quantizer
from genius_search.records import Modality
from research.baselines.faiss_index import num_lists
from research.bench.coded import SEGMENT, Ours, encode, residuals_of
from research.bench.given import (
    Found,
    Given,
    K,
    Search,
    exact_search,
    search_all,
    search_one,
    share_found,
)
from research.bench.measure import time_queries
from research.bench.results import Row
from research.bench.rivals import (
    Rival,
    build_rivals,
    faiss_rival,
    hnswlib_rival,
    is_installed,
    pq_factory,
    rabitq_rival,
    usearch_rival,
)
from research.bench.settings import SearchSettings

ASKED: Final = 20
"""Queries between two changes."""
EFFORT: Final = 32
MOST_UPDATED: Final = 100_000
"""Most items of an index that changes."""


class Subject(NamedTuple):
    """An index that changes, and its searches."""

    replace: Callable[[np.ndarray, np.ndarray], None]
    """Deletes rows and adds others."""
    searches: dict[str, Search]
    number: Callable[[Found], Found] = lambda found: found
    """From what a search returns to the numbers of items; not timed."""


def measure_updates(
    given: Given, quantizer: Quantizer, settings: SearchSettings, folder: Path, left_out: dict[str, None]
) -> list[Row]:
    """Replace 1 % of the items in steps, with queries in between: changes and searches take turns.

    At most :data:`MOST_UPDATED` items are drawn. The index is at ``folder`` while it is measured.
    """
    given, old, new = _draw(given, settings)
    alive = np.ones(len(given.items), dtype=bool)
    alive[new] = False
    asked: dict[str, list[list[float]]] = {}
    changing: dict[str, list[tuple[float, float]]] = {}
    shutil.rmtree(folder, ignore_errors=True)
    with one_writer(folder) as writer:
        subjects = [_our_subject(writer, quantizer, given, int(new[0]))]
        built = build_rivals(changeable_builders(given.items[: new[0]], seed=settings.seed), left_out)
        subjects += [_subject(rival, given, alive) for rival, _ in built]
        before = _measure(subjects, given, alive, settings)
        steps = (np.array_split(rows, settings.steps) for rows in (old, new))
        for gone, added in zip(*steps, strict=True):
            alive[gone], alive[added] = False, True
            for subject in subjects:
                began, began_cpu = time.perf_counter(), time.process_time()
                subject.replace(gone, added)
                seconds = (time.process_time() - began_cpu, time.perf_counter() - began)
                for name, search in subject.searches.items():
                    changing.setdefault(name, []).append(seconds)
                    times = [_cpu_us(search, given.queries, number) for number in range(ASKED)]
                    asked.setdefault(name, []).append(times)
        after = _measure(subjects, given, alive, settings)
    shutil.rmtree(folder)
    rows = []
    for name, turns in asked.items():
        row: Row = {"method": name, "ours": name.startswith("ours"), "before_us": before[name]["us"]}
        row["first_us"] = float(np.median([own[0] for own in turns]))
        row["during_us"] = float(np.median([own[1:] for own in turns]))
        cpu, wall = np.median(changing[name], axis=0).tolist()
        row |= {"after_us": after[name]["us"], "change_ms": 1000 * cpu, "change_wall_ms": 1000 * wall}
        row |= {"before_10": before[name]["share"], "after_10": after[name]["share"]}
        rows.append({**row, "recall_5": after[name]["recall"]})
    return rows


def _draw(given: Given, settings: SearchSettings) -> tuple[Given, np.ndarray, np.ndarray]:
    """Return items in random order, the rows that are deleted, and those that are added: the last."""
    random = np.random.default_rng(settings.seed)
    order = random.permutation(len(given.items))[:MOST_UPDATED]
    place = {row: number for number, row in enumerate(order.tolist())}
    right = given.right and [{place[row] for row in own if row in place} for own in given.right]
    drawn = Given(given.items[order], given.modality[order], given.queries, right, len(order))
    count = max(settings.steps, len(order) // 100)
    old = random.permutation(len(order) - count)[:count]
    return drawn, old, np.arange(len(order) - count, len(order))


def _measure(
    subjects: list[Subject], given: Given, alive: np.ndarray, settings: SearchSettings
) -> dict[str, Row]:
    """Return the time of a query alone, and what is found of the items that are there."""
    searches = {name: search for one in subjects for name, search in one.searches.items()}
    calls = {name: partial(search_one, search, given.queries) for name, search in searches.items()}
    times = time_queries(calls, settings.timed)
    kept = np.flatnonzero(alive)
    truth = kept[exact_search(given.items[kept], given.queries)]
    rows = {}
    for subject in subjects:
        for name, search in subject.searches.items():
            found = subject.number(search_all(search, given.queries))
            row = {"us": 1000 * times[name].cpu_ms, "share": share_found(truth, found, K)}
            rows[name] = {**row, "recall": given.recall(found, 5)}
    return rows


def _cpu_us(search: Search, queries: np.ndarray, number: int) -> float:
    began = time.process_time_ns()
    search_one(search, queries, number)
    return (time.process_time_ns() - began) / 1000


def _our_subject(writer: Writer, quantizer: Quantizer, given: Given, first: int) -> Subject:
    """Return an index on disk without an encoder: a change encodes, writes, and opens the new state."""
    base, kinds = Ours(quantizer.tables()), list(Modality)
    current: list[Snapshot] = []
    now: dict[str, Search] = {}

    def add(rows: np.ndarray) -> None:
        own = given._replace(items=given.items[rows], modality=given.modality[rows])
        items = [Item(str(row), kinds[given.modality[row]], f"item {row}") for row in rows.tolist()]
        arrays = residuals_of(encode(quantizer, own))
        if current:
            writer.add(items, arrays)
        else:
            manifest = IndexManifest(
                model="", model_fingerprint="", embeddings="fused", embedding_bits=usual_bits(0)
            )
            writer.create(manifest, items, arrays)

    def reopen() -> None:
        snapshot = Snapshot.open(writer.folder)
        current[:] = [snapshot]
        own = base.on(
            snapshot.search_segments, {usual_bits(0): snapshot.vectors(base.ranker) or []}, snapshot.densities
        )
        now.update({title: search for title, search, _ in own.methods(with_all=False)})

    def replace(gone: np.ndarray, added: np.ndarray) -> None:
        add(added)
        writer.delete([str(row) for row in gone.tolist()])
        reopen()

    def number(found: Found) -> Found:
        rows = [np.array([int(item.id) for item in one.items.all()]) for one in current[0].segments]
        named_rows = [[rows[hit // SEGMENT][hit % SEGMENT] for hit in own] for own in found.tolist()]
        return np.array(named_rows)

    add(np.arange(first))
    reopen()
    searches: dict[str, Search] = {
        name: lambda queries, name=name: now[name](queries)  # type: ignore[misc]
        for name in now
    }
    return Subject(replace, searches, number)


def changeable_builders(items: np.ndarray, *, seed: int) -> list[Callable[[], Rival]]:
    """Return what builds rivals that can be changed."""
    lists = num_lists(len(items))
    names = ("HNSW32", pq_factory(lists, items.shape[1], len(items)))
    builders: list[Callable[[], Rival]] = [partial(faiss_rival, name, items, seed=seed) for name in names]
    if is_installed("hnswlib"):
        builders.append(partial(hnswlib_rival, items))
    if is_installed("usearch"):
        builders.append(partial(usearch_rival, "f32", items))
    if is_installed("rabitqlib"):
        builders.append(partial(rabitq_rival, "HNSW", 7, items, seed=seed))
    return builders


def _subject(rival: Rival, given: Given, alive: np.ndarray) -> Subject:
    """Return a rival that changes; what it cannot delete, a filter leaves out."""
    effort = rival.efforts[-1] if rival.has_lists else EFFORT
    limit: list[Any] = [None]
    name = rival.title(effort) + ("" if rival.remove else " (deletes nothing: a filter leaves it out)")

    def replace(gone: np.ndarray, added: np.ndarray) -> None:
        if rival.remove is not None:
            rival.remove(gone)
        elif rival.limit is not None:
            limit[0] = rival.limit(alive)
        rival.add(added, given.items[added])

    return Subject(replace, {name: lambda queries: rival.find(queries, effort, limit[0])})
