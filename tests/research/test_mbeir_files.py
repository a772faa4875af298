import pytest

from genius_search.errors import BadData
from genius_search.records import Modality, Query
from research.mbeir_files import write_qrels, write_queries

TEXT, BOTH = Modality.TEXT, Modality.IMAGE_TEXT


def test_a_query_is_written_with_exactly_the_fields_of_the_format(tmp_path):
    path = tmp_path / "new" / "q.jsonl"
    assert write_queries(path, [Query("8:1", BOTH, "as a dog", "a.jpg", ("8:2",), (), 7)]) == 1
    assert path.read_bytes() == (
        b'{"qid": "8:1", "query_txt": "as a dog", "query_img_path": "a.jpg", "query_modality": "image,text", '
        b'"query_src_content": null, "pos_cand_list": ["8:2"], "neg_cand_list": [], "task_id": 7}\n'
    )


def test_qrels_are_written_in_five_columns(tmp_path):
    queries = [Query("8:1", TEXT, "x", positives=("8:2", "8:3"), task_id=0)]
    assert write_qrels(tmp_path / "q.txt", queries) == 2
    assert (tmp_path / "q.txt").read_text() == "8:1 0 8:2 1 0\n8:1 0 8:3 1 0\n"
    with pytest.raises(BadData, match="no task number"):
        write_qrels(tmp_path / "r.txt", [Query("8:1", TEXT, "x", positives=("8:2",))])
