"""Evaluations on disk as `genius evaluate` leaves them, with chosen rankings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from genius_search.lab.report.evaluated import System, read_evaluation
from genius_search.lab.results import ResultRow, to_json
from genius_search.lab.runs import Hit, Run, write_qrels, write_run
from genius_search.lab.runs import evaluate as measure

TASKS = {"toys_task0": (0, "text -> image"), "toys_task1": (1, "text -> text")}


@pytest.fixture
def evaluation():
    """Write an evaluation: method -> for each query the place of its right answer (0 is nowhere)."""

    def write(
        folder: Path, places: Mapping[str, Sequence[int]], *, pool="global", beam=50, tasks=tuple(TASKS)
    ) -> Path:
        runs = folder / "runs"
        runs.mkdir(parents=True)
        queries = len(next(iter(places.values())))
        rows = []
        for task in tasks:
            task_id, name = TASKS[task]
            qrels = {f"7:{query}": {f"7:{10 + query}": 1} for query in range(queries)}
            write_qrels(runs / f"{task}_test.{pool}.qrels", qrels)
            for method, found in places.items():
                run = Run(method, {f"7:{query}": ranking(query, place) for query, place in enumerate(found)})
                write_run(runs / f"{task}_test.{pool}.{method}.trec", run)
                rows.append(
                    ResultRow(
                        name=task,
                        dataset="toys",
                        task=name,
                        task_id=task_id,
                        pool=pool,
                        method=method,
                        queries=queries,
                        pool_size=100,
                        headline_k=5,
                        measures=measure(qrels, run).means,
                        bytes_per_item=12.25,
                        candidates_touched=50.0,
                    )
                )
        about = {"data": "toys", "split": "test", "config": {"beam": beam, "scores": "level"}}
        (folder / "results.json").write_text(json.dumps({**about, **to_json(rows)}))
        return folder

    return write


def ranking(query: int, place: int) -> list[Hit]:
    """Ten hits, 7:90 to 7:99, with the right one at its place; log-probabilities."""
    dids = [f"7:{90 + number}" for number in range(10)]
    if place:
        dids.insert(place - 1, f"7:{10 + query}")
    return [Hit(did, -1.0 - 0.5 * rank) for rank, did in enumerate(dids)]


@pytest.fixture
def system(evaluation, tmp_path):
    """A system with a seed for each of some lists of places."""

    def make(title: str, *seeds: Mapping[str, Sequence[int]], table="systems", **settings) -> System:
        return System(
            name=title,
            title=title,
            table=table,
            seeds=tuple(
                read_evaluation(evaluation(tmp_path / f"{title}-{seed}", places, **settings), seed=seed)
                for seed, places in enumerate(seeds)
            ),
        )

    return make
