import pytest

from genius_search.data.mbeir import read_candidates
from genius_search.errors import BadData
from genius_search.records import Candidate, Modality, Query
from research.mbeir_files import write_candidates, write_qrels, write_queries

TEXT, BOTH = Modality.TEXT, Modality.IMAGE_TEXT


def test_a_query_is_written_with_exactly_the_fields_of_the_format(tmp_path):
    path = tmp_path / "new" / "q.jsonl"
    assert write_queries(path, [Query("8:1", BOTH, "as a dog", "a.jpg", ("8:2",), (), 7)]) == 1
    assert path.read_bytes() == (
        b'{"qid": "8:1", "query_txt": "as a dog", "query_img_path": "a.jpg", "query_modality": "image,text", '
        b'"query_src_content": null, "pos_cand_list": ["8:2"], "neg_cand_list": [], "task_id": 7}\n'
    )


def test_a_candidate_is_written_with_exactly_the_fields_of_the_format(tmp_path):
    write_candidates(tmp_path / "c.jsonl", [Candidate("8:1", TEXT, "ünï")])
    assert (tmp_path / "c.jsonl").read_text(encoding="utf-8") == (
        '{"did": "8:1", "txt": "ünï", "img_path": null, "modality": "text", "src_content": null}\n'
    )


def test_qrels_are_written_in_five_columns(tmp_path):
    queries = [Query("8:1", TEXT, "x", positives=("8:2", "8:3"), task_id=0)]
    assert write_qrels(tmp_path / "q.txt", queries) == 2
    assert (tmp_path / "q.txt").read_text() == "8:1 0 8:2 1 0\n8:1 0 8:3 1 0\n"
    with pytest.raises(BadData, match="no task number"):
        write_qrels(tmp_path / "r.txt", [Query("8:1", TEXT, "x", positives=("8:2",))])


def test_a_writer_that_is_interrupted_leaves_the_old_file(tmp_path):
    path = tmp_path / "c.jsonl"
    write_candidates(path, [Candidate("1:1", TEXT, "old")])

    def half():
        yield Candidate("1:1", TEXT, "new")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_candidates(path, half())
    assert [candidate.text for candidate in read_candidates(path)] == ["old"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["c.jsonl"]
