from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from genius_search.data.features import Features
from genius_search.data.mbeir import MBeir, read_judgements, read_qrels
from genius_search.errors import UsageError
from genius_search.model import Genius
from genius_search.progress import Silent
from genius_search.records import TASKS, task_name
from genius_search.training.records import choose_queries
from research.codes import encode_features
from research.evaluate import EvaluationResult, evaluate, group_pools, main
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
    """An evaluation of all tasks, pools and methods."""
    data, model = MBeir(trained.data), Genius.open(trained.model)
    folder = tmp_path_factory.mktemp("evaluated")
    result = evaluate(data, model, EvaluationConfig(), folder, progress=Silent())
    return Evaluated(data, model, folder, result)


def test_every_task_has_a_row_for_each_pool_and_method(evaluated):
    rows = [(row.pool, row.task_id, row.method) for row in evaluated.result.rows]
    assert sorted(rows) == sorted(product(("local", "global"), TASKS, METHODS))
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
    words = [str(evaluated.data.root), "--encoder", evaluated.model.encoder.spec]
    assert main([*words, "--out", str(tmp_path), "--pools", "global", "--json"]) == 0
    for row in json.loads(capsys.readouterr().out)["rows"]:
        assert row["method"] == "exact-raw"
        expected = evaluated.row("global", row["task_id"], "exact-raw")
        assert expected.measures.items() <= row.items()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beam": 0}, "beam"),
        ({"max_queries": -1}, "max_queries"),
        ({"pools": ("local", "local")}, "pools"),
        ({"pools": ()}, "pools"),
        ({"methods": ()}, "methods"),
    ],
)
def test_impossible_settings_are_refused_before_any_work(evaluated, tmp_path, settings, message):
    config = EvaluationConfig(**settings)
    with pytest.raises(UsageError, match=message):
        evaluate(evaluated.data, evaluated.model, config, tmp_path, progress=Silent())
    assert list(tmp_path.iterdir()) == []


def test_a_small_evaluation_embeds_no_more_than_it_needs(evaluated, tmp_path):
    config = EvaluationConfig(
        methods=("exact-raw",), pools=("local", "global"), max_queries=2, max_candidates=30
    )
    result = evaluate(evaluated.data, evaluated.model, config, tmp_path, progress=Silent())
    assert {row.queries for row in result.rows} == {2}
    # The sample of the union has the answers of 16 queries, which may be more than 30.
    assert {row.pool_size for row in result.rows if row.pool == "local"} == {30}
    embedded = [Features.open(path.parent) for path in tmp_path.rglob("features/manifest.json")]
    num_answers = sum(
        len(read_judgements(row, [query.qid for query in choose_queries(row, 2)]))
        for row in evaluated.data.rows("test")
    )
    assert max(map(len, embedded)) <= max(30, 3 * num_answers)
    queries = list(tmp_path.glob("features-*/*/rows.npy"))
    assert sum(len(np.load(path)) for path in queries) == 2 * 8


def test_local_pools_with_common_candidates_are_embedded_together(evaluated, tmp_path):
    pools = list(dict.fromkeys(row.local_pool for row in evaluated.data.rows("test")))
    groups = group_pools(pools)
    assert sorted(path for group in groups for path in group) == sorted(pools)
    config = EvaluationConfig(methods=("exact-raw",), pools=("local",), max_queries=1)
    evaluate(evaluated.data, evaluated.model, config, tmp_path, progress=Silent())
    embedded = [
        Features.open(path.parent).ids
        for path in tmp_path.glob("candidates*/features/manifest.json")
    ]
    ids = np.concatenate(embedded)
    assert len(np.unique(ids)) == len(ids)


def test_disjoint_pools_are_in_different_groups(tmp_path):
    for name, numbers in (("a", (1, 2)), ("b", (3, 4)), ("c", (2, 5))):
        lines = [
            json.dumps({"did": f"1:{number}", "modality": "text", "txt": "x"}) for number in numbers
        ]
        (tmp_path / name).write_text("\n".join(lines))
    a, b, c = (tmp_path / name for name in "abc")
    assert group_pools([a, b, c]) == [[b], [a, c]]


def test_interrupted_codes_continue(evaluated, tmp_path, monkeypatch):
    folder = evaluated.folder / "candidates"
    features = Features.open(folder / "features")
    monkeypatch.setattr("research.codes.BATCH", 64)
    monkeypatch.setattr("research.codes.BATCHES_PER_CHECKPOINT", 2)
    done: list[int] = []

    class Interrupting(Silent):
        def advance(self, count, measures):
            done.append(count)
            if len(done) == 5:
                raise KeyboardInterrupt

    def encode():
        return encode_features(
            evaluated.model,
            features,
            tmp_path / "codes",
            embeddings="fused",
            progress=Interrupting(),
        )

    with pytest.raises(KeyboardInterrupt):
        encode()
    arrays = encode()
    assert done[5] == 5 * 64  # a checkpoint had four batches
    whole = np.load(folder / "codes-fused" / "codes.npy")
    assert (arrays.codes == whole).all()
