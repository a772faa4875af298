from pathlib import Path

import pytest

from genius_search.data.mbeir import read_qrels
from genius_search.errors import BadRecord


def qrels_file(path: Path, *rows: bytes) -> Path:
    path.write_bytes(b"".join(row + b"\n" for row in rows))
    return path


def test_qrels_have_four_or_five_columns(tmp_path):
    path = qrels_file(tmp_path / "q.txt", b"0:1 0 0:2 1 0", b"0:1\t0\t0:3\t2", b"", b"0:2 0 0:2 0 0")
    assert read_qrels(path) == {"0:1": {"0:2": 1, "0:3": 2}, "0:2": {"0:2": 0}}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (b"9:1 0 9:1", "3 columns"),
        (b"9:1 0 9:1 1 0 0", "6 columns"),
        (b"9:1 0 9:1 x 0", "relevance 'x'"),
        (b"9:1 0 9:1 1.5", r"relevance '1\.5'"),
        (b"9:1 0 9:1 -1", "relevance '-1'"),
        ("9:1 0 9:1 ²".encode(), "relevance '²'"),
        (b"9:1 0 9:1 " + b"1" * 5_000, "digits"),
        (b"9:1 0 cat 1 0", "'cat' is not of the form"),
        (b"cat 0 9:1 1 0", "'cat' is not of the form"),
        (b"\xff 0 9:1 1 0", "utf-8"),
        (b"9:9 0 9:9 2", "9:9 9:9 has another relevance in an earlier line"),
    ],
)
def test_a_bad_line_is_named_with_data_set_split_file_and_number(tmp_path, row, problem):
    path = qrels_file(tmp_path / "mbeir_cirr_task7_test_qrels.txt", b"9:9 0 9:9 1", row)
    with pytest.raises(BadRecord, match=problem) as caught:
        read_qrels(path)
    assert (caught.value.file, caught.value.line) == (path, 2)
    assert "cirr_task7, test" in str(caught.value)


def test_in_trecs_layout_ids_are_any_words_and_relevances_may_be_negative(tmp_path):
    path = qrels_file(tmp_path / "q.txt", b"cat 0 photos/cat.jpg 1", b"cat 0 clueweb09-en -2")
    assert read_qrels(path, layout="trec") == {"cat": {"photos/cat.jpg": 1, "clueweb09-en": -2}}
    with pytest.raises(BadRecord, match="'cat' is not of the form"):
        read_qrels(path)
    with pytest.raises(BadRecord, match=r"relevance '1\.5' is not a whole number"):
        read_qrels(qrels_file(tmp_path / "q.txt", b"cat 0 dog 1.5"), layout="trec")
