from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from genius_search.data.features import Features
from genius_search.data.mbeir import MBeir, read_candidates, read_qrels, read_queries
from genius_search.errors import BadData, UsageError
from genius_search.lab import codes
from genius_search.lab.codes import encode_features
from genius_search.lab.evaluate import EvaluationResult, doctor, evaluate
from genius_search.lab.methods import DEPTH
from genius_search.lab.results import ResultRow
from genius_search.lab.runs import evaluate as measure
from genius_search.lab.runs import read_run
from genius_search.lab.settings import METHODS, EvaluationConfig
from genius_search.model import Genius
from genius_search.progress import Silent
from genius_search.records import TASKS, candidate_number, query_number, task_name

QUERIES = 12


class Evaluated(NamedTuple):
    data: MBeir
    model: Genius
    folder: Path
    result: EvaluationResult

    def row(self, pool: str, task: int, method: str) -> ResultRow:
        (row,) = [
            row for row in self.result.rows if (row.pool, row.task_id, row.method) == (pool, task, method)
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
    expected = [(pool, task, method) for pool in ("local", "global") for task in TASKS for method in METHODS]
    assert sorted(found) == sorted(expected)
    assert {row.task for row in evaluated.result.rows} == {task_name(task) for task in TASKS}
    assert {row.queries for row in evaluated.result.rows} == {QUERIES}


def test_local_pools_are_parts_of_the_global_one(evaluated):
    for row in evaluated.result.rows:
        assert row.pool_size == 1_000 if row.pool == "global" else row.pool_size < 1_000


def test_exact_search_touches_the_whole_pool_and_generation_a_part_of_it(evaluated):
    for row in evaluated.result.rows:
        if row.method.startswith("exact"):
            assert row.candidates_touched == row.pool_size
        else:
            assert 0 < row.candidates_touched <= row.pool_size


def test_embeddings_cost_two_bytes_a_number_and_ids_two_bytes_a_code_or_mark_and_four_of_the_table(evaluated):
    for task in TASKS:
        sizes = {method: evaluated.row("global", task, method).bytes_per_item for method in METHODS}
        assert sizes["exact-raw"] == sizes["exact-fused"] == 2 * evaluated.model.dim
        assert sizes["exact-fused+hubness"] == sizes["exact-fused"] + 1
        assert sizes["generative"] == sizes["generative+codes"] == sizes["exact-codes"]
        assert 0 < sizes["generative"] <= 2 * (evaluated.model.quantizer.num_levels + 2) + 4
        assert sizes["generative+raw"] == pytest.approx(sizes["generative"] + sizes["exact-raw"])
        assert sizes["generative+embeddings"] == sizes["generative+raw"] + 1


@pytest.mark.parametrize("pool", ["local", "global"])
def test_exact_search_over_fused_embeddings_equals_a_brute_force(evaluated, pool):
    data, model = evaluated.data, evaluated.model
    row = data.rows("test")[0]
    candidates = Features.open(evaluated.folder / "candidates" / "features")
    queries = Features.open(next(evaluated.folder.glob(f"queries-*/{row.name}")))
    files = data.global_pool("test") if pool == "global" else [row.local_pool]
    numbers = [candidate_number(one.did) for file in files for one in read_candidates(file)]
    place = {number: row for row, number in enumerate(candidates.ids.tolist())}
    stored = model.embed(candidates.gather(np.array([place[number] for number in numbers])))
    asked = model.embed(queries.gather(np.arange(len(queries))))
    scores = (asked[:, None, :] * stored[None]).sum(dim=2)
    order = scores.argsort(dim=1, descending=True)[:, :DEPTH]
    run = read_run(evaluated.folder / "runs" / f"{row.name}_test.{pool}.exact-fused.trec")
    for number, best, values in zip(queries.ids.tolist(), order, scores, strict=True):
        hits = run.hits[f"{number // 500_000}:{number % 500_000}"]
        assert len(hits) == DEPTH
        # Embeddings are kept in 16 bits.
        np.testing.assert_allclose([hit.score for hit in hits], values[best].numpy(), atol=1e-3)
        sure = {numbers[one] for one in best.tolist() if values[one] > values[best[-1]] + 2e-3}
        assert sure <= {candidate_number(hit.did) for hit in hits}


def test_raw_search_is_over_the_encoders_sums_and_knows_no_fusion(evaluated):
    row = evaluated.data.rows("test")[0]
    candidates = Features.open(evaluated.folder / "candidates" / "features")
    queries = Features.open(next(evaluated.folder.glob(f"queries-*/{row.name}")))
    asked = F.normalize(queries.gather(np.arange(len(queries))).total(), dim=1)
    stored = F.normalize(candidates.gather(np.arange(len(candidates))).total(), dim=1)
    pool = {candidate_number(one.did) for one in read_candidates(row.local_pool)}
    inside = torch.tensor([number in pool for number in candidates.ids.tolist()])
    best = (asked @ stored.T).masked_fill(~inside, -torch.inf).max(dim=1).values
    run = read_run(evaluated.folder / "runs" / f"{row.name}_test.local.exact-raw.trec")
    firsts = [run.hits[query.qid][0].score for query in read_queries(row.queries)]
    assert queries.ids.tolist() == [query_number(query.qid) for query in read_queries(row.queries)]
    np.testing.assert_allclose(firsts, best.numpy(), atol=1e-5)


def test_a_run_on_disk_gives_the_measures_of_its_row(evaluated):
    for row in evaluated.data.rows("test"):
        assert row.qrels is not None
        qrels = read_qrels(row.qrels)
        for pool in ("local", "global"):
            for method in METHODS:
                run = read_run(evaluated.folder / "runs" / f"{row.name}_test.{pool}.{method}.trec")
                assert run.name == method
                expected = evaluated.row(pool, row.task_id, method)
                assert measure(qrels, run).means == expected.measures


def test_evaluating_again_says_the_same(evaluated, tmp_path):
    config = EvaluationConfig(pools=("local",), methods=("exact-fused", "generative+codes"))
    again = evaluate(evaluated.data, evaluated.model, config, tmp_path, progress=Silent())
    assert len(again.rows) == 2 * len(TASKS)
    for row in again.rows:
        assert row.measures == evaluated.row("local", row.task_id, row.method).measures
    assert again.health == evaluated.result.health


def test_a_beam_as_wide_as_the_pool_ranked_by_embeddings_is_exact_search(evaluated):
    config = EvaluationConfig(
        pools=("local",), methods=("exact-fused", "generative+embeddings"), beam=1_000, max_queries=4
    )
    result = evaluate(evaluated.data, evaluated.model, config, evaluated.folder, progress=Silent())
    for exact, generated in zip(result.rows[::2], result.rows[1::2], strict=True):
        assert generated.candidates_touched == exact.pool_size
        assert generated.measures["R@10"] == pytest.approx(exact.measures["R@10"], abs=0.26)


@pytest.mark.parametrize("limit", [1, 5])
def test_max_queries_takes_that_many_of_each_row(evaluated, limit, tmp_path):
    config = EvaluationConfig(pools=("local",), methods=("exact-raw",), max_queries=limit)
    shutil.copytree(evaluated.folder / "candidates", tmp_path / "candidates")
    result = evaluate(evaluated.data, evaluated.model, config, tmp_path, progress=Silent())
    assert {row.queries for row in result.rows} == {min(limit, QUERIES)}


@pytest.mark.parametrize("choice", ["hashed", "first", "none"])
def test_any_choice_of_instructions_can_be_evaluated(evaluated, choice):
    config = EvaluationConfig(pools=("local",), methods=("exact-raw",), max_queries=2, instructions=choice)
    result = evaluate(evaluated.data, evaluated.model, config, evaluated.folder, progress=Silent())
    assert len(result.rows) == len(TASKS)


def test_evaluating_under_all_instructions_gives_the_mean_over_them(evaluated, tmp_path):
    name = evaluated.data.rows("test")[0].name
    config = EvaluationConfig(
        pools=("local",), methods=("exact-raw", "generative"), rows=(name,), instructions="all"
    )
    result = evaluate(evaluated.data, evaluated.model, config, tmp_path, progress=Silent())
    (row,) = [row for row in evaluated.data.rows("test") if row.name == name]
    assert row.qrels is not None
    qrels = read_qrels(row.qrels)
    for found in result.rows:
        runs = sorted((tmp_path / "runs").glob(f"{name}_test.local.{found.method}.instruction-*.trec"))
        each = [measure(qrels, read_run(run)).means for run in runs]
        (queries,) = (Features.open(path) for path in tmp_path.glob(f"queries-*/{name}"))
        assert len(each) == len(np.unique(queries.variant)) > 1
        for measured, value in found.measures.items():
            assert value == pytest.approx(sum(one[measured] for one in each) / len(each))


def test_only_the_rows_that_are_named_are_evaluated_and_an_unknown_one_is_refused(evaluated, tmp_path):
    names = [row.name for row in evaluated.data.rows("test")]
    config = EvaluationConfig(pools=("local",), methods=("exact-raw",), rows=(names[2], names[0]))
    result = evaluate(evaluated.data, evaluated.model, config, tmp_path, progress=Silent())
    assert [row.name for row in result.rows] == [names[0], names[2]]
    wrong = EvaluationConfig(rows=("mscoco_task9",))
    with pytest.raises(UsageError, match=f"mscoco_task9.*{names[0]}"):
        evaluate(evaluated.data, evaluated.model, wrong, tmp_path, progress=Silent())


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"methods": ("exact",)}, "exact"),
        ({"beam": 0}, "beam"),
        ({"max_queries": -1}, "max_queries"),
        ({"pools": ("local", "local")}, "pools"),
        ({"pools": ()}, "pools"),
        ({"methods": ()}, "methods"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_any_work(evaluated, tmp_path, wrong, named):
    with pytest.raises(UsageError, match=named):
        evaluate(evaluated.data, evaluated.model, EvaluationConfig(**wrong), tmp_path, progress=Silent())
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def spoiled(trained, evaluated, tmp_path) -> Path:
    """The data set without pictures; its features are there already."""
    shutil.copytree(
        trained.data, tmp_path / "data", ignore=lambda folder, names: {"mbeir_images"} & set(names)
    )
    (tmp_path / "data" / "mbeir_images").symlink_to(trained.data / "mbeir_images")
    shutil.copytree(evaluated.folder / "candidates", tmp_path / "out" / "candidates")
    return tmp_path / "data"


CHEAP = EvaluationConfig(pools=("local",), methods=("exact-raw",))


def test_a_query_file_without_a_last_line_break_loses_no_query(evaluated, spoiled):
    path = MBeir(spoiled).rows("test")[0].queries
    path.write_text("\n\n" + path.read_text().rstrip("\n"))
    result = evaluate(MBeir(spoiled), evaluated.model, CHEAP, spoiled.parent / "out", progress=Silent())
    assert {row.queries for row in result.rows} == {QUERIES}


def test_the_results_on_disk_say_what_was_evaluated(evaluated):
    written = json.loads((evaluated.folder / "results.json").read_text())
    assert written["model"] == evaluated.model.fingerprint
    assert written["split"] == "test"
    assert written["data"] == evaluated.data.name
    assert {"beam", "rows", "max_queries", "instructions"} <= written["config"].keys()
    assert len(written["rows"]) > 0


def test_a_query_that_occurs_twice_is_an_error(evaluated, spoiled):
    path = MBeir(spoiled).rows("test")[0].queries
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, lines[0]]))
    with pytest.raises(BadData, match="occurs twice"):
        evaluate(MBeir(spoiled), evaluated.model, CHEAP, spoiled.parent / "out", progress=Silent())


