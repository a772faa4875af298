"""The synthetic catalogue: exact answers, disjoint splits, equal bytes for equal seeds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from genius_search.data.mbeir import MBeir, read_candidates, read_pool, read_qrels, read_queries
from genius_search.errors import UsageError
from genius_search.records import TASKS
from research.synth import catalogue
from research.synth.catalogue import draw_catalogue
from research.synth.world import ATTRIBUTES

SMALL = {"items": 1_003, "train_products": 60, "queries_per_task": 25}


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def parsed(source: str | None) -> dict:
    assert source is not None
    return json.loads(source)


@pytest.fixture(scope="module")
def drawn_catalogue(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("catalogue") / "drawn"
    draw_catalogue(folder, seed=3, **SMALL)
    return folder


def test_equal_seeds_give_equal_bytes_in_several_processes(drawn_catalogue, tmp_path, monkeypatch):
    monkeypatch.setattr(catalogue, "MAX_SINGLE_PROCESS_PICTURES", 0)
    draw_catalogue(tmp_path / "again", seed=3, **SMALL)
    assert contents(tmp_path / "again") == contents(drawn_catalogue)


@pytest.mark.parametrize("split", ["val", "test"])
def test_all_eight_tasks_have_queries(drawn_catalogue, split):
    rows = MBeir(drawn_catalogue).rows(split)
    assert [row.task_id for row in rows] == list(TASKS)
    for row in rows:
        queries = list(read_queries(row.queries))
        assert len(queries) == 25
        assert {query.modality for query in queries} == {TASKS[row.task_id][0]}


@pytest.mark.parametrize("split", ["val", "test"])
def test_positives_are_all_right_answers_in_the_local_and_the_union_pool(drawn_catalogue, split):
    data = MBeir(drawn_catalogue)
    union = list(read_pool(data.global_pool(split)))
    for row in data.rows(split):
        local = list(read_candidates(row.local_pool))
        assert {candidate.modality for candidate in local} == {TASKS[row.task_id][1]}
        qrels = read_qrels(row.qrels)
        for query in read_queries(row.queries):
            answer = parsed(query.source)
            expected = {key: answer[key] for key in ("kind", "product", "fact") if key in answer}
            for pool in (local, union):
                answers = [
                    candidate.did for candidate in pool if parsed(candidate.source) == expected
                ]
                assert answers == list(query.positives)
            assert qrels[query.qid] == dict.fromkeys(query.positives, 1)


def test_the_pictured_product_differs_from_the_answer_only_in_the_named_attribute(drawn_catalogue):
    for row in MBeir(drawn_catalogue).rows("test"):
        queries = [parsed(query.source) for query in read_queries(row.queries)]
        changed = [query for query in queries if "changed" in query]
        assert (len(changed) > 0) == (row.task_id in {7, 8})
        for query in changed:
            differing = [
                name for name in ATTRIBUTES if query["product"][name] != query["reference"][name]
            ]
            assert differing == [query["changed"]]


def test_splits_have_no_common_products(drawn_catalogue):
    data = MBeir(drawn_catalogue)
    products: dict[str, set[str]] = {"train": set(), "val": set(), "test": set()}
    for split, split_products in products.items():
        files = [row.queries for row in data.rows(split)] if split != "train" else []
        files += data.training_queries() if split == "train" else []
        sources = [parsed(query.source) for file in files for query in read_queries(file)]
        sources += [parsed(candidate.source) for candidate in read_pool(data.global_pool(split))]
        for source in sources:
            split_products.add(json.dumps(source["product"]))
            split_products.add(json.dumps(source.get("reference", source["product"])))
    assert len(products["test"]) > 200
    assert not products["test"] & products["train"]
    assert not products["test"] & products["val"]
    assert not products["val"] & products["train"]


def test_another_catalogue_or_other_files_are_never_overwritten(drawn_catalogue, tmp_path):
    with pytest.raises(UsageError, match="something else than this catalogue"):
        draw_catalogue(drawn_catalogue, seed=4, **SMALL)
    (tmp_path / "letter.txt").write_text("dear")
    for out in (tmp_path, tmp_path / "letter.txt"):
        with pytest.raises(UsageError, match="something else"):
            draw_catalogue(out, seed=3, **SMALL)
