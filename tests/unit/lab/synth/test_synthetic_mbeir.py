from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from genius_search.cli import main
from genius_search.data.check import check
from genius_search.data.mbeir import (
    PAPER_ROWS,
    Instructions,
    MBeir,
    read_candidates,
    read_qrels,
    read_queries,
)
from genius_search.errors import UsageError
from genius_search.lab.synth.mbeir import LONGEST_SIDE, LONGEST_TEXT, ROWS, UPSAMPLED, draw_synthetic_mbeir
from genius_search.records import TASKS, Modality, parse_id

SHARE = 0.0001


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A tiny synthetic M-BEIR; nobody may change it."""
    out = tmp_path_factory.mktemp("rehearsal") / "mbeir"
    draw_synthetic_mbeir(out, share=SHARE)
    return out


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """The same without pictures; nobody may change it either."""
    out = tmp_path_factory.mktemp("bare") / "mbeir"
    assert draw_synthetic_mbeir(out, share=SHARE, pictures=0)["pictures"] == 0
    return out


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_check_finds_nothing_at_all(root):
    assert check(root).findings == ()


def test_there_are_the_sixteen_rows_of_the_papers_with_their_ids(root):
    rows = MBeir(root).rows("test")
    assert tuple(row.name for row in rows) == PAPER_ROWS
    numbers = {row.dataset: row.dataset_id for row in rows}
    assert numbers["visualnews"] == 0
    assert numbers == {row.dataset: row.dataset_id for row in ROWS}
    assert [row.name for row in MBeir(root).rows("val")] == list(PAPER_ROWS)


def test_the_real_sizes_are_the_published_ones():
    assert sum(row.queries for row in ROWS) == 190_573
    assert sum(row.pool for row in ROWS) == 5_609_079
    assert sum(row.train for row in ROWS) == 1_150_203
    whole = [row.scaled(1.0) for row in ROWS]
    assert [(row.queries, row.pool) for row in whole] == [(row.queries, row.pool) for row in ROWS]
    assert sum(row.scaled(0.01).pool for row in ROWS) == pytest.approx(56_091, abs=8)


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if row.dataset != "infoseek"],
    ids=lambda row: row.name,
)
def test_at_full_size_positives_are_as_many_as_published_and_lie_in_the_pool(row):
    published = {"visualnews_task0": (1.000, 2), "mscoco_task0": (1.007, 8), "fashion200k_task0": (2.82, 35)}
    published |= {"webqa_task1": (2.04, 4), "edis_task2": (2.57, 8), "webqa_task2": (1.44, 2)}
    published |= {"mscoco_task3": (4.998, 5), "fashioniq_task7": (1.002, 4), "cirr_task7": (1.011, 3)}
    average, most = published.get(row.name, (1.0, 1))
    starts = row.block.starts(row.pool)
    asked = min(row.queries, len(starts) - 1)
    assert starts[-1] <= row.pool
    assert starts[asked] / asked == pytest.approx(average, rel=0.01)
    assert max(np.diff(starts[:101])) == most


def test_training_queries_are_not_split_by_task_and_mscoco_has_pools_of_its_own(root):
    names = {path.name for path in (root / "query" / "train").iterdir()}
    assert names == {f"mbeir_{row.dataset}_train.jsonl" for row in ROWS}
    local = {path.name.removesuffix("_cand_pool.jsonl") for path in MBeir(root).local_pools()}
    for task in (0, 3):
        assert {f"mbeir_mscoco_task{task}_test", f"mbeir_mscoco_task{task}_val"} <= local
        assert f"mbeir_mscoco_task{task}" not in local
    assert len(local) == 18


def test_the_union_pool_is_the_local_pools_one_after_another(root):
    rows = MBeir(root).rows("test")
    parts = b"".join(row.local_pool.read_bytes() for row in rows)
    assert (root / "cand_pool/global/mbeir_union_test_cand_pool.jsonl").read_bytes() == parts
    for split in ("train", "val"):
        assert (root / f"cand_pool/global/mbeir_union_{split}_cand_pool.jsonl").stat().st_size


def test_small_data_sets_are_repeated_in_the_union_training_file(root):
    (union,) = (root / "query" / "union_train").iterdir()
    assert union.name == "mbeir_union_up_train.jsonl"
    lines = Counter(row["qid"] for row in rows_of(union))
    names = {row.dataset_id: row.dataset for row in ROWS}
    for dataset_id, dataset in names.items():
        counts = [count for qid, count in lines.items() if parse_id(qid)[0] == dataset_id]
        assert len(counts) == len(rows_of(root / f"query/train/mbeir_{dataset}_train.jsonl"))
        assert (max(counts) > 1) == (dataset in UPSAMPLED)


def test_query_ids_are_counted_anew_in_each_split(root):
    contents = {
        split: {
            query.qid: (query.text, query.image)
            for path in MBeir(root).query_files(split)
            for query in read_queries(path)
        }
        for split in ("train", "val", "test")
    }
    assert all("0:1" in queries for queries in contents.values())
    assert len({queries["4:1"] for queries in contents.values()}) == 3


def test_qrels_have_five_columns_and_repeat_the_positives(root):
    for row in MBeir(root).rows("test"):
        lines = [line.split() for line in row.qrels.read_text().splitlines()]
        assert {len(line) for line in lines} == {5}
        assert {line[4] for line in lines} == {str(row.task_id)}
        judged = read_qrels(row.qrels)
        asked = {query.qid: set(query.positives) for query in read_queries(row.queries)}
        assert {qid: set(dids) for qid, dids in judged.items()} == asked
    assert len(list((root / "qrels" / "train").iterdir())) == 10


def test_the_instructions_have_the_real_files_traps(root):
    lines = (root / "instructions/query_instructions.tsv").read_text().splitlines()
    assert len(lines) == 17
    assert all(len(line.split("\t")) == 8 for line in lines)
    found = Instructions.read(root / "instructions/query_instructions.tsv").rows
    assert {tuple(key) for key in found} == {(row.dataset_id, *TASKS[row.task_id]) for row in ROWS}
    for wanted in (Modality.TEXT, Modality.IMAGE_TEXT):
        assert found[5, Modality.IMAGE_TEXT, wanted] == found[6, Modality.IMAGE_TEXT, wanted]
    for dataset_id in (2, 3):
        for text in found[dataset_id, Modality.TEXT, Modality.IMAGE_TEXT]:
            assert "image" in text
            assert not {"text", "passage", "paragraph", "caption"} & set(text.lower().strip("?.").split())


def test_keys_are_absent_or_null_and_their_order_varies(root):
    pools = {row.name: rows_of(row.local_pool) for row in MBeir(root).rows("test")}
    assert all("img_path" not in row for row in pools["webqa_task1"])
    assert all("src_content" not in row for row in pools["visualnews_task0"] + pools["visualnews_task3"])
    assert all(row["img_path"] is None for row in pools["oven_task6"])
    assert all(row["txt"] is None and row["src_content"] is None for row in pools["mscoco_task0"])
    assert len({tuple(row) for row in pools["cirr_task7"]}) > 1
    train = {
        dataset: rows_of(root / f"query/train/mbeir_{dataset}_train.jsonl") for dataset in ("cirr", "oven")
    }
    assert all("task_id" not in row for row in train["cirr"])
    assert {row["task_id"] for row in train["oven"]} == {6, 8}
    everything = [row["modality"] for rows in pools.values() for row in rows]
    assert set(everything) == {"text", "image", "image,text"}


def test_hard_negatives_are_where_the_real_ones_are(root):
    data = MBeir(root)
    modality = {
        candidate.did: candidate.modality
        for path in data.global_pool("test")
        for candidate in read_candidates(path)
    }
    some = {"webqa", "edis", "nights", "cirr"}
    for row in data.rows("test"):
        queries = list(read_queries(row.queries))
        assert any(query.negatives for query in queries) == (row.dataset in some)
        assert not any(set(query.negatives) & set(query.positives) for query in queries)
        assert all(did in modality for query in queries for did in query.negatives)
        if row.dataset == "nights":
            assert {len(query.negatives) for query in queries} == {1}
        if row.dataset == "webqa":
            wanted = TASKS[row.task_id][1]
            assert any(modality[did] is not wanted for query in queries for did in query.negatives)


def test_oven_and_infoseek_answer_each_other_the_own_data_set_first(root):
    for row in MBeir(root).rows("test"):
        if row.dataset not in {"oven", "infoseek"}:
            continue
        pool = {candidate.did for candidate in read_candidates(row.local_pool)}
        queries = list(read_queries(row.queries))
        datasets = [[parse_id(did)[0] for did in query.positives] for query in queries]
        assert all(numbers[0] == row.dataset_id for numbers in datasets)
        assert {number for numbers in datasets for number in numbers} == {5, 6}
        absent = sum(did not in pool for query in queries for did in query.positives)
        total = sum(len(query.positives) for query in queries)
        assert absent > total / 2 if row.dataset == "oven" else absent > 0


def test_some_queries_have_many_answers_and_some_texts_are_very_long(root):
    rows = {row.name: row for row in MBeir(root).rows("test")}
    most = {
        name: max(len(query.positives) for query in read_queries(row.queries)) for name, row in rows.items()
    }
    assert most["mscoco_task0"] > 4  # one caption, said of several pictures
    assert most["mscoco_task3"] == 5
    assert most["fashion200k_task0"] > 4
    assert most["nights_task4"] == most["visualnews_task3"] == 1
    lengths = [len(candidate.text or "") for candidate in read_candidates(rows["oven_task6"].local_pool)]
    assert max(lengths) == LONGEST_TEXT
    assert sorted(lengths)[-2] < 1_000


def test_pictures_lie_where_m_beir_has_them_and_one_is_enormously_wide(root):
    folders = {path.name for path in (root / "mbeir_images").iterdir()}
    datasets = {row.dataset for row in ROWS} - {"infoseek"}
    assert folders == {f"{dataset}_images" for dataset in datasets}
    (oven,) = [row for row in MBeir(root).rows("test") if row.name == "oven_task8"]
    *_, last = read_candidates(oven.local_pool)
    with Image.open(root / last.image) as picture:
        assert picture.size == (LONGEST_SIDE, 256)
    files = [path for path in (root / "mbeir_images").rglob("*") if path.is_file()]
    assert len({path.stat().st_ino for path in files}) < len(files) / 4


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(root, bare, tmp_path):
    draw_synthetic_mbeir(tmp_path / "other", share=SHARE, pictures=0, seed=1)
    for path in sorted(root.rglob("*.jsonl")):
        relative = path.relative_to(root)
        assert (bare / relative).read_bytes() == path.read_bytes()
    pool = "cand_pool/local/mbeir_edis_task2_cand_pool.jsonl"
    assert (tmp_path / "other" / pool).read_bytes() != (root / pool).read_bytes()


def test_without_pictures_a_check_that_skips_them_says_so_once(bare):
    assert not (bare / "mbeir_images").exists()
    report = check(bare, decode_images=False)
    (finding,) = report.findings
    assert (finding.kind, finding.severity, finding.count) == ("no-images", "warning", report.num_images)


def test_the_command_says_what_was_drawn_and_does_nothing_twice(root, capsys):
    assert main(["data", "rehearsal", "--share", str(SHARE), "--out", str(root), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["drawn"] is False
    assert facts["rows"] == 16
    assert facts["candidates"]["test"] == sum(
        len(rows_of(row.local_pool)) for row in MBeir(root).rows("test")
    )
    assert main(["data", "rehearsal", "--share", str(SHARE), "--out", str(root)]) == 0
    assert "16" in capsys.readouterr().out


@pytest.mark.parametrize(
    "settings", [{"share": 0.0}, {"share": 1.5}, {"share": 0.1, "seed": -1}, {"share": 0.1, "pictures": -1}]
)
def test_impossible_numbers_are_refused(tmp_path, settings):
    with pytest.raises(UsageError, match="give a number"):
        draw_synthetic_mbeir(tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


def test_a_folder_with_something_else_is_left_alone(root, tmp_path):
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(UsageError, match="give another folder"):
        draw_synthetic_mbeir(tmp_path, share=SHARE)
    with pytest.raises(UsageError, match="seed 5"):
        draw_synthetic_mbeir(root, share=SHARE, seed=5)


def test_rows_keep_a_few_dozens_of_everything_however_small_the_share():
    for row in ROWS:
        tiny = row.scaled(1e-6)
        assert tiny.queries >= 24
        assert tiny.pool >= 48
        assert tiny.train >= 48
        assert dataclasses.replace(tiny, val=0).name == row.name
