import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from genius_search.errors import ArtifactMissing
from research.published.repro import (
    NAMES,
    differing_rows,
    main,
    needed_files,
    row_files,
    rows_of,
    why_not_compared,
)
from research.results import ResultRow

CIRR = ResultRow(
    name="cirr_task7",
    dataset="cirr",
    task="image-text -> image",
    task_id=7,
    pool="local",
    method="exact-raw",
    queries=4_170,
    pool_size=21_551,
    headline="R@5",
    measures={"R@5": 0.4532},
    bytes_per_item=1536.0,
    candidates_touched=21_551.0,
)


def rename(drawn: Path, data: Path, name: str) -> None:
    """Give one task of a drawn world a row's names, as if it were M-BEIR's."""
    task = name.rpartition("_")[2]
    queries, pool, qrels = row_files(name)
    for path, source in (
        (queries, f"query/test/mbeir_catalogue_{task}_test.jsonl"),
        (pool, f"cand_pool/local/mbeir_catalogue_{task}_test_cand_pool.jsonl"),
        (qrels, f"qrels/test/mbeir_catalogue_{task}_test_qrels.txt"),
        ("instructions/query_instructions.tsv", "instructions/query_instructions.tsv"),
    ):
        (data / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(drawn / source, data / path)
    (data / "mbeir_images").mkdir(exist_ok=True)
    link = data / "mbeir_images" / "catalogue_images"
    if not link.exists():
        link.symlink_to(drawn / "mbeir_images" / "catalogue_images")


@pytest.fixture
def cirr(trained, tmp_path) -> Path:
    """A folder with what cirr_task7 needs, of a tiny size."""
    data = tmp_path / "M-BEIR"
    rename(trained.data, data, "cirr_task7")
    (data / "mbeir_images" / "cirr_images").mkdir()
    return data


@pytest.mark.parametrize("name", NAMES)
def test_every_name_needs_files(name):
    files = needed_files(name, ["local"])
    assert set(row_files(rows_of(name)[0])) < set(files)


def test_a_row_of_the_right_size_is_compared():
    assert why_not_compared("cirr_task7", [CIRR]) is None
    assert "cirr_task7, local: 12 of 4,170" in (
        why_not_compared("cirr_task7", [replace(CIRR, queries=12)]) or ""
    )


@pytest.mark.parametrize(("off", "differs"), [(0.0, False), (0.0029, False), (-0.0031, True)])
def test_exact_search_is_judged_within_the_tolerance(off, differs):
    row = replace(CIRR, measures={"R@5": 0.4532 + off})
    assert (
        differing_rows([row, replace(row, method="generative"), replace(row, queries=7)]) == [row] * differs
    )


def test_the_program_lists_what_is_needed_and_reproduces_what_is_there(capsys, cirr, trained, tmp_path):
    assert main(["cirr_task7", "--data", str(tmp_path / "nothing")]) == 0
    printed = capsys.readouterr().out
    assert "missing  query/test/mbeir_cirr_task7_test.jsonl" in printed
    assert "cirr_task7, local, exact-raw: 45.32" in printed
    flags = ["--model", str(trained.model), "--out", str(tmp_path / "out")]
    assert main(["cirr_task7", "--data", str(tmp_path / "nothing"), *flags]) == ArtifactMissing.exit_code
    assert "5 of 5 files are missing" in capsys.readouterr().err
    assert main(["cirr_task7", "--data", str(cirr), *flags, "--json"]) == 1
    written = json.loads(capsys.readouterr().out)
    assert written["compared"] is False
    assert {row["name"] for row in written["rows"]} == {"cirr_task7"}
    assert {row["queries"] for row in written["rows"]} == {12}


def test_captions_stand_beside_published_ones(capsys, trained, tmp_path):
    data = tmp_path / "flickr"
    rename(trained.data, data, "flickr30k_task0")
    (data / "mbeir_images" / "flickr30k").mkdir()
    assert main(["flickr30k", "--data", str(data)]) == 0
    assert "GENIUS" in capsys.readouterr().out
    flags = ["--model", str(trained.model), "--out", str(tmp_path / "out")]
    assert main(["flickr30k", "--data", str(data), *flags]) == 1
    assert "trained on" in capsys.readouterr().out
