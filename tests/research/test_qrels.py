from pathlib import Path

import pytest

from genius_search.data.mbeir import read_qrels
from genius_search.errors import BadData
from research.runs import filter_to_pool, write_qrels

ANSWERS = {"9:1": {"9:7": 1, "9:3": 2}, "9:2": {"4:0": 1}}


def test_answers_outside_the_pool_are_left_out():
    assert filter_to_pool(ANSWERS, {"9:7", "4:0"}) == {"9:1": {"9:7": 1}, "9:2": {"4:0": 1}}


def test_queries_without_an_answer_in_the_pool_are_refused_and_five_of_them_named():
    qrels = {f"9:{number}": {f"9:1{number}": 1} for number in range(7)}
    with pytest.raises(BadData, match=r"7 of 7 queries .* 9:0 \(answered by 9:10\), .* 9:4 \(.*\), …\. Take"):
        filter_to_pool(qrels, {"9:2"})


def test_written_qrels_have_trecs_four_columns_and_read_back(tmp_path: Path):
    write_qrels(tmp_path / "qrels.txt", ANSWERS)
    assert (tmp_path / "qrels.txt").read_text().splitlines() == ["9:1 0 9:7 1", "9:1 0 9:3 2", "9:2 0 4:0 1"]
    assert read_qrels(tmp_path / "qrels.txt") == ANSWERS


def test_an_id_with_a_blank_cannot_be_written(tmp_path: Path):
    with pytest.raises(BadData, match="'two words'"):
        write_qrels(tmp_path / "qrels.txt", {"9:1": {"two words": 1}})