def test_a_killed_encoding_goes_on_where_it_stopped(evaluated, tmp_path, monkeypatch):
    features = Features.open(evaluated.folder / "candidates" / "features")
    whole = encode_features(
        evaluated.model, features, tmp_path / "whole", embeddings="raw", progress=Silent()
    )
    monkeypatch.setattr(codes, "BATCH", 100)
    monkeypatch.setattr(codes, "SAVED_EVERY", 2)

    class Killed(Exception):
        pass

    class Kill(Silent):
        def advance(self, done: int, measures: Mapping[str, float]) -> None:
            if done >= 500:
                raise Killed

    seen = []
    gather = Features.gather
    monkeypatch.setattr(Features, "gather", lambda self, rows: seen.append(len(rows)) or gather(self, rows))
    with pytest.raises(Killed):
        encode_features(evaluated.model, features, tmp_path / "parts", embeddings="raw", progress=Kill())
    seen.clear()
    parts = encode_features(
        evaluated.model, features, tmp_path / "parts", embeddings="raw", progress=Silent()
    )
    assert sum(seen) == 600  # 400 rows were saved before
    np.testing.assert_array_equal(parts.codes, whole.codes)
    np.testing.assert_allclose(parts.embeddings, whole.embeddings, atol=1e-3)
    np.testing.assert_allclose(parts.code_cosine, whole.code_cosine, atol=1e-3)


