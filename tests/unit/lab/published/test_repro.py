import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from genius_search.cli import main
from genius_search.data.mbeir import PAPER_ROWS, MBeir
from genius_search.errors import ArtifactMissing, UsageError
from genius_search.lab.published.repro import (
    CAPTION_SETS,
    NAMES,
    UNION_POOL,
    picture_folders,
    plan,
    row_files,
    verdicts,
    why_not_compared,
)
from genius_search.lab.results import ResultRow

CIRR = ResultRow(
    name="cirr_task7",
    dataset="cirr",
    task="image-text -> image",
    task_id=7,
    pool="local",
    method="exact-raw",
    queries=4_170,
    pool_size=21_551,
    headline_k=5,
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
def test_every_name_has_a_plan_without_any_file(name, tmp_path):
    needed = plan(name, tmp_path / "nothing", None)
    assert needed.missing == list(needed.files)
    assert needed.pools == ("local",)
    assert needed.targets or needed.caption_targets


def test_an_unknown_row_is_refused_with_the_names_there_are(tmp_path):
    with pytest.raises(UsageError, match=r"mscoco_task3.*flickr30k"):
        plan("picture", tmp_path, None)
    with pytest.raises(UsageError, match="cirr_task7"):
        plan("cir_task7", tmp_path, None)


def test_mscoco_is_another_name_of_coco(tmp_path):
    assert plan("mscoco", tmp_path, None).files == plan("coco", tmp_path, None).files


def test_a_row_of_texts_needs_no_pictures(tmp_path):
    assert picture_folders(["webqa_task1"]) == []
    assert picture_folders(["infoseek_task6", "oven_task8"]) == ["mbeir_images/oven_images"]
    assert not any("tar -xzf" in command for command in plan("webqa_task1", tmp_path, None).commands)
    assert any("tar -xzf" in command for command in plan("webqa_task2", tmp_path, None).commands)


def test_files_that_are_there_are_found(cirr, trained):
    needed = plan("cirr_task7", cirr, trained.model)
    assert needed.missing == []
    assert needed.has_model
    assert needed.pools == ("local",)
    assert len(needed.commands) == 1
    pool = row_files("cirr_task7")[1]
    (cirr / pool).unlink()
    assert plan("cirr_task7", cirr, trained.model).missing == [pool]


def test_the_global_pool_needs_its_file_and_the_pictures_of_every_row(cirr, trained):
    (cirr / UNION_POOL).parent.mkdir(parents=True)
    (cirr / UNION_POOL).touch()
    assert plan("cirr_task7", cirr, trained.model).pools == ("local",)
    for folder in picture_folders(PAPER_ROWS):
        (cirr / folder).mkdir(exist_ok=True)
    assert plan("cirr_task7", cirr, trained.model).pools == ("local", "global")
    assert plan("cirr_task7", cirr, trained.model, pools=["local"]).pools == ("local",)


def test_a_pool_that_is_asked_for_has_to_be_there(cirr, trained):
    needed = plan("cirr_task7", cirr, trained.model, pools=["local", "global"])
    assert any(UNION_POOL in command for command in needed.commands)
    with pytest.raises(ArtifactMissing, match=UNION_POOL):
        needed.require()
    with pytest.raises(UsageError, match="coco has one pool"):
        plan("coco", cirr, None, pools=["global"])


def test_only_missing_files_are_fetched(cirr, trained):
    qrels = row_files("cirr_task7")[2]
    (cirr / qrels).unlink()
    fetch, *_ = plan("cirr_task7", cirr, trained.model, pools=["local"]).commands
    assert fetch.count("--include") == 1
    assert qrels in fetch


@pytest.mark.parametrize(("off", "ok"), [(0.0, True), (0.0029, True), (-0.0031, False)])
def test_exact_search_is_judged_within_the_tolerance(off, ok):
    (verdict,) = verdicts([replace(CIRR, measures={"R@5": 0.4532 + off})])
    assert verdict.ok is ok
    assert verdict.score == pytest.approx(45.32 + 100 * off)
    assert [one.value for one in verdict.references] == [45.32, 44.6]


def test_generation_stands_beside_the_paper_and_is_not_judged():
    (verdict,) = verdicts([replace(CIRR, method="generative")])
    assert verdict.ok is None
    assert [one.value for one in verdict.references] == [20.7]


def test_other_sizes_are_neither_judged_nor_compared():
    (verdict,) = verdicts([replace(CIRR, queries=12)])
    assert (verdict.ok, verdict.references) == (None, [])


def test_methods_without_a_published_rival_have_no_verdict():
    assert verdicts([replace(CIRR, method="exact-codes")]) == []


def test_the_command_lists_what_is_needed(capsys, tmp_path):
    assert main(["repro", "cirr_task7", "--data", str(tmp_path / "M-BEIR")]) == 0
    printed = capsys.readouterr().out
    for part in (
        "missing  query/test/mbeir_cirr_task7_test.jsonl",
        "docs/lab/mteb.md",
        "169 GB",
        "genius import clip-sf",
        "cirr_task7, local, exact-raw: 45.32",
        "within 0.3",
    ):
        assert part in printed, part


def test_running_without_the_files_is_refused(capsys, tmp_path):
    flags = ["--data", str(tmp_path / "M-BEIR"), "--model", str(tmp_path / "model")]
    assert main(["repro", "cirr_task7", *flags, "--run"]) == ArtifactMissing.exit_code
    said = capsys.readouterr().err
    assert "5 of 5 files are missing" in said
    assert f"no model at {tmp_path / 'model'}" in said


def test_a_missing_model_is_named(capsys, cirr):
    flags = ["--data", str(cirr), "--model", "nomodel"]
    assert main(["repro", "cirr_task7", *flags, "--run"]) == ArtifactMissing.exit_code
    said = capsys.readouterr().err
    assert "no model at nomodel" in said
    assert "files are missing" not in said
    assert main(["repro", "cirr_task7", *flags]) == 0
    assert "no model at nomodel" in capsys.readouterr().out


def test_with_everything_there_nothing_is_offered_for_download(capsys, cirr, trained):
    assert main(["repro", "cirr_task7", "--data", str(cirr), "--model", str(trained.model)]) == 0
    printed = capsys.readouterr().out
    for part in ("169", "genius import", "hf download", "mteb/", "missing"):
        assert part not in printed, part


def test_running_evaluates_just_this_row_and_says_why_nothing_is_beside_it(capsys, cirr, trained, tmp_path):
    rename(trained.data, cirr, "oven_task6")
    flags = ["--data", str(cirr), "--model", str(trained.model), "--out", str(tmp_path / "out")]
    assert main(["repro", "cirr_task7", *flags, "--run"]) == 1
    printed, progress = capsys.readouterr()
    assert "local pool" in printed
    assert "global pool" not in printed
    assert "cirr_task7 R@5" in printed
    assert "oven" not in printed
    assert "[-] cirr_task7, local, generative+raw" in printed
    assert "12 of 4,170 queries" in " ".join(progress.split())
    assert main(["repro", "cirr_task7", *flags, "--run", "--json"]) == 1
    written = json.loads(capsys.readouterr().out)
    assert written["compared"] is False
    assert {row["name"] for row in written["rows"]} == {"cirr_task7"}
    assert [one["method"] for one in written["verdicts"]] == ["exact-raw", "generative", "generative+raw"]
    assert {row["queries"] for row in written["rows"]} == {12}
    assert len(MBeir(cirr).rows("test")) == 2


def test_captions_are_compared_at_three_ranks(capsys, trained, tmp_path, monkeypatch):
    data = tmp_path / "flickr"
    rename(trained.data, data, "flickr30k_task0")
    (data / "mbeir_images" / "flickr30k").mkdir()
    flags = ["--data", str(data), "--model", str(trained.model), "--out", str(tmp_path / "out")]
    assert main(["repro", "flickr30k", *flags]) == 0
    assert "60.6 / 84.0 / 90.5 (GENIUS; trained on Flickr30K)" in capsys.readouterr().out
    assert main(["repro", "flickr30k", *flags, "--run"]) == 1
    printed, progress = capsys.readouterr()
    assert "(this model)" in printed
    assert "TIGeR" not in printed
    assert "12 of 5,000 queries" in progress
    size = CAPTION_SETS["flickr30k"].size._replace(
        queries=12, pool=int(re.search(r"pool ([\d,]+) of", progress)[1].replace(",", ""))
    )
    monkeypatch.setitem(CAPTION_SETS, "flickr30k", CAPTION_SETS["flickr30k"]._replace(size=size))
    assert main(["repro", "flickr30k", *flags, "--run"]) == 0
    printed, progress = capsys.readouterr()
    assert "TIGeR" in printed
    assert "nothing was compared" not in progress


def test_a_row_of_the_right_size_is_compared(tmp_path):
    needed = plan("cirr_task7", tmp_path, None)
    assert why_not_compared(needed, [CIRR]) is None
    assert "cirr_task7, local: 12 of 4,170" in (why_not_compared(needed, [replace(CIRR, queries=12)]) or "")


def test_all_published_numbers_are_listed(capsys):
    assert main(["repro", "--list"]) == 0
    assert capsys.readouterr().out.startswith("# Published results")
    assert main(["repro", "--list", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == len(PAPER_ROWS)
    assert main(["repro"]) == UsageError.exit_code
