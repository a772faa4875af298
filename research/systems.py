"""Evaluations as a report reads them; a system is one recipe row with all its seeds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import pandas as pd

from genius_search.data.mbeir import read_qrels
from genius_search.errors import ArtifactMissing, BadData, UsageError
from research.evaluate import RESULTS
from research.runs import measure_run, read_run
from research.settings import METHODS, Pool
from research.statistics import PerQuery, estimate
from research.sweep import EVALUATION, MODEL, ROW_FILE
from research.table import Estimate

SYSTEMS: Final = "systems"
"""The table that compares systems."""


@dataclass(frozen=True, kw_only=True)
class System:
    """One row of a recipe with all its seeds."""

    name: str
    title: str
    table: str
    like: str
    folders: tuple[Path, ...]
    """What `research.evaluate` wrote, for each seed."""
    model: Path | None
    """Model of the first seed."""
    split: str
    rows: pd.DataFrame
    """A line for each seed, pool, task and method, as in results.json."""

    def methods(self, pool: Pool) -> list[str]:
        """Return the methods that were evaluated in a pool, in the order of tables."""
        found = set(self.rows[self.rows["pool"] == pool]["method"])
        return [one for one in METHODS if one in found] + sorted(found.difference(METHODS))

    def tasks(self, pool: Pool) -> list[str]:
        """Return the names of the tasks of a pool."""
        return list(self.rows[self.rows["pool"] == pool]["name"].unique())

    def task(self, pool: Pool, method: str, task: str) -> Estimate | None:
        """Return a task's own measure in percent, over seeds."""
        own = self._rows(pool, method)
        own = own[own["name"] == task]
        return estimate((100 * own["score"]).tolist()) if len(own) else None

    def average(self, pool: Pool, method: str, measure: str = "score") -> Estimate | None:
        """Return a measure (each task's own) in percent over all tasks, every task counting the same."""
        own = self._rows(pool, method)
        if own.empty or own[measure].isna().any():
            return None
        return estimate((100 * own.groupby("seed")[measure].mean()).tolist())

    def _rows(self, pool: Pool, method: str) -> pd.DataFrame:
        return self.rows[(self.rows["pool"] == pool) & (self.rows["method"] == method)]

    def per_query(self, pool: Pool, method: str, measure_name: str) -> PerQuery:
        """Return a measure for each query, from 0 to 1, as the mean over seeds.

        Raises BadData: the seeds answered different queries.
        """
        seeds = [
            pd.concat({task: _measured(folder, f"{task}_{self.split}.{pool}", method)[measure_name]
                       for task in self.tasks(pool)})
            for folder in self.folders
        ]  # fmt: skip
        if any(set(own.index) != set(seeds[0].index) for own in seeds):
            raise BadData(
                f"the seeds of {self.title!r} answered different queries; evaluate one again"
            )
        return sum(seeds[1:], seeds[0]) / len(seeds)


@lru_cache(maxsize=4096)
def _measured(folder: Path, stem: str, method: str) -> pd.DataFrame:
    """Return a line of measures for each query."""
    qrels_file, run_file = (
        folder / "runs" / f"{stem}.qrels",
        folder / "runs" / f"{stem}.{method}.trec",
    )
    for file in (qrels_file, run_file):
        if not file.exists():
            raise ArtifactMissing(f"{file} is missing; evaluate again")
    qrels = read_qrels(qrels_file)
    # A method that found nothing for any query leaves a file without a line.
    found = read_run(run_file) if run_file.stat().st_size else {}
    per_query = measure_run(qrels, {**dict.fromkeys(qrels, ()), **found}).per_query
    return pd.DataFrame.from_dict(per_query, orient="index")


def gather(sources: Sequence[str]) -> list[System]:
    """Read folders of sweeps and of evaluations, or ``NAME=FOLDER,FOLDER``: one for each seed.

    Raises
    ------
    ArtifactMissing
        A folder holds neither.
    """
    systems: list[System] = []
    for source in sources:
        name, is_named, folders = source.partition("=")
        places = [Path(place) for place in (folders if is_named else source).split(",")]
        rows = sorted(places[0].glob(f"*/*/{ROW_FILE}"))
        if rows and not is_named:
            systems += _read_sweep(rows)
            continue
        title = name if is_named else places[0].resolve().name
        systems.append(_system(title, title, SYSTEMS, "", places, places[0].parent))
    if len({one.name for one in systems}) < len(systems):
        raise UsageError("two systems have one name; give them others, as NAME=FOLDER")
    return systems


def _read_sweep(files: Sequence[Path]) -> Iterator[System]:
    records: dict[str, list[tuple[Path, dict[str, Any]]]] = {}
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        records.setdefault(found["name"], []).append((file.parent, found))
    in_order = sorted(records.items(), key=lambda one: int(one[1][0][1]["place"]))
    for name, own in in_order:
        folder, row = own[0]
        base = folder.parent.parent / row["model"] / folder.name if row["model"] else folder
        places = [place / EVALUATION for place, _ in own]
        yield _system(name, row["title"] or name, row["table"], row["like"], places, base / MODEL)


def _system(
    name: str, title: str, table: str, like: str, folders: Sequence[Path], model: Path
) -> System:
    frames = []
    for seed, folder in enumerate(folders):
        file = folder / RESULTS
        if not file.exists():
            raise ArtifactMissing(f"{folder} holds no {RESULTS}; evaluate with --out {folder.name}")
        found = json.loads(file.read_text(encoding="utf-8"))
        frame = pd.DataFrame(found["rows"])
        frame["score"] = [row[row["headline"]] for row in found["rows"]]
        frames.append(frame.assign(seed=seed, beam=found["config"]["beam"]))
    rows = pd.concat(frames, ignore_index=True)
    sizes = rows.groupby(["pool", "name"])["queries"].nunique()
    if (sizes > 1).any():
        raise BadData(
            f"the seeds of {title!r} were evaluated on different queries; evaluate one again"
        )
    is_model = (model / "model.json").exists()
    return System(
        name=name, title=title, table=table, like=like, folders=tuple(folders),
        model=model if is_model else None, split=found["split"], rows=rows,
    )  # fmt: skip