def test_a_candidate_twice_in_a_local_pool_is_an_error_with_file_and_line(evaluated, spoiled):
    path = MBeir(spoiled).rows("test")[0].local_pool
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, lines[0]]))
    with pytest.raises(BadData, match=f"{path.name}:{len(lines) + 1}"):
        evaluate(MBeir(spoiled), evaluated.model, CHEAP, spoiled.parent / "out", progress=Silent())


def test_a_split_that_is_not_there_is_refused(evaluated, tmp_path):
    config = EvaluationConfig(split="nowhere")
    with pytest.raises((BadData, UsageError), match="nowhere"):
        evaluate(evaluated.data, evaluated.model, config, tmp_path, progress=Silent())


def test_the_health_of_the_global_pool_comes_with_the_rows(evaluated):
    health = evaluated.result.health
    assert health.candidates == 1_000
    assert 0 < health.distinct_ids <= 1_000
    assert health.purity == 1.0
    assert len(health.levels) == evaluated.model.quantizer.num_levels
    assert math.isfinite(health.reconstruction)


def test_the_doctor_says_what_training_found_or_examines_a_pool_anew(trained, evaluated, tmp_path):
    shutil.copytree(trained.model, tmp_path / "model")
    remembered = doctor(tmp_path / "model", None, split="test", progress=Silent())
    facts = json.loads((trained.model / "quantizer" / "manifest.json").read_text())["facts"]["health"]
    assert remembered.distinct_ids == facts["distinct_ids"]
    assert remembered.candidates == 300
    anew = doctor(tmp_path / "model", trained.data, split="test", progress=Silent())
    assert anew.candidates == 1_000
    assert anew.distinct_ids == evaluated.result.health.distinct_ids
