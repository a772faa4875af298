from genius_search.records import Modality, Query
from research.mbeir_files import write_queries

TEXT, BOTH = Modality.TEXT, Modality.IMAGE_TEXT


def test_a_query_is_written_with_exactly_the_fields_of_the_format(tmp_path):
    path = tmp_path / "new" / "q.jsonl"
    write_queries(path, [Query("8:1", BOTH, "as a dog", "a.jpg", ("8:2",), 7)])
    assert path.read_bytes() == (
        b'{"qid": "8:1", "query_txt": "as a dog", "query_img_path": "a.jpg", "query_modality": "image,text", '
        b'"query_src_content": null, "pos_cand_list": ["8:2"], "neg_cand_list": [], "task_id": 7}\n'
    )
