"""A tiny stand-in for M-BEIR, trained on and evaluated as the real one would be."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from genius_search.data.mbeir import PAPER_ROWS, MBeir, read_queries
from genius_search.errors import BadData
from genius_search.lab.evaluate import evaluate
from genius_search.lab.settings import EvaluationConfig
from genius_search.model import Genius
from genius_search.progress import Silent
from genius_search.records import Query

QUICK = (
    "--preset=tiny",
    "--encoder.training.epochs=6",
    "--quantizer.training.epochs=6",
    "--generator.training.epochs=12",
)
METHODS = ("exact-fused", "generative", "generative+embeddings")
K = 10


_RUN = """
import contextlib, json, sys
from genius_search.cli import main

*first, last = json.loads(sys.argv[1])
with contextlib.redirect_stdout(sys.stderr):
    for words in first:
        assert main(words) == 0, words
raise SystemExit(main(last))
"""


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """The data set, and its results by pool, method and row; in a process of its own, unchecked types."""
    folder = tmp_path_factory.mktemp("rehearsal")
    data, model = str(folder / "mbeir"), str(folder / "model")
    commands = [
        ["data", "rehearsal", "--share=0.0002", "--out", data],
        ["fit", data, "--encoder=small", "--out", model, *QUICK],
        ["evaluate", data, "--model", model, "--methods", ",".join(METHODS), "--json"],
    ]
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", _RUN, json.dumps(commands)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    results = {(row["pool"], row["method"], row["name"]): row for row in found["rows"]}
    return MBeir(folder / "mbeir"), results


def chance(data: MBeir, name: str, pool_size: int) -> float:
    """The share of queries that have a right answer among K picked blindly."""
    (row,) = [row for row in data.rows("test") if row.name == name]
    misses = [(1 - len(query.positives) / pool_size) ** K for query in read_queries(row.queries)]
    return 1 - sum(misses) / len(misses)


def test_every_row_is_there_in_both_pools_in_the_order_of_the_papers(rehearsed):
    _, results = rehearsed
    for pool in ("local", "global"):
        for method in METHODS:
            names = [name for where, how, name in results if (where, how) == (pool, method)]
            assert tuple(names) == PAPER_ROWS
    local = {row["pool_size"] for row in results.values() if row["pool"] == "local"}
    whole = {row["pool_size"] for row in results.values() if row["pool"] == "global"}
    assert len(whole) == 1
    assert max(local) < min(whole)


def test_every_row_is_found_well_above_chance_in_the_union_of_all_pools(rehearsed):
    data, results = rehearsed
    for name in PAPER_ROWS:
        for method in ("exact-fused", "generative+embeddings"):
            row = results["global", method, name]
            assert row[f"R@{K}"] > 4 * chance(data, name, row["pool_size"]), (method, name)


def test_generated_ids_find_something_in_nearly_every_row(rehearsed):
    data, results = rehearsed
    rows = [results["global", "generative", name] for name in PAPER_ROWS]
    above = [row[f"R@{K}"] > 2 * chance(data, row["name"], row["pool_size"]) for row in rows]
    assert sum(above) >= 13


def lose_line(path: Path, wanted: str) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.unlink()  # the copy is a hard link
    path.write_text("".join(line for line in lines if wanted not in line))


def first_query(root: Path) -> Query:
    (row,) = MBeir(root).rows("test", names=["cirr_task7"])
    return next(read_queries(row.queries))


def without_one_instruction_row(root: Path) -> str:
    lose_line(root / "instructions/query_instructions.tsv", "\t8\t")
    return r"query_instructions\.tsv: no instruction for data set 8, image-text -> image"


def without_one_candidate(root: Path) -> str:
    query = first_query(root)
    for did in query.positives:
        lose_line(root / "cand_pool/local/mbeir_cirr_task7_cand_pool.jsonl", f'"{did}"')
    return rf"mbeir_cirr_task7_cand_pool\.jsonl: .*no right answer in the pool: {query.qid} .*{query.positives[0]}"


def without_one_judged_query(root: Path) -> str:
    lose_line(root / "qrels/test/mbeir_cirr_task7_test_qrels.txt", f"{first_query(root).qid} ")
    return rf"mbeir_cirr_task7_test_qrels\.txt: no line for query {first_query(root).qid}"


def without_one_picture(root: Path) -> str:
    query = first_query(root)
    assert query.image is not None
    (root / query.image).unlink()
    return rf"{Path(query.image).name}: .*query {query.qid} needs it"


LOST = {
    "query/test/mbeir_nights_task4_test.jsonl": "qrels for nights_task4",
    "cand_pool/local/mbeir_cirr_task7_cand_pool.jsonl": r"mbeir_cirr_task7_test\.jsonl",
    "qrels/test/mbeir_cirr_task7_test_qrels.txt": r"cirr_task7.* qrels/test/mbeir_cirr_task7_test_qrels\.txt",
    "instructions/query_instructions.tsv": r"query_instructions\.tsv is missing",
}
DAMAGES = (without_one_instruction_row, without_one_candidate, without_one_judged_query, without_one_picture)


@pytest.mark.parametrize("damage", [*LOST, *DAMAGES])
def test_whatever_is_lost_is_named_by_the_evaluation_and_never_a_zero(rehearsed, tmp_path, damage):
    data, _ = rehearsed
    root = tmp_path / "data"
    shutil.copytree(data.root, root, copy_function=os.link)
    if damage in LOST:
        (root / damage).unlink()
    message = LOST[damage] if damage in LOST else damage(root)
    rows = () if damage == next(iter(LOST)) else ("cirr_task7",)
    config = EvaluationConfig(pools=("local",), methods=("exact-raw",), rows=rows)
    model = Genius.open(data.root.parent / "model")
    with pytest.raises(BadData, match=message):
        evaluate(MBeir(root), model, config, tmp_path / "out", progress=Silent())
