from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from genius_search.data.mbeir import MBeir, read_qrels
from genius_search.errors import UsageError
from genius_search.model import Genius
from genius_search.progress import Silent
from genius_search.records import TASKS, task_name
from research.evaluate import EvaluationResult, evaluate, main
from research.results import ResultRow
from research.runs import measure_run, read_run
from research.settings import METHODS, EvaluationConfig

QUERIES = 12


class Evaluated(NamedTuple):
    data: MBeir
    model: Genius
    folder: Path
    result: EvaluationResult

    def row(self, pool: str, task: int, method: str) -> ResultRow:
        (row,) = [
            row
            for row in self.result.rows
            if (row.pool, row.task_id, row.method) == (pool, task, method)
        ]
        return row


@pytest.fixture(scope="module")
def evaluated(trained, tmp_path_factory) -> Evaluated:
    """Everything, evaluated once."""
    data, model = MBeir(trained.data), Genius.open(trained.model)
    folder = tmp_path_factory.mktemp("evaluated")
    return Evaluated(
        data, model, folder, evaluate(data, model, EvaluationConfig(), folder, progress=Silent())
    )


def test_every_task_has_a_row_for_each_pool_and_method(evaluated):
    found = [(row.pool, row.task_id, row.method) for row in evaluated.result.rows]
    expected = [
        (pool, task, method) for pool in ("local", "global") for task in TASKS for method in METHODS
    ]
    assert sorted(found) == sorted(expected)
    assert {row.task for row in evaluated.result.rows} == {task_name(task) for task in TASKS}
    assert {row.queries for row in evaluated.result.rows} == {QUERIES}


def test_a_run_on_disk_gives_the_measures_of_its_row(evaluated):
    for row in evaluated.data.rows("test"):
        assert row.qrels is not None
        qrels = read_qrels(row.qrels)
        for pool in ("local", "global"):
            for method in METHODS:
                run = read_run(evaluated.folder / "runs" / f"{row.name}_test.{pool}.{method}.trec")
                expected = evaluated.row(pool, row.task_id, method)
                assert measure_run(qrels, run).means == expected.measures


def test_an_encoder_alone_is_searched_exactly(evaluated, tmp_path, capsys):
    words = [
        str(evaluated.data.root),
        "--encoder",
        evaluated.model.encoder.spec,
        "--out",
        str(tmp_path),
    ]
    assert main([*words, "--pools", "global", "--json"]) == 0
    for row in json.loads(capsys.readouterr().out)["rows"]:
        assert row["method"] == "exact-raw"
        expected = evaluated.row("global", row["task_id"], "exact-raw")
        assert expected.measures.items() <= row.items()


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"beam": 0}, "beam"),
        ({"max_queries": -1}, "max_queries"),
        ({"pools": ("local", "local")}, "pools"),
        ({"pools": ()}, "pools"),
        ({"methods": ()}, "methods"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_any_work(evaluated, tmp_path, wrong, named):
    with pytest.raises(UsageError, match=named):
        evaluate(
            evaluated.data, evaluated.model, EvaluationConfig(**wrong), tmp_path, progress=Silent()
        )
    assert list(tmp_path.iterdir()) == []
