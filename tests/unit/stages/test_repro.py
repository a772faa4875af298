import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from genius_search.cli import all_commands, main
from genius_search.data.mbeir import PAPER_ROWS, MBeir
from genius_search.errors import ArtifactMissing, UsageError
from genius_search.lab.published_numbers import SIZES, UNION_SIZE
from genius_search.lab.repro import (
    CAPTION_SETS,
    IMAGE_FOLDERS,
    MACHINES,
    MTEB,
    NAMES,
    UNION_POOL,
    checks,
    image_folders,
    nothing_compared,
    plan,
    pool_file,
    qrels_file,
    query_file,
    verdicts,
    work_of,
)
from genius_search.lab.results import ResultRow
from genius_search.records import TASKS, Modality

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
    for path, source in (
        (query_file(name), f"query/test/mbeir_catalogue_{task}_test.jsonl"),
        (pool_file(name), f"cand_pool/local/mbeir_catalogue_{task}_test_cand_pool.jsonl"),
        (qrels_file(name), f"qrels/test/mbeir_catalogue_{task}_test_qrels.txt"),
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
    assert needed.pools == ()
    assert needed.published or needed.captions
    assert all(work.hours(machine) > 0 for work in needed.work for machine in MACHINES)


def test_an_unknown_row_is_refused_with_the_names_there_are(tmp_path):
    with pytest.raises(UsageError, match=r"mscoco_task3.*flickr30k"):
        plan("picture", tmp_path, None)


def test_the_nearest_row_is_suggested_and_torch_is_not_imported_for_it():
    code = "import sys; from genius_search.cli import main; main(['repro', 'cir_task7']); print('torch' in sys.modules)"
    done = subprocess.run(  # noqa: S603  our own line
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "did you mean cirr_task7?" in done.stderr
    assert done.stdout.strip() == "False"


def test_mscoco_is_another_name_of_coco(tmp_path):
    assert plan("mscoco", tmp_path, None) == plan("coco", tmp_path, None)


def test_the_tables_here_know_every_row():
    assert tuple(MTEB) == PAPER_ROWS
    assert set(IMAGE_FOLDERS) == {name.rpartition("_")[0] for name in PAPER_ROWS}


def test_a_row_of_texts_needs_no_pictures():
    assert image_folders(["webqa_task1"]) == []
    assert image_folders(["infoseek_task6", "oven_task8"]) == ["mbeir_images/oven_images"]
    assert plan("webqa_task1", Path("M-BEIR"), None, pools=["local"]).download_gigabytes == 0
    assert plan("webqa_task1", Path("M-BEIR"), None).download_gigabytes == 169.3
    assert plan("webqa_task2", Path("M-BEIR"), None, pools=["local"]).download_gigabytes == 169.3


def test_the_union_is_encoded_whatever_the_row():
    work = work_of(["cirr_task7"], "global")
    images = sum(SIZES[name].pool for name in PAPER_ROWS if TASKS[int(name[-1])][1] is not Modality.TEXT)
    assert work.candidates == UNION_SIZE
    assert work.queries == 4_170
    assert work.images == images + 4_170
    assert work.images + work.texts >= UNION_SIZE + 2 * 4_170
    local = work_of(["cirr_task7"], "local")
    assert (local.candidates, local.images, local.texts) == (21_551, 25_721, 4_170)


@pytest.mark.parametrize("name", ["all", "cirr_task7", "flickr30k"])
def test_the_commands_shown_exist(name):
    for command in plan(name, Path("DATA"), None).commands:
        first, *words = shlex.split(command)
        if first == "genius":
            assert {words[0], " ".join(words[:2])} & set(all_commands()), command


def test_what_is_there_is_found(cirr, trained):
    needed = plan("cirr_task7", cirr, trained.model)
    assert needed.missing == []
    assert needed.pools == ("local",)
    (cirr / pool_file("cirr_task7")).unlink()
    (missing,) = plan("cirr_task7", cirr, trained.model).missing
    assert missing.path == pool_file("cirr_task7")


def test_the_global_pool_needs_its_file_and_everybodys_pictures(cirr, trained):
    (cirr / UNION_POOL).parent.mkdir(parents=True)
    (cirr / UNION_POOL).touch()
    assert plan("cirr_task7", cirr, trained.model).pools == ("local",)
    for folder in IMAGE_FOLDERS.values():
        (cirr / folder).mkdir(exist_ok=True)
    assert plan("cirr_task7", cirr, trained.model).pools == ("local", "global")
    assert plan("cirr_task7", cirr, trained.model, pools=["local"]).pools == ("local",)


def test_what_is_for_the_local_pool_alone_leaves_the_union_out(tmp_path):
    both = plan("cirr_task7", tmp_path, None)
    local = plan("cirr_task7", tmp_path, None, pools=["local"])
    assert any(UNION_POOL in command for command in both.commands)
    assert not any(UNION_POOL in command for command in local.commands)
    assert local.commands[-1].endswith("--pools local --run")
    assert [work.pool for work in local.work] == ["local"]
    assert {one.pool for one in local.published} == {"local"}
    assert both.file_gigabytes - local.file_gigabytes == pytest.approx(2.43)
    assert local.feature_gigabytes < 0.1 < both.feature_gigabytes


def test_a_pool_that_is_asked_for_has_to_be_there(cirr, trained):
    needed = plan("cirr_task7", cirr, trained.model, pools=["local", "global"])
    assert needed.pools == ()
    with pytest.raises(ArtifactMissing, match=UNION_POOL):
        needed.require()
    with pytest.raises(UsageError, match="coco has one pool"):
        plan("coco", cirr, None, pools=["global"])


def test_what_is_there_is_not_fetched_again(cirr, trained):
    needed = plan("cirr_task7", cirr, trained.model)
    assert len(needed.commands) == 1
    assert "--run" in needed.commands[0]
    assert (needed.download_gigabytes, needed.unpacked_gigabytes, needed.file_gigabytes) == (0, 0, 0)
    assert needed.mteb == ()
    (cirr / qrels_file("cirr_task7")).unlink()
    fetch, *_ = plan("cirr_task7", cirr, trained.model, pools=["local"]).commands
    assert fetch.count("--include") == 1
    assert qrels_file("cirr_task7") in fetch


def test_an_archive_that_is_there_is_only_unpacked(cirr, trained):
    (cirr / "mbeir_images" / "cirr_images").rmdir()
    (cirr / "mbeir_images.tar.gz.part-00").touch()
    needed = plan("cirr_task7", cirr, trained.model, pools=["local"])
    assert (needed.download_gigabytes, needed.unpacked_gigabytes) == (0, 169.3)
    assert not any("hf download" in command for command in needed.commands)
    assert needed.commands[0].startswith("cat ")


def test_files_that_are_there_have_their_own_sizes(cirr, trained):
    sizes = {file.path: file.gigabytes for file in plan("cirr_task7", cirr, trained.model).files}
    for path in (query_file("cirr_task7"), "instructions/query_instructions.tsv"):
        assert sizes[path] == (cirr / path).stat().st_size / 1e9
    assert sizes[str(trained.model)] > 1e-6


def test_a_first_look_finds_what_is_not_m_beirs(cirr):
    found = {check.what: check for check in checks(cirr, ["cirr_task7"], pools=["local"])}
    assert not found[f"{query_file('cirr_task7')}: records"].ok
    assert found[f"{query_file('cirr_task7')}: records"].expected == "4,170"
    assert found["cirr_task7: instructions"].ok
    assert found["cirr_task7: modality of the first query"].ok
    assert found["mbeir_cirr_task7_test_qrels.txt: columns"].ok
    assert found["cirr_task7: first pictures"].ok
    (cirr / "mbeir_images" / "catalogue_images").unlink()
    again = {check.what: check for check in checks(cirr, ["cirr_task7"], pools=["local"])}
    assert again["cirr_task7: first pictures"].found == "0"
    assert not again["cirr_task7: first pictures"].ok


@pytest.mark.parametrize(("off", "ok"), [(0.0, True), (0.0029, True), (-0.0031, False)])
def test_exact_search_is_judged_within_the_tolerance(off, ok):
    (verdict,) = verdicts([replace(CIRR, measures={"R@5": 0.4532 + off})])
    assert verdict.ok is ok
    assert verdict.score == pytest.approx(45.32 + 100 * off)
    assert [one.value for one in verdict.references] == [45.32, 44.6]


def test_of_generation_it_is_told_what_the_paper_says_and_nothing_is_judged():
    (verdict,) = verdicts([replace(CIRR, method="generative")])
    assert verdict.ok is None
    assert [one.value for one in verdict.references] == [20.7]


def test_other_sizes_are_neither_judged_nor_compared():
    (verdict,) = verdicts([replace(CIRR, queries=12)])
    assert (verdict.ok, verdict.references) == (None, [])


def test_methods_without_a_published_rival_have_no_verdict():
    assert verdicts([replace(CIRR, method="exact-codes")]) == []


def test_the_command_tells_without_files_what_is_needed(capsys, tmp_path):
    assert main(["repro", "cirr_task7", "--data", str(tmp_path / "M-BEIR")]) == 0
    said = capsys.readouterr().out
    for part in (
        "missing  query/test/mbeir_cirr_task7_test.jsonl",
        "5.13 GB",
        "an estimate (169.3 GB the archive",
        "docs/mteb.md",
        "always the first instruction, scores over the whole vocabulary",
        "169.3 GB",
        "mteb/mbeir_cirr_task7@bb0713",
        "4,170 queries, 21,551 candidates",
        "genius import clip-sf",
        "cirr_task7, local, exact-raw: 45.32",
        "within 0.3",
    ):
        assert part in said, part


def test_running_without_the_files_is_refused(capsys, tmp_path):
    flags = ["--data", str(tmp_path / "M-BEIR"), "--model", str(tmp_path / "model")]
    assert main(["repro", "cirr_task7", *flags, "--run"]) == ArtifactMissing.exit_code
    said = capsys.readouterr().err
    assert "5 of 5 files are missing" in said
    assert f"no model at {tmp_path / 'model'}" in said


def test_running_without_the_model_says_so_plainly(capsys, cirr):
    flags = ["--data", str(cirr), "--model", "nomodel"]
    assert main(["repro", "cirr_task7", *flags, "--run"]) == ArtifactMissing.exit_code
    said = capsys.readouterr().err
    assert "no model at nomodel" in said
    assert "files are missing" not in said
    assert main(["repro", "cirr_task7", *flags]) == 0
    assert "no model at nomodel" in capsys.readouterr().out


def test_with_everything_there_nothing_is_offered_for_download(capsys, cirr, trained):
    assert main(["repro", "cirr_task7", "--data", str(cirr), "--model", str(trained.model)]) == 0
    said = capsys.readouterr().out
    assert "All is there for: local. Add --run." in said
    assert "--pools local,global lists it" in said
    for part in ("169", "genius import", "hf download", "mteb/", "global pool:"):
        assert part not in said, part


def test_running_evaluates_just_this_row_and_says_why_nothing_is_beside_it(capsys, cirr, trained, tmp_path):
    rename(trained.data, cirr, "oven_task6")
    flags = ["--data", str(cirr), "--model", str(trained.model), "--out", str(tmp_path / "out")]
    assert main(["repro", "cirr_task7", *flags, "--run"]) == 1
    said, progress = capsys.readouterr()
    assert "local pool" in said
    assert "global pool" not in said
    assert "cirr R@5" in said
    assert "oven" not in said
    assert "12 of 4,170 queries" in " ".join(said.split())
    assert said.splitlines()[0].startswith("Asks as the authors' code")
    assert said.splitlines()[-1].startswith("nothing was compared: ")
    assert "[-] cirr_task7, local, generative+raw" in said
    assert "expected 4,170" in progress
    assert main(["repro", "cirr_task7", *flags, "--run", "--json"]) == 1
    written = json.loads(capsys.readouterr().out)
    assert written["compared"] is False
    assert {row["name"] for row in written["rows"]} == {"cirr_task7"}
    assert [verdict["method"] for verdict in written["verdicts"]] == [
        "exact-raw",
        "generative",
        "generative+raw",
    ]
    assert {row["queries"] for row in written["rows"]} == {12}
    assert len(MBeir(cirr).rows("test")) == 2


def test_captions_are_compared_at_three_ranks(capsys, trained, tmp_path, monkeypatch):
    data = tmp_path / "flickr"
    rename(trained.data, data, "flickr30k_task0")
    (data / "mbeir_images" / "flickr30k").mkdir()
    flags = ["--data", str(data), "--model", str(trained.model), "--out", str(tmp_path / "out")]
    assert main(["repro", "flickr30k", *flags]) == 0
    said = capsys.readouterr().out
    assert "60.6 / 84.0 / 90.5 (GENIUS; trained on Flickr30K)" in said
    assert "(TIGeR, LaVIT; training data not noted)" in said
    kind = CAPTION_SETS["flickr30k"]
    assert main(["repro", "flickr30k", *flags, "--run"]) == 1
    said = capsys.readouterr().out
    assert "(this model)" in said
    assert "TIGeR" not in said
    assert "12 of 5,000 queries" in said
    own = kind._replace(queries=12, images=int(re.search(r"pool ([\d,]+) of", said)[1]))
    monkeypatch.setitem(CAPTION_SETS, "flickr30k", own)
    assert main(["repro", "flickr30k", *flags, "--run"]) == 0
    said = capsys.readouterr().out
    assert "TIGeR" in said
    assert "nothing was compared" not in said


def test_a_row_of_the_right_size_is_compared(tmp_path):
    needed = plan("cirr_task7", tmp_path, None)
    assert nothing_compared(needed, [CIRR]) is None
    assert "cirr_task7, local: 12 of 4,170" in (nothing_compared(needed, [replace(CIRR, queries=12)]) or "")


def test_all_published_numbers_are_listed(capsys):
    assert main(["repro", "--list"]) == 0
    assert capsys.readouterr().out.startswith("# Published results")
    assert main(["repro", "--list", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == len(PAPER_ROWS)
    assert main(["repro"]) == UsageError.exit_code
