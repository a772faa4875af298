"""Data sets in M-BEIR's layout: records, qrels, instructions, and which files belong to what."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from genius_search import records
from genius_search.data.mbeir import (
    Instructions,
    MBeir,
    read_candidates,
    read_qrels,
    read_queries,
)
from genius_search.errors import BadData, BadRecord
from genius_search.index.pool import open_pool
from genius_search.records import Modality

TEXT, IMAGE, BOTH = Modality.TEXT, Modality.IMAGE, Modality.IMAGE_TEXT


def lines(path: Path, *rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(
        b"".join(
            (row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows
        )
    )
    return path


def text_query(qid="9:1", **more):
    return {
        "qid": qid,
        "query_txt": "a cat",
        "query_modality": "text",
        "pos_cand_list": ["9:1"],
        **more,
    }


def text_candidate(did="9:1", **more):
    return {"did": did, "txt": "a cat", "modality": "text", **more}


def candidates_of(path, *rows):
    return list(read_candidates(lines(path, *rows)))


@pytest.mark.parametrize("spelling", ["image,text", "text,image", "image, text"])
def test_both_orders_of_image_text_are_understood(tmp_path, spelling):
    row = {"did": "1:1", "txt": "x", "img_path": "a.jpg", "modality": spelling}
    assert candidates_of(tmp_path / "c.jsonl", row)[0].modality is BOTH


def test_blank_lines_a_byte_order_mark_and_windows_line_ends_are_tolerated(tmp_path):
    data = (
        b"\xef\xbb\xbf"
        + json.dumps(text_candidate("9:1")).encode()
        + b"\r\n\r\n  \n"
        + json.dumps(text_candidate("9:2")).encode()
    )
    (tmp_path / "c.jsonl").write_bytes(data)
    assert [candidate.did for candidate in read_candidates(tmp_path / "c.jsonl")] == ["9:1", "9:2"]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (b"{not json}", "not valid JSON"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b"[" * 100_000, "recursion"),
        (b"[1]", "expected an object"),
        ({"txt": "x", "modality": "text"}, "did"),
        (text_candidate(did="seven"), "not of the form"),
        (text_candidate(did="9:10000000"), "below 10,000,000"),
        (text_candidate(modality="video"), "not one of"),
        (text_candidate(txt=" "), "neither image nor text"),
        (text_candidate(img_path="a.jpg"), "image and text"),
        ({"did": "9:1", "modality": "image", "img_path": "a\0.jpg"}, "NUL character"),
        (b'{"did": "9:1", "modality": "text", "txt": "\\ud800"}', "surrogates"),
    ],
)
def test_a_bad_candidate_is_named_by_file_and_line(tmp_path, row, problem):
    path = lines(tmp_path / "c.jsonl", text_candidate("9:5"), b"", row)
    with pytest.raises(BadRecord) as caught:
        list(read_candidates(path))
    assert problem in caught.value.problem
    assert (caught.value.file, caught.value.line) == (path, 3)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"qid": None}, "qid"),
        ({"qid": "9:500000"}, "below 500,000"),
        ({"query_modality": "image"}, "there is text"),
        ({"task_id": True}, "task_id"),
        ({"pos_cand_list": ["x"]}, "not of the form"),
    ],
)
def test_a_bad_query_is_named(tmp_path, more, problem):
    with pytest.raises(BadRecord) as caught:
        list(read_queries(lines(tmp_path / "q.jsonl", text_query(**more))))
    assert problem in caught.value.problem


@pytest.fixture
def layout(tmp_path):
    """A small data set: two rows of COCO with pools of their own, one of Fashion200K."""
    root = tmp_path / "M-BEIR"
    for name, dataset, pool in (
        ("mscoco_task0", 9, "mscoco_task0_test"),
        ("mscoco_task3", 9, "mscoco_task3"),
        ("fashion200k_task0", 1, "fashion200k_task0"),
        ("zebra_task1", 40, "zebra_task1"),
    ):
        lines(root / "query/test" / f"mbeir_{name}_test.jsonl", text_query(f"{dataset}:1"))
        lines(
            root / "cand_pool/local" / f"mbeir_{pool}_cand_pool.jsonl",
            text_candidate(f"{dataset}:1"),
        )
    lines(root / "cand_pool/local/mbeir_mscoco_task0_val_cand_pool.jsonl", text_candidate("9:3"))
    lines(root / "query/train/mbeir_mscoco_train.jsonl", text_query("9:1"))
    lines(root / "qrels/test/mbeir_mscoco_task0_test_qrels.txt", b"9:1 0 9:1 1 0")
    return root


def test_rows_come_by_name(layout):
    rows = MBeir(layout).rows("test")
    assert [row.name for row in rows] == [
        "fashion200k_task0",
        "mscoco_task0",
        "mscoco_task3",
        "zebra_task1",
    ]
    assert [row.task_id for row in rows] == [0, 0, 3, 1]
    assert [row.qrels is None for row in rows] == [True, False, True, True]
    assert rows[1].dataset == "mscoco"


def test_union_files_go_before_those_of_data_sets_and_a_splits_own_pool_before_the_plain_one(
    layout,
):
    data = MBeir(layout)
    plain = lines(
        layout / "cand_pool/local/mbeir_mscoco_task0_cand_pool.jsonl", text_candidate("9:4")
    )
    assert data.rows("test")[1].local_pool.name == "mbeir_mscoco_task0_test_cand_pool.jsonl"
    data.rows("test")[1].local_pool.unlink()
    assert data.rows("test")[1].local_pool == plain
    assert data.global_pool("test") == [row.local_pool for row in data.rows("test")]
    assert [path.name for path in data.training_queries()] == ["mbeir_mscoco_train.jsonl"]
    assert data.training_pools() == data.local_pools()
    queries = lines(layout / "query/union_train/mbeir_union_up_train.jsonl", text_query())
    test, train = (
        lines(layout / f"cand_pool/global/mbeir_union_{split}_cand_pool.jsonl", text_candidate())
        for split in ("test", "train")
    )
    assert (data.global_pool("test"), data.training_queries(), data.training_pools()) == (
        [test],
        [queries],
        [train],
    )


def test_a_folder_of_another_layout_says_what_was_expected(tmp_path):
    with pytest.raises(BadData, match="no query and no cand_pool"):
        MBeir(tmp_path)
    with pytest.raises(BadData, match="no such folder"):
        MBeir(tmp_path / "gone")


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("mbeir_mscoco_test.jsonl", "task"),
        ("mbeir_mscoco_task5_test.jsonl", "task"),
        ("mbeir_nights_task4_test.jsonl", "mbeir_nights_task4_cand_pool"),
    ],
)
def test_a_row_without_a_task_or_a_pool_is_refused(layout, name, error):
    lines(layout / "query/test" / name, text_query())
    with pytest.raises(BadData, match=error):
        MBeir(layout).rows("test")


def test_an_image_path_stays_inside_the_data_set(layout):
    data = MBeir(layout)
    assert data.image_path("mbeir_images/a.jpg") == layout / "mbeir_images/a.jpg"
    for path in ("/etc/passwd", "../a.jpg", "mbeir_images/../../a.jpg"):
        with pytest.raises(BadData, match="leads out"):
            data.image_path(path)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir])
def test_lines_that_would_never_end_are_not_read(tmp_path, make):
    make(tmp_path / "pool.jsonl")
    with pytest.raises(BadData, match="not a file"):
        next(read_candidates(tmp_path / "pool.jsonl"))


def test_qrels_have_four_or_five_columns_and_any_ids(tmp_path):
    path = lines(
        tmp_path / "q.txt", b"0:1 0 0:2 1 0", b"0:1\t0\t0:3\t2", b"", b"cat 0 photos/cat.jpg -2"
    )
    assert read_qrels(path) == {"0:1": {"0:2": 1, "0:3": 2}, "cat": {"photos/cat.jpg": -2}}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (b"9:1 0 9:1", "3 columns"),
        (b"9:1 0 9:1 1.5", r"relevance '1\.5'"),
        ("9:1 0 9:1 ²".encode(), "relevance '²'"),
        (b"9:1 0 9:1 " + b"1" * 5_000, "digits"),
        (b"9:9 0 9:9 2", "9:9 9:9 has another relevance in an earlier line"),
    ],
)
def test_a_bad_line_of_qrels_is_named(tmp_path, row, problem):
    path = lines(tmp_path / "q.txt", b"9:9 0 9:9 1", row)
    with pytest.raises(BadRecord, match=problem) as caught:
        read_qrels(path)
    assert (caught.value.file, caught.value.line) == (path, 2)


HEADER = b"query_modality\tcand_modality\tname\tdataset_id\tprompt_1"


def test_instructions_are_read_by_position_and_empty_cells_dropped(tmp_path):
    path = lines(
        tmp_path / "i.tsv",
        b"a\tb\tc\td\te\tf\tg",
        b"text\timage\tMSCOCO\t9\tFind me an image.\t\tShow, please\r",
        b"image,text\timage\tVisualNews\t0\tOne",
        b'text\timage\tA\t1\t"A stray quote.',
        b"text\ttext\tA\t1\tOther",
    )
    assert Instructions().lookup(9, TEXT, IMAGE) == ()
    instructions = Instructions.read(path)
    assert instructions.lookup(9, TEXT, IMAGE) == ("Find me an image.", "Show, please")
    assert instructions.lookup(0, BOTH, IMAGE) == ("One",)
    assert instructions.lookup(1, TEXT, TEXT) == ("Other",)
    with pytest.raises(BadData, match=r"data set 0, image -> image-text") as caught:
        instructions.lookup(0, IMAGE, BOTH)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "row",
    [
        b"text\timage\tA\t1",
        b"text\tvideo\tA\t1\tx",
        b"text\timage\tA\tone\tx",
        b"text\timage\tA\t1\t \t",
        b"\xff\t\t\t1\tx",
    ],
)
def test_a_bad_instruction_row_is_named(tmp_path, row):
    with pytest.raises(BadRecord) as caught:
        Instructions.read(lines(tmp_path / "i.tsv", HEADER, row))
    assert caught.value.line == 2


def test_each_id_of_a_pool_is_parsed_once_however_often_the_pool_is_read(tmp_path, monkeypatch):
    file = tmp_path / "pool.jsonl"
    lines = [{"did": f"1:{n}", "modality": "text", "txt": f"text {n}"} for n in range(5)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    parsed = []
    parse = records.parse_id
    monkeypatch.setattr(records, "parse_id", lambda text: parsed.append(text) or parse(text))
    pool = open_pool(file, captions=True)
    assert [len([*pool.items()]) for _ in range(3)] == [5, 5, 5]
    assert Counter(parsed) == {
        "1:0": 2,
        **{f"1:{n}": 1 for n in range(1, 5)},
    }  # the first was tried
    file.write_text(file.read_text().replace("1:4", "1:3"))
    with pytest.raises(BadRecord, match="occurs twice"):
        [*pool.items()]
